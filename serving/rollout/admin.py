"""The controller's admin API: rollouts, their events and verdicts, models and replicas. For a Unix socket of mode 600."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict

from narrowgauge.quant.formats.read import plain
from narrowgauge.serving.registry import RegistryError
from narrowgauge.serving.rollout.controller import Controller, Refused
from narrowgauge.serving.rollout.decide import allowed_actions
from narrowgauge.serving.rollout.registration import Registrar, VersionRejected
from narrowgauge.serving.rollout.spec import SpecError, read_revision, read_spec
from narrowgauge.serving.rollout.state import Action, Asked, Event, Moved, Registered, State, event_to_json
from narrowgauge.serving.rollout.store import LeadershipLost


class StartBody(BaseModel):
    """POST /admin/v1/rollouts. Revision and spec are read by our own reader, whose errors name the key."""

    model_config = ConfigDict(extra="forbid")
    model: str
    revision: dict[str, Any]
    spec: dict[str, Any]
    override: str | None = None


class AskBody(BaseModel):
    """POST /admin/v1/rollouts/ID/ACTION: the epoch that the asker looked at."""

    model_config = ConfigDict(extra="forbid", strict=True)
    epoch: int


def create_admin_app(controller: Controller, *, registrar: Registrar, metrics: CollectorRegistry) -> FastAPI:
    """The application. Errors are `{"error": {"message": one line}}`."""
    app = FastAPI(openapi_url=None)
    _handle_errors(app)
    _rollout_routes(app, controller)
    _model_routes(app, controller, registrar)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    return app


def _rollout_routes(app: FastAPI, controller: Controller) -> None:
    store = controller.store

    def described(rollout_id: str) -> dict[str, Any]:
        state = controller.state(rollout_id)
        if state is None:
            raise Refused(f"no rollout {rollout_id}", status=404)
        return describe(state, store.events(rollout_id))

    @app.post("/admin/v1/rollouts")
    async def start(body: StartBody) -> Response:
        started = await controller.start(
            model=body.model,
            revision=read_revision(body.revision, source="revision"),
            spec=read_spec(body.spec, source="spec"),
            override=body.override,
        )
        answer = {**described(started.state.rollout.id), "created": started.created, "note": started.note}
        return JSONResponse(answer, status_code=201 if started.created else 200)

    @app.get("/admin/v1/rollouts")
    async def rollouts(model: str | None = None) -> list[dict[str, Any]]:
        return [described(state.rollout.id) for state in store.states(model=model)]

    @app.get("/admin/v1/rollouts/{rollout_id}")
    async def one(rollout_id: str) -> dict[str, Any]:
        return described(rollout_id)

    @app.get("/admin/v1/rollouts/{rollout_id}/events")
    async def events(rollout_id: str) -> list[dict[str, Any]]:
        described(rollout_id)
        return [event_to_json(event) for event in store.events(rollout_id)]

    @app.post("/admin/v1/rollouts/{rollout_id}/{action}")
    async def ask(rollout_id: str, action: Action, body: AskBody) -> dict[str, Any]:
        controller.ask(rollout_id, action, body.epoch)
        return described(rollout_id)

    @app.get("/admin/v1/gate/{rollout_id}")
    async def gate(rollout_id: str) -> dict[str, Any]:
        state = controller.state(rollout_id)
        if state is None:
            raise Refused(f"no rollout {rollout_id}", status=404)
        return {"result": gate_result(state), "gate": state.gate, "reason": state.reason}


def _model_routes(app: FastAPI, controller: Controller, registrar: Registrar) -> None:
    def served(model: str) -> dict[str, Any]:
        revision, promoted_by, active = controller.models().get(model, (None, None, None))
        stable = {**plain(revision), "id": revision.id} if revision else None
        return {"model": model, "stable": stable, "promoted_by": promoted_by, "rollout": active}

    @app.get("/admin/v1/models")
    async def models() -> list[dict[str, Any]]:
        registered = await asyncio.to_thread(registrar.models)
        return [served(model) for model in sorted({*registered, *controller.models()})]

    @app.get("/admin/v1/models/{model:path}")
    async def one(model: str) -> dict[str, Any]:
        versions = await asyncio.to_thread(registrar.versions, model)
        if not versions and model not in controller.models():
            raise Refused(f"no model '{model}' is served or registered", status=404)
        return {**served(model), "versions": [plain(version) for version in versions]}

    @app.get("/admin/v1/replicas")
    async def replicas() -> list[dict[str, Any]]:
        live = [(replica, False) for replica in controller.platform.replicas()]
        live += [(replica, True) for replica in controller.platform.stopping()]
        return [
            {**plain(replica), "ready": controller.prober.ready(replica), "stopping": stopping}
            for replica, stopping in live
        ]


def describe(state: State, events: tuple[Event, ...]) -> dict[str, Any]:
    """A rollout as people and programs read it: constants, phase with its history, gates with their figures."""
    rollout = state.rollout
    moves = [event for event in events if isinstance(event, Moved)]
    return {
        "id": rollout.id,
        "model": rollout.revision.model,
        "revision": plain(rollout.revision),
        "revision_id": rollout.new_id,
        "stable_id": rollout.old_id,
        "spec": plain(rollout.spec),
        "override": rollout.override,
        "phase": state.phase,
        "terminal": state.terminal,
        "step": state.step,
        "epoch": state.epoch,
        "allowed": list(allowed_actions(state)),
        "reason": state.reason,
        "gate": state.gate,
        "result": gate_result(state),
        "verdicts": plain(state.verdicts),
        "traffic": plain(state.traffic),
        "restarts": len(state.lost),
        "registry": next((event.detail for event in events if isinstance(event, Registered)), None),
        "created_at": rollout.created_at,
        "deadline_at": state.deadline_at,
        "finished_at": state.since if state.terminal else None,
        "phases": [{"phase": m.phase, "step": m.step, "at": m.at, "reason": m.reason, "gate": m.gate} for m in moves],
        "asked": [{"action": event.action, "at": event.at} for event in events if isinstance(event, Asked)],
    }


def gate_result(state: State) -> str:
    """All gates in one word, for other controllers that ask ours: an ended rollout answers by its outcome."""
    if state.phase in ("Completed", "Aborted", "Aborting"):
        return "pass" if state.phase == "Completed" else "fail"
    results = [verdict.result for verdict in state.verdicts]
    if "fail" in results:
        return "fail"
    return "pass" if results and all(result == "pass" for result in results) else "inconclusive"


def _handle_errors(app: FastAPI) -> None:
    def answer(status: int, message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": message}}, status_code=status)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return answer(error.status, str(error))

    @app.exception_handler(VersionRejected)
    async def rejected(_: Request, error: VersionRejected) -> Response:
        return answer(409, str(error))

    @app.exception_handler(SpecError)
    async def bad_spec(_: Request, error: SpecError) -> Response:
        return answer(400, str(error))

    @app.exception_handler(RegistryError)
    async def registry_down(_: Request, error: RegistryError) -> Response:
        return answer(502, f"the registry cannot be asked: {error}")

    @app.exception_handler(LeadershipLost)
    async def not_leading(_: Request, error: LeadershipLost) -> Response:
        return answer(503, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return answer(400, f"{where}: {first['msg']}")
