"""Tasks that speak with the registry and the controller; only what the network does to them is tried again."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from narrowgauge.flows.evaluate import Judgement
from narrowgauge.flows.progress import Watch
from narrowgauge.flows.quantize import QuantizedCheckpoint
from narrowgauge.flows.register import register_release
from narrowgauge.flows.rollout import RolloutOutcome, StartedRollout, start_rollout, wait_for
from narrowgauge.flows.settings import read_flow_settings
from narrowgauge.flows.tasks.retries import DELAYS_S, is_transient
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving.registry import ModelVersion
from narrowgauge.serving.rollout.spec import RolloutSpec


@task(
    name="register",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=len(DELAYS_S),
    retry_delay_seconds=DELAYS_S,
    retry_condition_fn=is_transient,
)
def register_task(
    checkpoint: QuantizedCheckpoint, uri: str, judgement: Judgement, recipe: Recipe, watch: Watch
) -> ModelVersion:
    """register_release: idempotent by digest, so that a second try makes no second version."""
    settings = read_flow_settings().shared
    return register_release(checkpoint, uri, judgement, recipe=recipe, settings=settings, watch=watch)


@task(
    name="start-rollout",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=len(DELAYS_S),
    retry_delay_seconds=DELAYS_S,
    retry_condition_fn=is_transient,
)
def start_rollout_task(version: ModelVersion, spec: RolloutSpec, override: str | None, watch: Watch) -> StartedRollout:
    """start_rollout: idempotent by revision, so that a second try gets the same rollout."""
    return start_rollout(version, spec, override, settings=read_flow_settings().shared, watch=watch)


@task(name="wait-for-rollout", cache_policy=NO_CACHE, persist_result=False)
def wait_for_task(rollout: StartedRollout, watch: Watch) -> RolloutOutcome:
    """wait_for."""
    return wait_for(rollout, settings=read_flow_settings().shared, watch=watch)
