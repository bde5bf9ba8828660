"""The decision: from a rollout's state and what was observed to the events that follow. No clock, no network, no store.

One call makes at most one transition. Shares are never patched: each call derives the whole traffic from the state, so
no route of an earlier phase can be left behind. The order of the checks is the policy:
an abort that was asked for, then any gate that failed, then what the phase itself waits for, then its deadline.
"""

from dataclasses import dataclass, field

from narrowgauge.serving.rollout.gates.base import Verdict
from narrowgauge.serving.rollout.state import (
    Action,
    Baked,
    Event,
    Judged,
    Moved,
    Phase,
    ReplicaLost,
    State,
    TrafficSet,
    apply,
)

JUDGED: frozenset[Phase] = frozenset({"Starting", "Shadow", "Canary", "Holding", "Promoting", "Baking"})
"""Phases in which a gate can end the rollout (Baking until it has baked)."""


@dataclass(frozen=True, kw_only=True)
class RevisionHealth:
    """Replicas of one revision: processes that live, those that are ready (and warmed up)."""

    alive: int = 0
    ready: int = 0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The world as last seen. `traffic` is the router's read-back, None where it could not be read or knows no model.

    `canary_requests` are the canary's finished requests in the step's window; `verdicts` stand in the order of
    `state.gates`; `lost` are replicas of the new revision that ended, by id with the reason.
    """

    canary: RevisionHealth = field(default_factory=RevisionHealth)
    stable: RevisionHealth = field(default_factory=RevisionHealth)
    traffic: tuple[str, str | None, int, int] | None = None
    canary_requests: int = 0
    verdicts: tuple[Verdict, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What the world should be: shares, revisions to keep running, those to leave alone, what the registry should say.

    `run` are started and restarted; `keep` are neither restarted nor stopped; all others of the model are stopped.
    `registry` is "promoted" or "aborted:GATE" when the outcome is to be recorded now.
    """

    traffic: TrafficSet | None
    run: frozenset[str]
    keep: frozenset[str] = frozenset()
    registry: str | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Events to store, the state after them, and what to do about it."""

    state: State
    events: tuple[Event, ...]
    intent: Intent


def decide(state: State, observation: Observation, now: float) -> Decision:
    """Decides what happens next. Pure: the same arguments give the same decision. `now` in seconds."""
    if state.terminal:
        return Decision(state=state, events=(), intent=_intent(state, observation))
    events: list[Event] = [
        ReplicaLost(at=now, replica=replica, reason=reason)
        for replica, reason in observation.lost
        if replica not in state.lost
    ]
    judging = state.phase in JUDGED and not state.baked
    transition = _transition(state, observation, now)
    news = [verdict.result for verdict in observation.verdicts] != [verdict.result for verdict in state.verdicts]
    if judging and observation.verdicts != state.verdicts and (news or isinstance(transition, Moved)):
        events.append(Judged(at=now, verdicts=observation.verdicts))
    if transition is not None:
        events.append(transition)
    for event in events:
        state = apply(state, event)
    traffic = _traffic(state, observation, now)
    if traffic is not None and (state.traffic is None or traffic.shares != state.traffic.shares):
        events.append(traffic)
        state = apply(state, traffic)
    return Decision(state=state, events=tuple(events), intent=_intent(state, observation))


def allowed_actions(state: State) -> tuple[Action, ...]:
    """What an operator may ask for now."""
    if state.terminal or state.baked or state.acting_phase == "Aborting":
        return ()
    match state.phase:
        case "Shadow" | "Canary":
            return ("promote", "pause", "abort")
        case "Holding":
            return ("promote", "resume", "abort")
        case _:
            return ("abort",)


def _transition(state: State, seen: Observation, now: float) -> Moved | Baked | None:
    if state.asked == "abort" and "abort" in allowed_actions(state):
        return _abort(state, now, reason="an operator asked for it", gate="operator")
    if state.phase in JUDGED and not state.baked:
        failed = next((verdict for verdict in seen.verdicts if verdict.result == "fail"), None)
        if failed is not None:
            return _abort(state, now, reason=failed.reason, gate=failed.gate)
        if _switched(state) and state.rollout.stable is not None and not seen.canary.ready and seen.stable.ready:
            return _abort(state, now, reason="the promoted revision has no ready replica", gate="readiness")
    match state.phase:
        case "Pending":
            return _move(state, now, "Starting", reason="a replica of the new revision is started")
        case "Starting":
            return _starting(state, seen, now)
        case "Shadow" | "Canary":
            return _stepping(state, seen, now)
        case "Holding":
            return _holding(state, now)
        case "Promoting":
            return _promoting(state, seen, now)
        case "Baking" | "Aborting" | "Stuck":
            return _finishing(state, seen, now)
        case _:
            raise AssertionError(f"no decision in phase {state.phase}")


def _starting(state: State, seen: Observation, now: float) -> Moved | None:
    if seen.canary.ready:
        return _next_step(state, now, "the new revision is ready")
    if now >= state.deadline_at:
        return _abort(state, now, reason="the new revision was not ready in time", gate="readiness")
    return None


def _stepping(state: State, seen: Observation, now: float) -> Moved | None:
    if state.asked == "promote":
        return _next_step(state, now, "an operator asked for it")
    if state.asked == "pause":
        return _move(state, now, "Holding", reason="an operator paused it")
    complete = len(seen.verdicts) == len(state.gates)
    waiting = [verdict for verdict in seen.verdicts if verdict.result != "pass"]
    met = _until_met(state, seen, now)
    if met and complete and not waiting:
        return _next_step(state, now, "the step has seen enough and every gate passes")
    if now < state.deadline_at:
        return None
    reason = "deadline: " + (waiting[0].reason if waiting else "the step has not seen enough requests")
    step = state.rollout.spec.steps[state.step]
    if (step.on_deadline or state.rollout.spec.on_deadline) == "hold":
        return _move(state, now, "Holding", reason=reason, gate=waiting[0].gate if waiting else None)
    return _abort(state, now, reason=reason, gate=waiting[0].gate if waiting else "deadline")


def _holding(state: State, now: float) -> Moved | None:
    if state.asked == "promote":
        return _next_step(state, now, "an operator asked for it")
    if state.asked == "resume" and state.resume is not None:
        step = state.rollout.spec.steps[state.step]
        # After a hold at the deadline nothing is left of the step's time: it gets the whole again, in the same window.
        left = state.remaining_s or step.deadline_s or state.rollout.spec.deadline_s
        return Moved(
            at=now, phase=state.resume, step=state.step, reason="an operator resumed it", deadline_at=now + left
        )
    if now >= state.deadline_at:
        return _abort(state, now, reason=f"held too long: {state.reason}", gate=state.gate or "deadline")
    return None


def _promoting(state: State, seen: Observation, now: float) -> Moved | None:
    if _switched(state) and _confirmed(state, seen):
        return _move(state, now, "Baking", reason="the router has the new revision as stable")
    if now >= state.deadline_at:
        return _abort(state, now, reason="the router did not take the promotion in time", gate="deadline")
    return None


def _finishing(state: State, seen: Observation, now: float) -> Moved | Baked | None:
    """Baking and Aborting, stuck in them or not: what each waits for, else its deadline."""
    if state.acting_phase == "Aborting":
        cleared = state.rollout.old_id is None or state.traffic is None or _cleared(state, seen)
        if cleared and seen.canary.alive == 0 and state.registered:
            return _move(state, now, "Aborted", reason=state.reason)
    elif not state.baked:
        if now >= state.since + state.rollout.spec.bake_s and seen.canary.ready and _confirmed(state, seen):
            spec = state.rollout.spec
            return Baked(at=now, deadline_at=now + spec.drain_s + spec.promote_deadline_s)
    elif state.registered and seen.stable.alive == 0 and _confirmed(state, seen):
        return _move(state, now, "Completed", reason="promoted")
    if state.phase != "Stuck" and now >= state.deadline_at:
        return _move(state, now, "Stuck", reason=f"{state.phase} did not end in time; {state.reason}")
    return None


def _until_met(state: State, seen: Observation, now: float) -> bool:
    until = state.rollout.spec.steps[state.step].until
    enough = until.requests is None or seen.canary_requests >= until.requests
    began = state.window_at if state.window_at is not None else state.since
    return enough and (until.seconds is None or now - began >= until.seconds)


def _next_step(state: State, now: float, reason: str) -> Moved:
    steps, following = state.rollout.spec.steps, state.step + 1
    if state.rollout.stable is None or following >= len(steps):
        return _move(state, now, "Promoting", reason=reason)
    step = steps[following]
    phase: Phase = "Shadow" if step.shadow is not None else "Canary"
    deadline_at = now + (step.deadline_s or state.rollout.spec.deadline_s)
    return Moved(at=now, phase=phase, step=following, reason=reason, deadline_at=deadline_at)


def _abort(state: State, now: float, *, reason: str, gate: str) -> Moved:
    return _move(state, now, "Aborting", reason=reason, gate=gate)


def _move(state: State, now: float, phase: Phase, *, reason: str, gate: str | None = None) -> Moved:
    spec = state.rollout.spec
    limits_s: dict[Phase, float] = {
        "Starting": spec.start_deadline_s,
        "Promoting": spec.promote_deadline_s,
        "Baking": spec.bake_s + spec.promote_deadline_s,
        "Holding": spec.hold_deadline_s,
        "Aborting": spec.promote_deadline_s + spec.drain_s,
    }
    deadline_at = now + limits_s.get(phase, 0.0)
    return Moved(at=now, phase=phase, step=state.step, reason=reason, deadline_at=deadline_at, gate=gate)


def _switched(state: State) -> bool:
    return state.traffic is not None and state.traffic.stable == state.rollout.new_id


def _confirmed(state: State, seen: Observation) -> bool:
    return state.traffic is not None and seen.traffic == state.traffic.shares


def _cleared(state: State, seen: Observation) -> bool:
    """Whether the router has no share left for the aborted revision."""
    return seen.traffic == (state.rollout.old_id, None, 0, 0)


def _traffic(state: State, seen: Observation, now: float) -> TrafficSet | None:
    """The shares of this state. None: nothing to set yet (a first revision that is not ready)."""
    new, old = state.rollout.new_id, state.rollout.old_id
    phase, before = state.acting_phase, state.traffic
    promoted = TrafficSet(at=now, stable=new, canary=None, canary_bp=0, shadow_bp=0)
    if phase in ("Baking", "Completed"):
        return promoted
    if phase == "Promoting" and (seen.canary.ready or _switched(state)):
        return promoted
    if old is None:
        return before
    alone = TrafficSet(at=now, stable=old, canary=None, canary_bp=0, shadow_bp=0)
    step = state.current_step
    if step is not None and seen.canary.ready:
        return TrafficSet(at=now, stable=old, canary=new, canary_bp=step.canary_bp, shadow_bp=step.shadow_bp)
    # An abort must not send everybody to a stable revision that cannot answer; the share only ever stays or goes to 0.
    carries = before is not None and seen.canary.ready and not seen.stable.ready
    if phase == "Aborting" and before is not None and carries:
        if before.stable == new:
            return before
        return TrafficSet(at=now, stable=old, canary=before.canary, canary_bp=before.canary_bp, shadow_bp=0)
    return alone


def _intent(state: State, seen: Observation) -> Intent:
    new, old = state.rollout.new_id, state.rollout.old_id
    olds = frozenset({old} if old else ())
    phase = state.acting_phase
    if phase == "Pending":
        return Intent(traffic=state.traffic, run=olds)
    if phase == "Completed" or state.baked:
        # The old replicas drain only when the registry says what is served; until then they could still be needed.
        keep = olds if phase == "Baking" and not state.registered else frozenset()
        registry = None if state.registered else "promoted"
        return Intent(traffic=state.traffic, run=frozenset({new}), keep=keep, registry=registry)
    if phase in ("Aborting", "Aborted"):
        free = old is None or state.traffic is None or _cleared(state, seen)
        keep = frozenset() if free or phase == "Aborted" else frozenset({new})
        registry = None if state.registered else f"aborted:{state.gate}"
        return Intent(traffic=state.traffic, run=olds, keep=keep, registry=registry)
    return Intent(traffic=state.traffic, run=olds | {new})
