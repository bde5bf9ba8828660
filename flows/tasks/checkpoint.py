"""Tasks that make, judge and store a checkpoint. They take and return values with URIs and digests.

None is cached by Prefect: the same inputs find their checkpoint under work/<key>/, whoever runs them.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from narrowgauge.flows.evaluate import HeldOutText, Judgement, evaluate_checkpoint
from narrowgauge.flows.progress import Watch, WithArtifact
from narrowgauge.flows.quantize import QuantizedCheckpoint, quantize_recipe
from narrowgauge.flows.register import store_checkpoint
from narrowgauge.flows.settings import read_flow_settings
from narrowgauge.flows.tasks.retries import DELAYS_S, is_transient
from narrowgauge.quant.recipe import Recipe


@task(name="quantize", cache_policy=NO_CACHE, persist_result=False)
def quantize_task(recipe: Recipe, watch: Watch) -> QuantizedCheckpoint:
    """quantize_recipe with a progress artifact."""
    return quantize_recipe(recipe, settings=read_flow_settings().shared, watch=WithArtifact(watch, "quantize"))


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate_task(checkpoint: QuantizedCheckpoint, recipe: Recipe, text: HeldOutText, watch: Watch) -> Judgement:
    """evaluate_checkpoint with a progress artifact."""
    settings = read_flow_settings().shared
    return evaluate_checkpoint(checkpoint, recipe, text, settings=settings, watch=WithArtifact(watch, "evaluate"))


@task(
    name="store",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=len(DELAYS_S),
    retry_delay_seconds=DELAYS_S,
    retry_condition_fn=is_transient,
)
def store_task(checkpoint: QuantizedCheckpoint) -> str:
    """store_checkpoint."""
    return store_checkpoint(checkpoint, settings=read_flow_settings().shared)
