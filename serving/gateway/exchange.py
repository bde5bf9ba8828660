"""One request from its route to its record: tried, perhaps repeated, relayed as it comes."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Literal

from narrowgauge.serving.gateway.ask import Ask, Headers
from narrowgauge.serving.gateway.client import ClientStream
from narrowgauge.serving.gateway.config import GatewayConfig
from narrowgauge.serving.gateway.events import DONE, EventStream, Findings, error_event
from narrowgauge.serving.gateway.ledger import Ledger
from narrowgauge.serving.gateway.records import Fault, Stopwatch
from narrowgauge.serving.gateway.retries import Failed, Tries, fault_of, is_failure, next_try
from narrowgauge.serving.gateway.routing import NoReadyReplica, Route, Router
from narrowgauge.serving.gateway.shadow import Shadows
from narrowgauge.serving.gateway.traffic import TrafficState, TrafficTable
from narrowgauge.serving.gateway.upstream import ReplicaFailed, Upstream, UpstreamAnswer
from narrowgauge.serving.openai.errors import ApiError, unavailable, unknown_model

_TRAILER_S = 1.0  # an upstream connection whose end does not follow the end mark within this is not worth keeping

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What every exchange works with."""

    config: GatewayConfig
    table: TrafficTable
    router: Router
    upstream: Upstream
    shadows: Shadows
    ledger: Ledger


