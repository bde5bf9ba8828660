"""Watches replicas: who is ready, who is what it should be; warms each one up before it counts as ready."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from narrowgauge.serving.gateway.replicas import Health, ProbeRules
from narrowgauge.serving.rollout.decide import RevisionHealth
from narrowgauge.serving.rollout.platforms.base import Platform, Replica

_WARM_UP = ("Hello", "The capital of France is", "Write one sentence about a river that flows through a city.")
_WARM_UP_TIMEOUT_S = 60.0
_WARM_UP_TRIES = 3  # of a replica that answers them with 500: it will not get well

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Watched:
    health: Health
    checked: bool = False
    failures: int = 0
    impostor: str | None = None
    met: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class ReplicaProber:
    """Probes every replica of the platform at the routers' rhythm, each in a task of its own.

    The first requests of a replica are slower than all later ones (pages, caches, compiled code), and the latency gate
    would compare them with a warm stable revision: so the prober sends a few before it reports the replica as ready.
    """

    def __init__(self, platform: Platform, *, rules: ProbeRules | None = None) -> None:
        self._platform = platform
        self._rules = rules or ProbeRules(interval_s=0.5)
        self._watched: dict[str, _Watched] = {}
        self._client = httpx.AsyncClient(timeout=self._rules.timeout_s, trust_env=False)

    def health(self, revision: str) -> RevisionHealth:
        """How many processes of a revision live (also those that are stopping), and how many are ready."""
        live = [replica for replica in self._platform.replicas() if replica.revision == revision]
        stopping = sum(replica.revision == revision for replica in self._platform.stopping())
        return RevisionHealth(alive=len(live) + stopping, ready=sum(self.ready(replica) for replica in live))

    def ready(self, replica: Replica) -> bool:
        """Ready by its probes, checked to be the revision and digest it should be, and warmed up."""
        watched = self._watched.get(replica.id)
        return bool(watched and watched.checked and watched.health.ready and replica.was_ready)

    def impostors(self) -> tuple[tuple[Replica, str], ...]:
        """Replicas that are not what was asked for: they say so, or cannot answer; with what they say."""
        return tuple(
            (replica, watched.impostor)
            for replica in self._platform.replicas()
            if (watched := self._watched.get(replica.id)) is not None and watched.impostor is not None
        )

    def follow(self) -> None:
        """Starts watching new replicas and forgets those that are gone; called at each tick."""
        for watched in self._watched.values():
            if watched.task is not None and watched.task.done():
                watched.task.result()  # it only ends by a bug of ours: better seen than a replica that never gets ready
        live = {replica.id: replica for replica in self._platform.replicas()}
        for replica_id in [known for known in self._watched if known not in live]:
            self._end(self._watched.pop(replica_id))
        for replica_id, replica in live.items():
            if replica_id not in self._watched:
                watched = self._watched[replica_id] = _Watched(health=Health(self._rules))
                watched.task = asyncio.create_task(self._watch(replica, watched))

    async def settle(self) -> None:
        """Waits until each followed replica has been looked at once (and warmed up, where it was ready)."""
        await asyncio.gather(*(watched.met.wait() for watched in self._watched.values()))

    async def close(self) -> None:
        """Stops watching."""
        tasks = [watched.task for watched in self._watched.values() if watched.task is not None]
        for watched in self._watched.values():
            self._end(watched)
        self._watched.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _watch(self, replica: Replica, watched: _Watched) -> None:
        warm = replica.was_ready
        try:
            while True:
                watched.health.observe(await self._probe(replica))
                if watched.health.ready and not watched.checked:
                    await self._check(replica, watched)
                if watched.health.ready and watched.checked and not warm:
                    warm = await self._warm_up(replica, watched)
                    if warm:
                        self._platform.mark_ready(replica.id)
                watched.met.set()
                await asyncio.sleep(self._rules.interval_s)
        finally:
            watched.met.set()

    async def _probe(self, replica: Replica) -> Any:
        try:
            response = await self._client.get(f"{replica.url}/ready")
        except httpx.ConnectError:
            return "refused"
        except httpx.HTTPError:
            return "missed"
        return "ready" if response.status_code == 200 else "missed"

    async def _check(self, replica: Replica, watched: _Watched) -> None:
        try:
            says = (await self._client.get(f"{replica.url}/version")).json()
            found = (says["revision"], says["digest"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            _log.warning("replica %s: /version cannot be read: %s", replica.id, error)
            return
        if found != (replica.revision, replica.digest):
            watched.impostor = f"serves revision {found[0]}, digest {found[1][:12]}"
        watched.checked = watched.impostor is None

    async def _warm_up(self, replica: Replica, watched: _Watched) -> bool:
        for prompt in _WARM_UP:
            body = {"model": replica.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            try:
                url = f"{replica.url}/v1/completions"
                response = await self._client.post(url, json=body, timeout=_WARM_UP_TIMEOUT_S)
            except httpx.HTTPError as error:
                _log.warning("replica %s: warm-up request failed: %s", replica.id, error or type(error).__name__)
                return False
            if response.status_code != 200:
                told = " ".join(response.text.split())[:200]
                _log.warning("replica %s: warm-up request answered %d: %s", replica.id, response.status_code, told)
                watched.failures = watched.failures + 1 if response.status_code == 500 else 0
                if watched.failures >= _WARM_UP_TRIES:
                    watched.impostor = f"answers its warm-up with 500: {told}"
                return False
        return True

    def _end(self, watched: _Watched) -> None:
        if watched.task is not None:
            watched.task.cancel()


def urls_of(replicas: Iterable[Replica], revision: str) -> tuple[str, ...]:
    """Base URLs of a revision's replicas that have been ready once.

    Not those that are ready now: the routers probe for themselves, and a controller that is slow to see a replica must
    not take it from them.
    """
    return tuple(sorted(replica.url for replica in replicas if replica.revision == revision and replica.was_ready))
