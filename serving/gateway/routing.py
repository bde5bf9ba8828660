"""Which revision and which replica answer a request: a pure function of the state, the session key and who is ready."""

import random
from dataclasses import dataclass
from typing import Literal

from narrowgauge.serving.gateway.replicas import Replica, ReplicaPool, least_busy
from narrowgauge.serving.gateway.traffic import BUCKETS, TrafficState, bucket

Role = Literal["stable", "canary"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a request goes. It keeps its replica whatever the controller sets while it runs."""

    model: str
    role: Role
    replica: Replica

    @property
    def revision(self) -> str:
        """The revision that answers."""
        return self.replica.revision


@dataclass(frozen=True, kw_only=True)
class NoReadyReplica:
    """Nobody can answer for this revision now."""

    model: str
    revision: str
    role: Role = "stable"


class Router:
    """Routes by the traffic state and the replicas' health."""

    def __init__(self, pool: ReplicaPool, *, rng: random.Random | None = None) -> None:
        self._pool = pool
        self._rng = rng or random.Random()

    def route(
        self, model: str, state: TrafficState, *, key: str | bytes | None, track: Role | None
    ) -> Route | NoReadyReplica:
        """Picks role and replica. A canary that is absent or not ready falls to stable, even where a header pins it."""
        if state.canary is not None and self.role_of(state, key=key, track=track) == "canary":
            ready = self._pool.ready(state.canary, state.replicas[state.canary])
            if replica := least_busy(ready):
                return Route(model=model, role="canary", replica=replica)
        return self.stable(model, state)

    def role_of(self, state: TrafficState, *, key: str | bytes | None, track: Role | None) -> Role:
        """The side of the split: what the header pins, else by the bucket of the key, else (no key) by a random bucket.

        A pure function of key and share: a session never becomes sticky to a canary that its bucket does not give it.
        """
        if track is not None:
            return track
        number = self._rng.randrange(BUCKETS) if key is None else bucket(key)
        return "canary" if number < state.canary_bp else "stable"

    def stable(
        self, model: str, state: TrafficState, *, without: frozenset[Replica] = frozenset()
    ) -> Route | NoReadyReplica:
        """A replica of stable that is not in `without`: the way of a request, and of every repeated one."""
        replicas = self._pool.ready_or_last_good(model, state.stable, state.replicas[state.stable])
        replica = least_busy(replica for replica in replicas if replica not in without)
        if replica is None:
            return NoReadyReplica(model=model, revision=state.stable)
        return Route(model=model, role="stable", replica=replica)

    def shadow(self, model: str, state: TrafficState) -> Route | None:
        """A canary replica for a copy of a request that stable answers, or None where this one is not copied."""
        if state.canary is None or self._rng.randrange(BUCKETS) >= state.shadow_bp:
            return None
        replica = least_busy(self._pool.ready(state.canary, state.replicas[state.canary]))
        return Route(model=model, role="canary", replica=replica) if replica else None