class Exchange:
    """Answers one request. `interrupt` says why its task is about to be cancelled."""

    def __init__(self, ask: Ask, client: ClientStream, parts: Parts) -> None:
        self._ask = ask
        self._client = client
        self._parts = parts
        self._watch = Stopwatch(ask.arrived)
        self._findings = Findings()
        self._route: Route | None = None
        self._recorded = False
        self._cause: Literal["client left", "shutdown"] = "client left"

    def interrupt(self, cause: Literal["client left", "shutdown"]) -> None:
        """To be called before the task is cancelled."""
        self._cause = cause

    async def run(self) -> None:
        """The whole exchange; returns when the client has its answer. An interrupted one is recorded, then re-raises."""
        state = self._parts.table.get(self._ask.model)
        if state is None:
            await self._client.error(unknown_model(self._ask.model))
            return
        try:
            if not self._ask.stream:
                await self._tries(state)
                return
            async with asyncio.TaskGroup() as tasks:
                pacing = tasks.create_task(self._pace())
                await self._tries(state)
                pacing.cancel()
        except asyncio.CancelledError:
            await self._interrupted()
            raise
        except Exception:
            self._record(500, "gateway")
            raise

    async def _tries(self, state: TrafficState) -> None:
        ask, router, table = self._ask, self._parts.router, self._parts.table
        route = router.route(ask.model, state, key=ask.key, track=ask.track)
        if isinstance(route, NoReadyReplica):
            await self._unavailable(route)
            return
        if route.role == "stable" and ask.generative and not ask.names_tools:
            self._parts.shadows.offer(ask, state)
        tries = Tries()
        while True:
            failed = await self._try(route)
            if failed is None:
                return
            tries.add(route, failed)
            following = next_try(tries, route, failed, state=table.get(ask.model) or state, router=router)
            if isinstance(following, NoReadyReplica):
                await self._give_up(failed)
                return
            self._parts.ledger.metrics.retries.labels(route.model, route.role).inc()
            route = following
            self._watch, self._findings, self._recorded = Stopwatch(time.monotonic()), Findings(), False

    async def _try(self, route: Route) -> Failed | None:
        """One try; None once the client has its answer (or as much of it as there will be)."""
        self._route = route
        try:
            with route.replica.flight():
                async with self._parts.upstream.send(route, self._ask) as answer:
                    if answer.is_event_stream:
                        return await self._relay_events(answer)
                    return await self._relay_whole(answer)
        except ReplicaFailed as error:
            return await self._lost(error)

    async def _relay_events(self, answer: UpstreamAnswer) -> Failed | None:
        events = EventStream(self._watch, drops_usage=self._ask.drops_usage)
        self._findings = events
        client, headers = self._client, [*answer.ignored_fields, *self._headers()]
        while not events.done:
            chunk = await answer.chunk()
            if not chunk:
                raise ReplicaFailed(
                    "the stream ended without its end mark", status=events.error_status or 502, sent=True
                )
            forward = events.feed(chunk, time.monotonic())
            if events.error_status and events.error_status >= 500 and not (client.forwarded or events.started):
                self._record(events.error_status, "replica")
                return Failed(status=events.error_status, sent=True, lost=False)
            if forward:
                await client.write(forward, headers)
        status = events.error_status or 200
        self._record(status, "replica" if events.finish_reason == "error" else fault_of(status))
        await client.end(b"" if events.done else DONE)
        with contextlib.suppress(ReplicaFailed, TimeoutError):
            async with asyncio.timeout(_TRAILER_S):
                while await answer.chunk():
                    pass
        return None

    async def _relay_whole(self, answer: UpstreamAnswer) -> Failed | None:
        body = await answer.whole()
        status = answer.status
        if status < 400:
            self._watch.event(time.monotonic())
            self._findings.search(body)
        if is_failure(status):
            self._record(status, fault_of(status))
            return Failed(status=status, sent=True, lost=False, answer=(answer.headers, body))
        if not self._client.started:
            self._record(status, fault_of(status))
            await self._client.answer(status, [*answer.headers, *self._headers()], body)
        elif status < 400:
            self._record(502, "replica")
            await self._client.error(ApiError(502, "the replica did not answer with a stream"))
        else:
            self._record(status, fault_of(status))
            await self._client.end(_in_band(body, status))
        return None

    async def _lost(self, error: ReplicaFailed) -> Failed | None:
        _log.warning("request %s: %s", self._ask.request_id, error)
        assert self._route is not None
        if error.refused:
            self._route.replica.health.observe("refused")
        self._record(error.status, "replica")
        if not self._client.forwarded:
            return Failed(status=error.status, sent=error.sent, lost=error.sent and error.status == 502)
        message = "the replica that was answering was lost; what came so far is not the whole answer"
        already_told = isinstance(self._findings, EventStream) and self._findings.error_status
        await self._client.end(DONE if already_told else error_event(ApiError(error.status, message)))
        return None

    async def _give_up(self, failed: Failed) -> None:
        if failed.answer is None:
            message = f"no replica of '{self._ask.model}' could answer; try again (request {self._ask.request_id})"
            error = ApiError(failed.status, message) if failed.sent else unavailable(message)
            await self._client.error(error, self._headers())
        elif self._client.started:
            await self._client.end(_in_band(failed.answer[1], failed.status))
        else:
            headers, body = failed.answer
            await self._client.answer(failed.status, [*headers, *self._headers()], body)

    async def _unavailable(self, nobody: NoReadyReplica) -> None:
        self._record(503, "replica", nobody)
        error = unavailable(f"no replica of '{nobody.model}' is ready; try again soon")
        await self._client.error(error, [(b"x-narrowgauge-revision", nobody.revision.encode())])

    async def _interrupted(self) -> None:
        if self._cause == "client left":
            self._record(499, "client")
            return
        self._record(503, "gateway")
        if not self._client.ended:
            await self._client.error(unavailable("the gateway is shutting down; try again"))

    async def _pace(self) -> None:
        """Headers after a first silence, then comments in silence, so that client and gateway notice each other's end."""
        config, client = self._parts.config, self._client
        await asyncio.sleep(self._ask.arrived + config.early_headers_s - time.monotonic())
        if not client.started:
            await client.start(self._headers())
            await client.comment()
        while True:
            silence = time.monotonic() - client.last_sent
            if silence >= config.comment_s:
                await client.comment()
                silence = 0.0
            await asyncio.sleep(config.comment_s - silence)

    def _headers(self) -> Headers:
        if self._route is None:
            return []
        return [
            (b"x-narrowgauge-revision", self._route.revision.encode()),
            (b"x-narrowgauge-role", self._route.role.encode()),
        ]

    def _record(self, status: int, fault: Fault | None, whom: NoReadyReplica | None = None) -> None:
        """Writes the try's record, once."""
        route = whom or self._route
        if self._recorded or route is None or not self._ask.generative:
            return
        self._recorded = True
        self._parts.ledger.write(route, self._watch, self._findings, status=status, fault=fault, now=time.monotonic())


def _in_band(body: bytes, status: int) -> bytes:
    """A replica's JSON refusal as the last event of a stream that has begun."""
    text = b" ".join(body.split())
    if text.startswith(b'{"error"') or text.startswith(b'{ "error"'):
        return b"data: " + text + b"\n\n" + DONE
    return error_event(ApiError(status, text.decode("utf-8", "replace")[:500] or f"status {status}"))
