"""What the controller tells of its decisions: metrics, and one log line a transition."""

import logging
from collections.abc import Callable

from narrowgauge.serving.metrics import RolloutMetrics
from narrowgauge.serving.rollout.decide import Decision
from narrowgauge.serving.rollout.spec import BUCKETS
from narrowgauge.serving.rollout.state import PHASES, Moved, ReplicaLost, State

_SIGN = {"pass": 1, "inconclusive": 0, "fail": -1}

_log = logging.getLogger(__name__)


class Telling:
    """Keeps RolloutMetrics in step with decisions."""

    def __init__(self, metrics: RolloutMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock

    def ticked(self, seconds: float) -> None:
        """A pass is over: the dead-man's time stamp moves."""
        self._metrics.tick_duration.observe(seconds)
        self._metrics.last_tick.set(self._clock())

    def decided(self, before: State, decision: Decision) -> None:
        """Counts transitions and sets the gauges of one rollout."""
        rollout = before.rollout
        model = rollout.revision.model
        phase = before.phase
        for event in decision.events:
            if isinstance(event, ReplicaLost):
                _log.warning("rollout %s: replica %s was lost: %s", rollout.id, event.replica, event.reason)
            if isinstance(event, Moved):
                self._moved(decision.state, phase, event)
                phase = event.phase
        state = decision.state
        for name in PHASES:
            self._metrics.phase.labels(model, name).set(name == state.phase)
        if state.traffic is not None:
            share = state.traffic.canary_bp / BUCKETS
            self._metrics.weight_ratio.labels(model, "canary", "intent").set(share)
            self._metrics.weight_ratio.labels(model, "stable", "intent").set(1.0 - share)
        for verdict in state.verdicts:
            self._metrics.gate_result.labels(model, verdict.gate).set(_SIGN[verdict.result])
            for key in ("requests", "canary_samples", "tokens"):
                if key in verdict.figures:
                    self._metrics.gate_samples.labels(model, verdict.gate).set(verdict.figures[key])

    def _moved(self, state: State, before: str, event: Moved) -> None:
        rollout = state.rollout
        model = rollout.revision.model
        step = f" (step {event.step + 1} of {len(rollout.spec.steps)})" if event.phase in ("Shadow", "Canary") else ""
        _log.info("rollout %s of %s: %s -> %s%s: %s", rollout.id, model, before, event.phase, step, event.reason)
        reason = event.gate or "none"  # the text would make a series of every figure in it
        self._metrics.transitions.labels(model, before, event.phase, reason).inc()
        if event.phase == "Aborting":
            self._metrics.aborts.labels(model, reason).inc()
        if state.terminal:
            self._metrics.duration.labels(model, event.phase).observe(event.at - rollout.created_at)
