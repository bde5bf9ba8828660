"""The gateway's admin face, on a Unix socket: the controller sets the traffic, reads it back, reads records and counts."""

import json
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from narrowgauge.quant.formats.read import plain
from narrowgauge.serving.gateway.app import Gateway, state_routes
from narrowgauge.serving.gateway.traffic import StaleEpoch, TrafficError, TrafficState, read_state

_LIMIT, _LARGEST_LIMIT = 1_000, 10_000


def admin_app(gateway: Gateway) -> Starlette:
    """The ASGI application of the admin socket. Errors are `{"error": one line}`."""

    async def all_traffic(_: Request) -> Response:
        return JSONResponse({model: plain(state) for model, state in gateway.table.states().items()})

    async def traffic(request: Request) -> Response:
        model = request.path_params["model"]
        state = gateway.table.get(model)
        if state is None:
            return JSONResponse({"error": f"no traffic state was set for the model '{model}'"}, status_code=404)
        return JSONResponse(plain(state))

    async def set_traffic(request: Request) -> Response:
        try:
            state = _sent_state(await request.body())
            in_force = await gateway.set_traffic(request.path_params["model"], state)
        except StaleEpoch as error:
            return JSONResponse({"error": str(error), "state": plain(error.current)}, status_code=409)
        except TrafficError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except OSError as error:
            return JSONResponse(
                {"error": f"the state could not be kept; nothing has changed: {error}"}, status_code=500
            )
        return JSONResponse(plain(in_force))

    async def records(request: Request) -> Response:
        try:
            after = _number(request, "after", default=0, largest=2**63)
            limit = _number(request, "limit", default=_LIMIT, largest=_LARGEST_LIMIT)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        found, following = gateway.ledger.records.after(after, limit=limit)
        return JSONResponse({"records": [record.to_json() for record in found], "next": following})

    async def in_flight(_: Request) -> Response:
        return JSONResponse({"revisions": _in_flight(gateway)})

    routes = [
        HttpRoute("/admin/v1/traffic", all_traffic),
        HttpRoute("/admin/v1/traffic/{model:path}", traffic, methods=["GET"]),
        HttpRoute("/admin/v1/traffic/{model:path}", set_traffic, methods=["PUT"]),
        HttpRoute("/admin/v1/records", records),
        HttpRoute("/admin/v1/inflight", in_flight),
        *state_routes(gateway),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_path})


def _sent_state(body: bytes) -> TrafficState:
    try:
        mapping = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TrafficError(f"the body is not valid JSON: {error}") from None
    return read_state(mapping)


def _number(request: Request, name: str, *, default: int, largest: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{name}: must be a whole number of 0 or more, not {text!r}")
    return min(int(text), largest)


def _in_flight(gateway: Gateway) -> dict[str, Any]:
    """By revision: requests in flight (shadow copies included), and for each replica these and whether it is ready."""
    return {
        revision: {
            "in_flight": sum(replica.in_flight for replica in replicas),
            "replicas": {replica.url: {"in_flight": replica.in_flight, "ready": replica.ready} for replica in replicas},
        }
        for revision, replicas in gateway.pool.in_flight().items()
    }


async def _no_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse({"error": message}, status_code=error.status_code, headers=error.headers)
