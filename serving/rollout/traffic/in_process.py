"""The gateway itself as the router, over its admin API."""

from typing import Any
from urllib.parse import quote

from narrowgauge.quant.formats.read import plain
from narrowgauge.serving.gateway.traffic import TrafficError, TrafficState, read_state
from narrowgauge.serving.rollout.connection import Connection, message_of
from narrowgauge.serving.rollout.traffic.base import RouterRefused


class InProcessRouter:
    """Speaks to the gateway through `connection`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, model: str) -> TrafficState | None:
        """GET /admin/v1/traffic/{model}."""
        response = await self._connection.request("GET", _path(model))
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise self._connection.unreadable(message_of(response))
        return self._state(response.json())

    async def write(self, model: str, state: TrafficState) -> TrafficState:
        """PUT /admin/v1/traffic/{model}; the answer is what was read back."""
        response = await self._connection.request("PUT", _path(model), plain(state))
        if 400 <= response.status_code < 500:
            raise RouterRefused(f"gateway: {message_of(response)}", stale=response.status_code == 409)
        if response.status_code != 200:
            raise self._connection.unreadable(message_of(response))
        return self._state(response.json())

    async def newest_epoch(self) -> int:
        """GET /admin/v1/traffic."""
        states = await self._connection.json("/admin/v1/traffic")
        return max((self._state(state).epoch for state in states.values()), default=0)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    def _state(self, body: Any) -> TrafficState:
        try:
            return read_state(body)
        except TrafficError as error:
            raise self._connection.unreadable(str(error)) from None


def _path(model: str) -> str:
    return f"/admin/v1/traffic/{quote(model, safe='')}"
