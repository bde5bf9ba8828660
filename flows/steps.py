"""The steps of a release as values: plain calls here, Prefect tasks in flows/tasks; whoever runs a release may wrap them."""

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from narrowgauge.flows.evaluate import HeldOutText, Judgement, evaluate_checkpoint
from narrowgauge.flows.progress import Watch
from narrowgauge.flows.quantize import QuantizedCheckpoint, quantize_recipe
from narrowgauge.flows.register import register_release, store_checkpoint
from narrowgauge.flows.rollout import RolloutOutcome, StartedRollout, start_rollout, wait_for
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving.registry import ModelVersion
from narrowgauge.serving.rollout.spec import RolloutSpec
from narrowgauge.serving.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")


class Register(Protocol):
    """Registers a stored checkpoint (its URI is the second argument) with its figures and the verdict."""

    def __call__(
        self, checkpoint: QuantizedCheckpoint, uri: str, judgement: Judgement, *, recipe: Recipe
    ) -> ModelVersion:
        """The version, `candidate` moved to it if it passed."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a release does, in this order. Each step takes and returns values with URIs and digests."""

    quantize: Callable[[Recipe], QuantizedCheckpoint]
    evaluate: Callable[[QuantizedCheckpoint, Recipe, HeldOutText], Judgement]
    store: Callable[[QuantizedCheckpoint], str]
    register: Register
    start_rollout: Callable[[ModelVersion, RolloutSpec, str | None], StartedRollout]
    wait_for: Callable[[StartedRollout], RolloutOutcome]


def direct_steps(settings: Settings, watch: Watch) -> Steps:
    """The steps as plain calls."""
    return Steps(
        quantize=functools.partial(quantize_recipe, settings=settings, watch=watch),
        evaluate=functools.partial(evaluate_checkpoint, settings=settings, watch=watch),
        store=functools.partial(store_checkpoint, settings=settings),
        register=functools.partial(register_release, settings=settings, watch=watch),
        start_rollout=functools.partial(start_rollout, settings=settings, watch=watch),
        wait_for=functools.partial(wait_for, settings=settings, watch=watch),
    )


def timed(steps: Steps, seconds: dict[str, float]) -> Steps:
    """The same steps, which note how long each took in `seconds`, by name."""
    wrapped = {
        field.name: _timed(getattr(steps, field.name), field.name, seconds) for field in dataclasses.fields(steps)
    }
    return dataclasses.replace(steps, **wrapped)


def _timed(step: Callable[P, R], name: str, seconds: dict[str, float]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        started = time.monotonic()
        try:
            return step(*args, **kwargs)
        finally:
            seconds[name] = time.monotonic() - started

    return run
