"""Runs a release under Prefect, with a server of our own where none is named, or without it."""

from collections.abc import Callable

from narrowgauge.flows.prefect_server import prefect_session
from narrowgauge.flows.progress import Watch
from narrowgauge.flows.release import ReleaseOutcome, ReleaseRequest, release
from narrowgauge.flows.rollout import check_request
from narrowgauge.flows.settings import FlowSettings
from narrowgauge.flows.steps import Steps, direct_steps


def run_release(
    request: ReleaseRequest, *, settings: FlowSettings, watch: Watch, prefect: bool = True
) -> ReleaseOutcome:
    """Runs the release to its end; with `prefect` as a flow of tasks. Raises what its steps raise."""
    if request.rollout is not None:
        check_request(request.recipe.model.name, request.rollout, settings=settings.shared)
    if not prefect:
        return release(request, direct_steps(settings.shared, watch))
    watch.line(f"prefect: {settings.prefect_api_url or 'starting a server for this command'}")
    with prefect_session(settings):
        return run_in_session(request, watch)


def run_in_session(
    request: ReleaseRequest, watch: Watch, adapt: Callable[[Steps], Steps] | None = None
) -> ReleaseOutcome:
    """The same inside a `prefect_session` that is open already; `adapt` may wrap the steps."""
    from narrowgauge.flows.tasks.release import release_flow, task_steps

    steps = task_steps(watch)
    return release_flow(adapt(steps) if adapt else steps)(request.to_mapping())
