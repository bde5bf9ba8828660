"""The replicas behind the gateway: which are ready, how many requests each has in flight."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from narrowgauge.serving.gateway.traffic import TrafficState

Seen = Literal["ready", "missed", "refused"]
"""What one probe, or the data path, saw: an answer 200 in time, none (or another status), a refused connection."""


@dataclass(frozen=True, kw_only=True)
class ProbeRules:
    """How often to ask (seconds), how long to wait (seconds), after how many misses out, after how many answers back."""

    interval_s: float = 1.0
    timeout_s: float = 1.0
    misses: int = 3
    returns: int = 2


class Health:
    """Whether a replica is ready: None until the first probe, out after misses or a refusal, back after several answers."""

    def __init__(self, rules: ProbeRules) -> None:
        self._rules = rules
        self._streak = 0
        self.ready: bool | None = None

    def observe(self, seen: Seen) -> None:
        """Takes in one observation. A replica that was never seen is believed after one answer; one that was out is not."""
        if self.ready is None and seen != "missed":
            self.ready = seen == "ready"
            self._streak = 0
        elif seen == "refused":
            self.ready = False
            self._streak = 0
        elif (seen == "ready") == bool(self.ready):
            self._streak = 0
        else:
            self._streak += 1
            limit = self._rules.misses if seen == "missed" else self._rules.returns
            if self._streak >= limit:
                self.ready = seen == "ready"
                self._streak = 0


_turns = itertools.count(1)


class Replica:
    """One address of one revision: its health and its requests in flight (shadow copies included)."""

    def __init__(self, revision: str, url: str, rules: ProbeRules) -> None:
        self.revision = revision
        self.url = url
        self.health = Health(rules)
        self.in_flight = 0
        self.last_turn = 0

    @property
    def ready(self) -> bool:
        """Seen ready, and not out since."""
        return self.health.ready is True

    @contextlib.contextmanager
    def flight(self) -> Iterator[None]:
        """Counts one request while the block runs."""
        self.in_flight += 1
        self.last_turn = next(_turns)
        try:
            yield
        finally:
            self.in_flight -= 1


class ReplicaPool:
    """Every replica that a traffic state names, and those that no longer stand in one but still have requests in flight."""

    def __init__(self, rules: ProbeRules) -> None:
        self.rules = rules
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._named: dict[str, set[tuple[str, str]]] = {}
        self._last_good: dict[str, tuple[str, str]] = {}

    def follow(self, model: str, state: TrafficState) -> list[Replica]:
        """Takes over a model's new state; returns the replicas that are new. Known ones keep health and counts."""
        named = {(revision, url) for revision, urls in state.replicas.items() for url in urls}
        self._named[model] = named
        new = [Replica(revision, url, self.rules) for revision, url in sorted(named - self._replicas.keys())]
        self._replicas.update({(replica.revision, replica.url): replica for replica in new})
        self._forget()
        return new

    def named(self) -> list[Replica]:
        """The replicas that some state names: those to probe."""
        keys = set().union(*self._named.values())
        return [replica for key, replica in self._replicas.items() if key in keys]

    def ready(self, revision: str, urls: Iterable[str]) -> list[Replica]:
        """The ready replicas among a revision's addresses."""
        found = (self._replicas.get((revision, url)) for url in urls)
        return [replica for replica in found if replica is not None and replica.ready]

    def ready_or_last_good(self, model: str, revision: str, urls: tuple[str, ...]) -> list[Replica]:
        """As `ready`, but never empty once there was one: the last good replica is kept, or all not yet probed are tried.

        A front door that closes because probes fail turns a slow model into an outage.
        """
        replicas = self.ready(revision, urls)
        if replicas:
            good = max(replicas, key=lambda replica: replica.last_turn)
            self._last_good[model] = (good.revision, good.url)
            return replicas
        named = [self._replicas[revision, url] for url in urls]
        last = [replica for replica in named if (replica.revision, replica.url) == self._last_good.get(model)]
        return last or [replica for replica in named if replica.health.ready is None]

    def in_flight(self) -> Mapping[str, list[Replica]]:
        """Replicas by revision, those that are only draining included."""
        self._forget()
        table: dict[str, list[Replica]] = {}
        for replica in self._replicas.values():
            table.setdefault(replica.revision, []).append(replica)
        return table

    def _forget(self) -> None:
        keys = set().union(*self._named.values())
        for key in [key for key, replica in self._replicas.items() if key not in keys and not replica.in_flight]:
            del self._replicas[key]


def least_busy(replicas: Iterable[Replica]) -> Replica | None:
    """The replica with the fewest requests in flight; among equals the one whose last turn is longest ago."""
    return min(replicas, key=lambda replica: (replica.in_flight, replica.last_turn), default=None)
