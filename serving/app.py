"""The replica's HTTP application: OpenAI's endpoints, probes and metrics over one engine."""

import re
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import narrowgauge
from narrowgauge.engine.async_engine import AsyncEngine
from narrowgauge.serving.health import ReplicaIdentity, ReplicaState, health_routes
from narrowgauge.serving.metrics import ReplicaMetrics, build_info, exposition
from narrowgauge.serving.openai.chat import chat_routes
from narrowgauge.serving.openai.completions import completion_routes
from narrowgauge.serving.openai.errors import (
    ApiError,
    answer_api_error,
    answer_client_gone,
    answer_crash,
    answer_http_error,
)
from narrowgauge.serving.openai.generation import Service
from narrowgauge.serving.openai.protocol import sampling_defaults
from narrowgauge.serving.openai.sse import HEARTBEAT_S, ClientGone
from narrowgauge.serving.openai.tokenize import model_routes

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def create_app(engine: AsyncEngine, *, identity: ReplicaIdentity, heartbeat_s: float = HEARTBEAT_S) -> FastAPI:
    """The application over an engine that is loaded (after `ready()`)."""
    state = ReplicaState(identity=identity)
    state.attach(engine, sampling_defaults=sampling_defaults(engine.config.model))
    return create_replica_app(state, heartbeat_s=heartbeat_s)


def create_replica_app(state: ReplicaState, *, heartbeat_s: float = HEARTBEAT_S) -> FastAPI:
    """The application of a replica whose engine may still be loading: probes answer, the rest says 503 until `attach`."""
    registry = CollectorRegistry()
    build_info(registry, process="replica", version=narrowgauge.__version__)
    metrics = ReplicaMetrics(
        registry,
        model=state.identity.model,
        snapshot=lambda: state.engine.stats() if state.engine is not None else None,
    )
    service = Service(state, metrics, heartbeat_s=heartbeat_s)
    app = FastAPI(openapi_url=None)
    for routes in (chat_routes, completion_routes, model_routes):
        app.include_router(routes(service))
    app.include_router(health_routes(state))

    @app.get("/metrics")
    async def scrape() -> Response:
        identity = state.identity
        metrics.revision_info.labels(identity.model, identity.revision, identity.digest, "all").set(1)
        body, kind = exposition(registry)
        return Response(body, media_type=kind)

    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(ClientGone, answer_client_gone)
    app.add_exception_handler(ClientDisconnect, answer_client_gone)
    app.add_exception_handler(Exception, answer_crash)
    app.add_middleware(_Headers, state=state)
    return app


class _Headers:
    """Adds to every answer which revision gave it and the request's id; while draining, also that the connection ends."""

    def __init__(self, app: ASGIApp, state: ReplicaState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        own: list[tuple[bytes, Any]] = [
            (b"x-request-id", given if _REQUEST_ID.fullmatch(given) else uuid4().hex.encode()),
            (b"x-narrowgauge-revision", self._state.identity.revision.encode()),
        ]

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                closing = [(b"connection", b"close")] if self._state.draining else []
                message = {**message, "headers": [*message["headers"], *own, *closing]}
            await send(message)

        await self._app(scope, receive, add)
