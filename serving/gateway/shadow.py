"""Copies of requests that go to the canary as well: measured, thrown away, dropped first, never seen by a client.

A copy is the request as it was, streamed where the original was, and not shortened: its times and lengths compare with
those of the original. Requests that name tools are not copied: a second call may have effects.
"""

import asyncio
import logging
import time

from narrowgauge.serving.gateway.ask import Ask
from narrowgauge.serving.gateway.events import EventStream
from narrowgauge.serving.gateway.ledger import Ledger
from narrowgauge.serving.gateway.records import Fault, Stopwatch
from narrowgauge.serving.gateway.retries import fault_of
from narrowgauge.serving.gateway.routing import Route, Router
from narrowgauge.serving.gateway.traffic import TrafficState
from narrowgauge.serving.gateway.upstream import ReplicaFailed, Upstream, UpstreamAnswer

_log = logging.getLogger(__name__)


class Shadows:
    """Sends copies beside the answers that clients wait for, at most `limit` at a time."""

    def __init__(self, router: Router, upstream: Upstream, ledger: Ledger, *, limit: int) -> None:
        self._router = router
        self._upstream = upstream
        self._ledger = ledger
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, ask: Ask, state: TrafficState) -> None:
        """Copies the request if its turn falls to it and there is room. Returns at once."""
        route = self._router.shadow(ask.model, state)
        if route is None:
            return
        if len(self._tasks) >= self._limit:
            self._count(route, "dropped")
            return
        self._count(route, "sent")
        task = asyncio.create_task(self._copy(route, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drops the copies under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, route: Route, ask: Ask) -> None:
        watch = Stopwatch(time.monotonic())
        findings = EventStream(watch, drops_usage=True)
        try:
            with route.replica.flight():
                async with self._upstream.send(route, ask, shadow=True) as answer:
                    status = await _measure(answer, findings, watch)
            fault: Fault | None = "replica" if findings.finish_reason == "error" else fault_of(status)
        except ReplicaFailed as error:
            _log.warning("shadow copy of %s: %s", ask.request_id, error)
            status, fault = error.status, "replica"
            if error.refused:
                route.replica.health.observe("refused")
        if fault == "replica":
            self._count(route, "failed")
        self._ledger.write(route, watch, findings, status=status, fault=fault, now=time.monotonic(), shadow=True)

    def _count(self, route: Route, result: str) -> None:
        self._ledger.metrics.shadow_copies.labels(route.model, result).inc()


async def _measure(answer: UpstreamAnswer, findings: EventStream, watch: Stopwatch) -> int:
    """Reads an answer to its end; returns the status that counts. Raises ReplicaFailed."""
    if not answer.is_event_stream:
        body = await answer.whole()
        if answer.status < 400:
            watch.event(time.monotonic())
            findings.search(body)
        return answer.status
    while not findings.done:
        chunk = await answer.chunk()
        if not chunk and findings.error_status:
            break
        if not chunk:
            raise ReplicaFailed("the stream ended without its end mark", status=502, sent=True)
        findings.feed(chunk, time.monotonic())
    return findings.error_status or 200
