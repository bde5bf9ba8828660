"""A rollout's state as the fold of its events: `replay(rollout, events)` gives what the controller had in memory.

Events are facts that were decided or observed; they are written to the store before anything is done about them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from narrowgauge.quant.formats.read import plain
from narrowgauge.serving.rollout.gates.base import Gate, Verdict
from narrowgauge.serving.rollout.spec import Revision, RolloutSpec, Step

Phase = Literal[
    "Pending",
    "Starting",
    "Shadow",
    "Canary",
    "Promoting",
    "Baking",
    "Holding",
    "Aborting",
    "Stuck",
    "Completed",
    "Aborted",
]
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]
TERMINAL: frozenset[Phase] = frozenset({"Completed", "Aborted"})
Action = Literal["promote", "pause", "resume", "abort"]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What never changes: who is to replace whom, and how. `stable` is None for a model's first revision."""

    id: str
    revision: Revision
    spec: RolloutSpec
    stable: Revision | None
    override: str | None
    created_at: float

    @property
    def new_id(self) -> str:
        """The id of the revision that is rolled out."""
        return self.revision.id

    @property
    def old_id(self) -> str | None:
        """The id of the revision to go back to, if there is one."""
        return self.stable.id if self.stable is not None else None


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A transition. `gate` is the one that said no; `deadline_at` bounds the new phase."""

    at: float
    phase: Phase
    step: int
    reason: str
    deadline_at: float
    gate: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """An operator's (or a flow's) wish, accepted for the epoch it named."""

    at: float
    action: Action


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdicts of the step's gates, in the spec's order; written when a result changes and at every transition."""

    at: float
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, kw_only=True)
class TrafficSet:
    """Which shares the router is to give (the rest goes to `stable`)."""

    at: float
    stable: str
    canary: str | None
    canary_bp: int
    shadow_bp: int

    @property
    def shares(self) -> tuple[str, str | None, int, int]:
        """What is compared with the router's read-back."""
        return self.stable, self.canary, self.canary_bp, self.shadow_bp


@dataclass(frozen=True, kw_only=True)
class ReplicaLost:
    """A replica of the new revision ended without being told to."""

    at: float
    replica: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Baked:
    """The promoted revision stood its time: from here on the old one may go, and nothing leads back."""

    at: float
    deadline_at: float


@dataclass(frozen=True, kw_only=True)
class Registered:
    """The registry holds the outcome, or has no version to hold it (`detail` says which)."""

    at: float
    detail: str


Event = Moved | Asked | Judged | TrafficSet | ReplicaLost | Baked | Registered
_KINDS: dict[str, type] = {
    cls.__name__: cls for cls in (Moved, Asked, Judged, TrafficSet, ReplicaLost, Baked, Registered)
}


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything `decide` knows of the past.

    `epoch` counts transitions and accepted wishes: a wish that names an older one was made looking at something that
    is gone. `step` is the current or last step, -1 before the first. `window_at` is when that step began and
    `promoted_at` when promotion did: together they bound the evidence. `resume` is the phase a hold goes back to and
    `stuck_in` the one that a stuck rollout is stuck in. `remaining_s` is what a hold left of the step's time.
    `last_loss` is why the newest of the `lost` replicas ended.
    """

    rollout: Rollout
    phase: Phase = "Pending"
    step: int = -1
    epoch: int = 0
    since: float = 0.0
    deadline_at: float = 0.0
    reason: str = ""
    gate: str | None = None
    asked: Action | None = None
    window_at: float | None = None
    promoted_at: float | None = None
    resume: Phase | None = None
    remaining_s: float = 0.0
    stuck_in: Phase | None = None
    traffic: TrafficSet | None = None
    verdicts: tuple[Verdict, ...] = ()
    lost: tuple[str, ...] = ()
    last_loss: str | None = None
    baked: bool = False
    registered: bool = False

    @property
    def acting_phase(self) -> Phase:
        """The phase whose work goes on: a hold keeps its step's shares, a stuck phase is still tried."""
        return self.resume or self.stuck_in or self.phase

    @property
    def terminal(self) -> bool:
        """Nothing more happens to this rollout."""
        return self.phase in TERMINAL

    @property
    def current_step(self) -> Step | None:
        """The step whose shares are in force, if any."""
        return self.rollout.spec.steps[self.step] if self.acting_phase in ("Shadow", "Canary") else None

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates that judge now: a first revision has nothing to be compared with."""
        gates = self.rollout.spec.gates_of(self.step)
        return tuple(gate for gate in gates if not gate.compares or self.rollout.stable is not None)


def begin(rollout: Rollout) -> State:
    """The state before any event."""
    deadline_at = rollout.created_at + rollout.spec.start_deadline_s
    return State(rollout=rollout, since=rollout.created_at, deadline_at=deadline_at)


def replay(rollout: Rollout, events: Iterable[Event]) -> State:
    """The state after these events."""
    state = begin(rollout)
    for event in events:
        state = apply(state, event)
    return state


def apply(state: State, event: Event) -> State:
    """The state after one event. Pure; any event may follow any other."""
    match event:
        case Moved():
            return _moved(state, event)
        case Asked():
            return dataclasses.replace(state, asked=event.action, epoch=state.epoch + 1)
        case Judged():
            return dataclasses.replace(state, verdicts=event.verdicts)
        case TrafficSet():
            return dataclasses.replace(state, traffic=event)
        case ReplicaLost():
            return dataclasses.replace(state, lost=(*state.lost, event.replica), last_loss=event.reason)
        case Baked():
            return dataclasses.replace(state, baked=True, deadline_at=event.deadline_at)
        case Registered():
            return dataclasses.replace(state, registered=True)


def _moved(state: State, event: Moved) -> State:
    changes: dict[str, Any] = {
        "phase": event.phase,
        "step": event.step,
        "epoch": state.epoch + 1,
        "since": event.at,
        "deadline_at": event.deadline_at,
        "reason": event.reason,
        "gate": event.gate or state.gate,
        "asked": None,
        "resume": None,
        "stuck_in": None,
    }
    # A step that is taken up again after a hold keeps its window: evidence against it does not expire by waiting.
    if event.phase in ("Shadow", "Canary") and event.step != state.step:
        changes["window_at"] = event.at
        changes["verdicts"] = ()
    if event.phase == "Holding":
        changes["resume"] = state.acting_phase
        changes["remaining_s"] = max(0.0, state.deadline_at - event.at)
    if event.phase == "Promoting":
        changes["promoted_at"] = event.at
    if event.phase == "Stuck":
        changes["stuck_in"] = state.acting_phase
    return dataclasses.replace(state, **changes)


def event_to_json(event: Event) -> dict[str, Any]:
    """`{"kind", "at", …}`: how an event is stored and shown."""
    return {"kind": type(event).__name__, **plain(event)}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """The event that `event_to_json` wrote. Raises KeyError or TypeError for anything else."""
    fields = dict(value)
    cls = _KINDS[fields.pop("kind")]
    if cls is Judged:
        fields["verdicts"] = tuple(Verdict(**verdict) for verdict in fields["verdicts"])
    return cast(Event, cls(**fields))
