"""What a replica is and whether it takes requests: /live, /ready, /health, /version, and the admin API's /drain.

/live answers from the moment the socket is bound; it fails only where a restart helps (the engine died or hangs).
/ready says whether to route here: not while loading, draining or dead. /health is vLLM's: 200 once the engine runs,
also while it drains.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, Response

import narrowgauge
from narrowgauge.engine.async_engine import AsyncEngine

HANG_S = 120.0  # longer than any one step: the slowest is a prefill chunk of a large model on a CPU


@dataclass(frozen=True, kw_only=True)
class ReplicaIdentity:
    """What is served: `model` is the name that clients ask for, `revision` goes into every answer."""

    model: str
    revision: str
    digest: str


class ReplicaState:
    """One replica's state, written by its process and read by its routes; all on one event loop."""

    def __init__(self, *, identity: ReplicaIdentity) -> None:
        """`attach` brings the engine; until then nothing is served."""
        self.identity = identity
        self.engine: AsyncEngine | None = None
        self.sampling_defaults: Mapping[str, Any] = {}
        self.draining = False
        self.in_flight = 0  # requests admitted whose answer is not sent whole
        self.idle = asyncio.Event()  # set while in_flight is 0
        self.idle.set()
        self.progress = "loading the model"

    def attach(self, engine: AsyncEngine, *, sampling_defaults: Mapping[str, Any]) -> None:
        """The engine is loaded: requests are served from now on, with the checkpoint's own defaults."""
        self.sampling_defaults = sampling_defaults
        self.engine = engine

    def begin(self) -> None:
        """A request has been admitted."""
        self.in_flight += 1
        self.idle.clear()

    def end(self) -> None:
        """An admitted request has been answered or left."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()

    def why_dead(self) -> str | None:
        """Why a restart is needed, or None."""
        if self.engine is None:
            return None
        if (death := self.engine.death) is not None:
            return f"the engine has died: {death or type(death).__name__}"
        age_s = self.engine.stats().heartbeat_age_s
        return f"the engine's loop has been silent for {age_s:.0f} s" if age_s > HANG_S else None

    def why_not_ready(self) -> str | None:
        """Why nothing should be routed here, or None."""
        if self.engine is None:
            return self.progress
        return self.why_dead() or ("draining" if self.draining else None)


def health_routes(state: ReplicaState) -> APIRouter:
    """The probes and /version."""
    router = APIRouter()

    @router.get("/live")
    async def live() -> Response:
        return _probe(state.why_dead(), "alive")

    @router.get("/ready")
    async def ready() -> Response:
        return _probe(state.why_not_ready(), "ready")

    @router.get("/health")
    async def health() -> Response:
        reason = state.progress if state.engine is None else state.why_dead()
        return Response(status_code=200) if reason is None else _probe(reason, "healthy")

    @router.get("/version")
    async def version() -> dict[str, Any]:
        identity = state.identity
        return {
            "model": identity.model,
            "revision": identity.revision,
            "digest": identity.digest,
            "pid": os.getpid(),
            "version": narrowgauge.__version__,
        }

    return router


def create_admin_app(state: ReplicaState, *, drain: Callable[[], None]) -> FastAPI:
    """The admin API, for a Unix socket of mode 600: the probes and POST /drain, which ends the process when it is done."""
    app = FastAPI(openapi_url=None)
    app.include_router(health_routes(state))

    @app.post("/drain", status_code=202)
    async def start_drain() -> dict[str, Any]:
        drain()
        return {"draining": True, "in_flight": state.in_flight}

    return app


def _probe(reason: str | None, good: str) -> Response:
    if reason is None:
        return JSONResponse({"status": good})
    return JSONResponse({"status": f"not {good}", "reason": reason}, status_code=503)
