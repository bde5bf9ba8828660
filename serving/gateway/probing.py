"""Asks every named replica for its readiness, again and again."""

import asyncio
from collections.abc import Iterable

from narrowgauge.serving.gateway.replicas import Replica, ReplicaPool
from narrowgauge.serving.gateway.upstream import Upstream


class Prober:
    """Probes all replicas of the pool at its interval; `meet` probes new ones at once."""

    def __init__(self, pool: ReplicaPool, upstream: Upstream) -> None:
        self._pool = pool
        self._upstream = upstream

    async def run(self) -> None:
        """Never returns; cancel it."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._pool.rules.interval_s
            await self.meet(self._pool.named())
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def meet(self, replicas: Iterable[Replica]) -> None:
        """One probe of each of these; takes no longer than a probe's time-out."""
        await asyncio.gather(*(self._probe(replica) for replica in replicas))

    async def _probe(self, replica: Replica) -> None:
        replica.health.observe(await self._upstream.probe(replica, self._pool.rules.timeout_s))
