"""Readiness: the new revision's replicas answer /ready, and none keeps dying."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from narrowgauge.serving.rollout.gates.base import Evidence, Verdict


@dataclass(frozen=True, kw_only=True)
class ReadinessGate:
    """Fails as soon as replicas died more than `max_restarts` times; inconclusive while one is not ready."""

    name: Literal["readiness"]
    max_restarts: int = 1

    compares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; it must be 0 or more")

    def judge(self, evidence: Evidence) -> Verdict:
        """Counts restarts since the rollout began and replicas that are ready now."""
        figures = {
            "restarts": float(evidence.restarts),
            "ready": float(evidence.ready_replicas),
            "wanted": float(evidence.wanted_replicas),
        }
        if evidence.restarts > self.max_restarts:
            times = "once" if evidence.restarts == 1 else f"{evidence.restarts} times"
            reason = f"replicas died {times}, {self.max_restarts} allowed{_last(evidence)}"
            return Verdict(gate=self.name, result="fail", reason=reason, figures=figures)
        if evidence.ready_replicas < evidence.wanted_replicas:
            reason = f"{evidence.ready_replicas} of {evidence.wanted_replicas} replicas ready{_last(evidence)}"
            return Verdict(gate=self.name, result="inconclusive", reason=reason, figures=figures)
        return Verdict(gate=self.name, result="pass", reason="all replicas ready", figures=figures)


def _last(evidence: Evidence) -> str:
    return f"; the last that died: {evidence.last_loss}" if evidence.last_loss else ""
