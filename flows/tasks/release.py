"""The release as a Prefect flow: the same story, each step a task. Import inside `prefect_session`."""

from typing import Any

from prefect import Flow, flow

from narrowgauge.flows.evaluate import Judgement
from narrowgauge.flows.progress import Watch
from narrowgauge.flows.quantize import QuantizedCheckpoint
from narrowgauge.flows.release import ReleaseOutcome, ReleaseRequest, release
from narrowgauge.flows.steps import Steps
from narrowgauge.flows.tasks.checkpoint import evaluate_task, quantize_task, store_task
from narrowgauge.flows.tasks.rollout import register_task, start_rollout_task, wait_for_task
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving.registry import ModelVersion


def task_steps(watch: Watch) -> Steps:
    """The steps as Prefect tasks."""

    def register(checkpoint: QuantizedCheckpoint, uri: str, judgement: Judgement, *, recipe: Recipe) -> ModelVersion:
        return register_task(checkpoint, uri, judgement, recipe, watch)

    return Steps(
        quantize=lambda recipe: quantize_task(recipe, watch),
        evaluate=lambda checkpoint, recipe, text: evaluate_task(checkpoint, recipe, text, watch),
        store=store_task,
        register=register,
        start_rollout=lambda version, spec, override: start_rollout_task(version, spec, override, watch),
        wait_for=lambda rollout: wait_for_task(rollout, watch),
    )


def release_flow(steps: Steps) -> Flow[[dict[str, Any]], ReleaseOutcome]:
    """The flow over `steps` (of `task_steps`). Its one parameter is `ReleaseRequest.to_mapping()`.

    Prefect coerces typed parameters leniently (true becomes 1); a plain mapping is read by our own strict reader.
    """

    @flow(name="release", log_prints=False, persist_result=False, validate_parameters=False)
    def run(request: dict[str, Any]) -> ReleaseOutcome:
        return release(ReleaseRequest.from_mapping(request), steps)

    return run
