"""The gateway's public face: the OpenAI paths, passed on to replicas, and its own state for probes and scrapes."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send

from narrowgauge import __version__
from narrowgauge.serving.gateway.ask import Headers, read_ask, request_id_of
from narrowgauge.serving.gateway.client import ClientStream, gone, read_body
from narrowgauge.serving.gateway.config import GatewayConfig
from narrowgauge.serving.gateway.exchange import Exchange, Parts
from narrowgauge.serving.gateway.ledger import Ledger
from narrowgauge.serving.gateway.probing import Prober
from narrowgauge.serving.gateway.records import RecordRing
from narrowgauge.serving.gateway.replicas import ReplicaPool
from narrowgauge.serving.gateway.routing import Router
from narrowgauge.serving.gateway.shadow import Shadows
from narrowgauge.serving.gateway.traffic import TrafficState, TrafficTable
from narrowgauge.serving.gateway.upstream import Upstream
from narrowgauge.serving.metrics import build_info
from narrowgauge.serving.openai.errors import ApiError, answer_crash, answer_http_error, unknown_model

PROXIED = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")

_STARTED = int(time.time())


class Gateway:
    """The gateway's parts, put together. Use `Gateway.opened(…)`.

    `draining` makes /ready say no. `probing` ends only with the gateway: without it the pool's health would be a fossil.
    """

    def __init__(self, config: GatewayConfig, upstream: Upstream, *, folder: Path) -> None:
        self.config = config
        self.pool = ReplicaPool(config.probes)
        self.table = TrafficTable(folder)
        self.router = Router(self.pool)
        self.ledger = Ledger(RecordRing(config.records))
        self.prober = Prober(self.pool, upstream)
        shadows = Shadows(self.router, upstream, self.ledger, limit=config.shadow_in_flight)
        self.parts = Parts(
            config=config,
            table=self.table,
            router=self.router,
            upstream=upstream,
            shadows=shadows,
            ledger=self.ledger,
        )
        self.draining = False
        self.probing: asyncio.Task[None] | None = None
        self._running: dict[asyncio.Task[None], Exchange] = {}
        build_info(self.ledger.metrics.registry, process="gateway", version=__version__)

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, config: GatewayConfig, *, folder: Path) -> AsyncIterator["Gateway"]:
        """A gateway that has read the states kept in `folder`, probes their replicas and can answer."""
        async with Upstream(config) as upstream:
            gateway = cls(config, upstream, folder=folder)
            gateway.table.load()
            for model, state in gateway.table.states().items():
                gateway.pool.follow(model, state)
            gateway.probing = asyncio.create_task(gateway.prober.run())
            try:
                yield gateway
            finally:
                gateway.probing.cancel()
                await asyncio.wait((gateway.probing,))
                await gateway.parts.shadows.close()
            if not gateway.probing.cancelled():
                gateway.probing.result()

    async def set_traffic(self, model: str, state: TrafficState) -> TrafficState:
        """Puts a state in force; returns when new replicas have been probed once. Raises as TrafficTable.put."""
        in_force = await self.table.put(model, state)
        new = self.pool.follow(model, in_force)
        await self.prober.meet(new)
        return in_force

    @property
    def running(self) -> int:
        """Requests of clients that have not ended."""
        return len(self._running)

    def expire(self) -> None:
        """Ends what is still running, with an error to each client: the time to drain is over."""
        for task, exchange in list(self._running.items()):
            exchange.interrupt("shutdown")
            task.cancel()

    async def proxy(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answers one request through a replica, and gives it up as soon as the client leaves."""
        arrived = time.monotonic()
        headers: Headers = list(scope["headers"])
        request_id = request_id_of(headers)
        client = ClientStream(send, [(b"x-request-id", request_id.encode())])
        query = scope["query_string"].decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        try:
            body = await read_body(receive, headers, limit=self.config.max_body_bytes)
            if body is None:
                return
            peer = scope["client"][0] if scope.get("client") else None
            ask = read_ask(target, headers, body, arrived=arrived, request_id=request_id, peer=peer)
        except ApiError as refusal:
            await client.error(refusal)
            return
        await self._watched(Exchange(ask, client, self.parts), receive)

    async def _watched(self, exchange: Exchange, receive: Receive) -> None:
        work = asyncio.create_task(exchange.run())
        leaving = asyncio.create_task(gone(receive))
        self._running[work] = exchange
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not work.done():
                work.cancel()
            await asyncio.wait((work, leaving))
            del self._running[work]
        if not work.cancelled():
            work.result()


class _Proxy:
    """An ASGI application of its own, since the router would take a plain method for one that wants a Request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.proxy(scope, receive, send)


def public_app(gateway: Gateway) -> Starlette:
    """The ASGI application that clients reach."""

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(name) for name in gateway.table.states()]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if gateway.table.get(name) is None:
            return unknown_model(name).response()
        return JSONResponse(_model_card(name))

    async def metrics(_: Request) -> Response:
        gateway.ledger.refresh(gateway.table, gateway.pool)
        return Response(generate_latest(gateway.ledger.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    routes = [HttpRoute(path, _Proxy(gateway), methods=["POST"]) for path in PROXIED]
    routes += [
        HttpRoute("/v1/models", models),
        HttpRoute("/v1/models/{model:path}", model),
        HttpRoute("/metrics", metrics),
    ]
    return Starlette(
        routes=[*routes, *state_routes(gateway)],
        exception_handlers={HTTPException: answer_http_error, 500: answer_crash},
    )


def state_routes(gateway: Gateway) -> list[HttpRoute]:
    """/live, /ready, /health, /version: the same on the public port and the admin socket."""

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        # Not bound to the replicas': a model that is down gets its own 503, it does not take the front door away.
        models = {
            name: {"stable_ready": len(gateway.pool.ready(state.stable, state.replicas[state.stable]))}
            for name, state in gateway.table.states().items()
        }
        status = "draining" if gateway.draining else "ready"
        return JSONResponse({"status": status, "models": models}, status_code=503 if gateway.draining else 200)

    async def version(_: Request) -> Response:
        return JSONResponse({"process": "gateway", "version": __version__, "pid": os.getpid()})

    return [
        HttpRoute("/live", live),
        HttpRoute("/ready", ready),
        HttpRoute("/health", ready),
        HttpRoute("/version", version),
    ]


def _model_card(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": _STARTED, "owned_by": "narrowgauge"}
