"""The main job: a recipe becomes a checkpoint, is judged, registered, and rolled out under health gates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.flows.evaluate import HeldOutText, Judgement
from narrowgauge.flows.quantize import QuantizedCheckpoint
from narrowgauge.flows.rollout import RolloutOutcome
from narrowgauge.flows.steps import Steps
from narrowgauge.quant.formats.read import build, plain
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving.registry import ModelVersion
from narrowgauge.serving.rollout.spec import RolloutSpec, read_spec

EXIT_DONE, EXIT_FAILED, EXIT_GATE = 0, 1, 3


@dataclass(frozen=True, kw_only=True)
class ReleaseRequest:
    """What to release: without `rollout` it ends at the registry; `override` rolls out what the gate rejected."""

    recipe: Recipe
    rollout: RolloutSpec | None = None
    override: str | None = None
    text: HeldOutText = field(default_factory=HeldOutText)

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON, with every default filled in."""
        mapping: dict[str, Any] = plain(self)
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ReleaseRequest":
        """The inverse of `to_mapping`, as strict as reading the files. Raises ReadError."""
        rollout = mapping["rollout"]
        return cls(
            recipe=build(Recipe, mapping["recipe"], source="recipe", registries={QuantMethod: METHODS}),
            rollout=None if rollout is None else read_spec(rollout, source="rollout"),
            override=mapping["override"],
            text=build(HeldOutText, mapping["text"], source="text"),
        )


@dataclass(frozen=True, kw_only=True)
class ReleaseOutcome:
    """What came of a release, each part by URI and digest."""

    checkpoint: QuantizedCheckpoint
    judgement: Judgement
    version: ModelVersion
    rollout: RolloutOutcome | None

    @property
    def exit_code(self) -> int:
        """0 done; 3 where the offline gate or a gate of the rollout said no; 1 where the rollout failed otherwise."""
        if self.rollout is not None:
            return EXIT_DONE if self.rollout.completed else EXIT_GATE if self.rollout.gate else EXIT_FAILED
        return EXIT_DONE if self.judgement.passed else EXIT_GATE


def release(request: ReleaseRequest, steps: Steps) -> ReleaseOutcome:
    """Runs a release to its end. What a gate says no to is an outcome, not an error."""
    checkpoint = steps.quantize(request.recipe)
    judgement = steps.evaluate(checkpoint, request.recipe, request.text)
    uri = steps.store(checkpoint)
    version = steps.register(checkpoint, uri, judgement, recipe=request.recipe)
    if request.rollout is None or not (judgement.passed or request.override):
        return ReleaseOutcome(checkpoint=checkpoint, judgement=judgement, version=version, rollout=None)
    rollout = steps.start_rollout(version, request.rollout, request.override)
    outcome = steps.wait_for(rollout)
    return ReleaseOutcome(checkpoint=checkpoint, judgement=judgement, version=version, rollout=outcome)
