"""What a rollout gate is: frozen options from the spec, a pure judgement of evidence, a verdict with a reason.

A gate never sees the network while judging. One that needs more than the gateway's records (golden prompts, later a
query or a webhook) also has `collect`, which the controller runs in the background, once for each step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

GATES: dict[str, str] = {
    "readiness": "narrowgauge.serving.rollout.gates.readiness:ReadinessGate",
    "errors": "narrowgauge.serving.rollout.gates.errors:ErrorsGate",
    "latency": "narrowgauge.serving.rollout.gates.latency:LatencyGate",
    "golden": "narrowgauge.serving.rollout.gates.golden:GoldenGate",
}

Result = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One gate's answer. `figures` are the numbers it rests on, for people and for the event log."""

    gate: str
    result: Result
    reason: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One finished request as the gateway wrote it down (times in seconds; None = there was no such moment)."""

    seq: int
    t_end: float
    model: str
    revision: str
    shadow: bool
    fault: str | None
    ttft_s: float | None
    itl_p50_s: float | None
    e2e_s: float | None
    output_tokens: int | None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RequestRecord":
        """Reads the keys that gates use and leaves the others: the gateway may add some. KeyError when one is missing."""
        names = ("ttft_s", "itl_p50_s", "e2e_s", "output_tokens")
        return cls(
            seq=value["seq"],
            t_end=value["t_end"],
            model=value["model"],
            revision=value["revision"],
            shadow=bool(value["shadow"]),
            fault=value["fault"],
            **{name: value.get(name) for name in names},
        )

    @property
    def counts(self) -> bool:
        """Whether the replica is to be judged by this request: not where the client or the gateway was at fault."""
        return self.fault in (None, "replica")

    @property
    def failed(self) -> bool:
        """Whether the replica was at fault."""
        return self.fault == "replica"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of one step's window. Records are of this window only, in the order they ended.

    `canary` and `stable` end where promotion began; `baking` are the promoted revision's requests since then.
    `last_loss` says how the last of the replicas that died did.
    `collected` is what the gate's own `collect` brought back, `collect_error` why it could not.
    """

    ready_replicas: int = 0
    wanted_replicas: int = 1
    restarts: int = 0
    last_loss: str | None = None
    canary: tuple[RequestRecord, ...] = ()
    stable: tuple[RequestRecord, ...] = ()
    baking: tuple[RequestRecord, ...] = ()
    collected: Any = None
    collect_error: str | None = None


class Gate(Protocol):
    """Options as written in the spec, and the judgement. `compares` gates are skipped for a model's first revision."""

    compares: ClassVar[bool]

    @property
    def name(self) -> str:
        """The name in the registry and in the spec."""

    def judge(self, evidence: Evidence) -> Verdict:
        """Pure: the same evidence gives the same verdict. Too little evidence is inconclusive, never pass or fail."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What `collect` may talk to: base URLs of one ready replica of each revision, and the served name."""

    model: str
    canary_url: str
    stable_url: str


@runtime_checkable
class CollectingGate(Protocol):
    """A gate that gathers evidence of its own."""

    async def collect(self, probe: Probe) -> Any:
        """Brings what `judge` finds in `evidence.collected`. Raises CollectError; it is tried again later."""


class CollectError(RuntimeError):
    """Evidence that could not be gathered this time; the message says what failed."""


def finite(values: tuple[float, ...]) -> bool:
    """False when a NaN or an infinity is among the values: statistics over those say nothing."""
    return all(math.isfinite(value) for value in values)
