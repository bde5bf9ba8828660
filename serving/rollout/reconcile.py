"""Makes the world what the decision wants: replicas that run, a router that knows them. Each act is safe to repeat."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from narrowgauge.serving.gateway.traffic import TrafficState
from narrowgauge.serving.rollout.connection import Unreachable
from narrowgauge.serving.rollout.platforms.base import Ended, Platform, PlatformError, Replica
from narrowgauge.serving.rollout.probes import urls_of
from narrowgauge.serving.rollout.spec import Revision
from narrowgauge.serving.rollout.state import TrafficSet
from narrowgauge.serving.rollout.store import Store
from narrowgauge.serving.rollout.traffic.base import RouterRefused, TrafficRouter

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_STEADY_S = 60.0  # a replica that lived this long is not in a crash loop
_STRANGER_GRACE_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Backoff:
    failures: int = 0
    until: float = 0.0


class Fleet:
    """One replica for each wanted revision, restarted with a growing delay when it keeps dying."""

    def __init__(self, platform: Platform, clock: Callable[[], float]) -> None:
        self._platform = platform
        self._clock = clock
        self._backoff: dict[str, _Backoff] = {}

    def note(self, ended: Iterable[Ended]) -> None:
        """Counts those that ended unasked; their successor waits twice as long as the last one did."""
        now = self._clock()
        for end in ended:
            if end.expected:
                continue
            _log.warning("replica %s of %s was lost: %s", end.replica.id, end.replica.model, end.reason)
            backoff = self._backoff.setdefault(end.replica.revision, _Backoff())
            if now - end.replica.started_at > _STEADY_S:
                backoff.failures = 0
            delay_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**backoff.failures)
            backoff.failures += 1
            backoff.until = now + delay_s

    def ensure(self, revision: Revision) -> None:
        """Starts a replica of the revision unless one lives or its delay is not over."""
        if any(replica.revision == revision.id for replica in self._platform.replicas()):
            return
        backoff = self._backoff.get(revision.id)
        if backoff is not None and self._clock() < backoff.until:
            return
        try:
            self._platform.start(revision)
        except PlatformError as error:
            _log.error("%s", error)
            failed = self._backoff.setdefault(revision.id, _Backoff())
            failed.until = self._clock() + min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**failed.failures)
            failed.failures += 1

    def retire(self, revision_id: str, listed: frozenset[str], *, grace_s: float) -> None:
        """Stops a revision's replicas, each as soon as the router lists its URL no more."""
        for replica in self._platform.replicas():
            if replica.revision == revision_id and replica.url not in listed:
                self._platform.stop(replica.id, grace_s=grace_s)

    def strangers(self, wanted: frozenset[str]) -> list[Replica]:
        """Replicas of revisions that nobody has a say in any more (an older store's, for instance)."""
        return [replica for replica in self._platform.replicas() if replica.revision not in wanted]

    def stop_stranger(self, replica: Replica) -> None:
        """Stops a replica that the router lists no more."""
        self._platform.stop(replica.id, grace_s=_STRANGER_GRACE_S)


class RouterWriter:
    """Writes whole traffic states under an epoch of ours, and remembers what the router had when last asked."""

    def __init__(self, router: TrafficRouter, store: Store) -> None:
        self._router = router
        self._store = store
        self._seen: dict[str, TrafficState | None] = {}  # a model without an entry: the router did not answer
        self._reachable = True

    async def newest_epoch(self) -> int:
        """The newest epoch that the router has seen. Raises Unreachable."""
        return await self._router.newest_epoch()

    async def close(self) -> None:
        """Gives the router's connections back."""
        await self._router.close()

    async def read(self, model: str) -> TrafficState | None:
        """What the router has for a model; None where it has nothing or does not answer."""
        try:
            self._seen[model] = await self._router.read(model)
            self._reachable = True
        except Unreachable as error:
            self._seen.pop(model, None)
            self._say_unreachable(error)
        return self._seen.get(model)

    def listed(self, model: str) -> frozenset[str] | None:
        """URLs that the router has for a model, None where that is not known: then nothing behind it may be stopped."""
        if model not in self._seen:
            return None
        state = self._seen[model]
        return frozenset(url for urls in state.replicas.values() for url in urls) if state else frozenset()

    async def reconcile(
        self, model: str, traffic: TrafficSet, *, replicas: Iterable[Replica], revisions: frozenset[str]
    ) -> None:
        """Writes the state unless the router has it. Waits for a stable revision to have a replica that was ready once."""
        live = list(replicas)
        urls = {revision: found for revision in sorted(revisions) if (found := urls_of(live, revision))}
        if traffic.stable not in urls or model not in self._seen:
            return
        shown = traffic.canary if traffic.canary in urls else None
        seen = self._seen[model]
        wanted = (
            traffic.stable,
            shown,
            traffic.canary_bp if shown else 0,
            traffic.shadow_bp if shown else 0,
            urls,
        )
        if seen and wanted == (seen.stable, seen.canary, seen.canary_bp, seen.shadow_bp, seen.replicas):
            return
        state = TrafficState(
            epoch=self._store.next_traffic_epoch(),
            stable=wanted[0],
            canary=wanted[1],
            canary_bp=wanted[2],
            shadow_bp=wanted[3],
            replicas=urls,
        )
        try:
            self._seen[model] = await self._router.write(model, state)
        except Unreachable as error:
            self._seen.pop(model, None)
            self._say_unreachable(error)
        except RouterRefused as error:
            self._seen.pop(model, None)
            _log.warning("%s", error)
            if error.stale:
                # The router remembers a newer epoch than our store, which was restored from a copy or made anew.
                # Another leader over the same store is noticed by its term, in next_traffic_epoch.
                self._store.lift_traffic_epoch(await self._newest_or(state.epoch))

    async def _newest_or(self, epoch: int) -> int:
        try:
            return await self._router.newest_epoch()
        except Unreachable:
            return epoch

    def _say_unreachable(self, error: Unreachable) -> None:
        if self._reachable:  # once, not at every tick
            _log.warning("%s; traffic stays as it is", error)
        self._reachable = False
