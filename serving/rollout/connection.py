"""One kept-open connection to an admin API: making a client anew for each request costs tens of milliseconds."""

import contextlib
from typing import Any

import httpx

from narrowgauge.serving.sockets import async_admin_client


class Unreachable(RuntimeError):
    """The other process did not answer, or not in a way that can be read."""


class Connection:
    """Speaks to `url` (`unix:PATH` or `http://HOST:PORT`); `name` stands in errors. Survives restarts of the other side."""

    def __init__(self, name: str, url: str, *, timeout_s: float = 5.0) -> None:
        self._name = name
        self._url = url
        self._timeout_s = timeout_s
        self._stack = contextlib.AsyncExitStack()
        self._client: httpx.AsyncClient | None = None

    async def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request. Raises Unreachable; an answer of any status is returned."""
        try:
            client = self._client or await self._open()
            return await client.request(method, path, json=body)
        except (httpx.HTTPError, OSError) as error:
            await self.close()
            raise Unreachable(f"{self._name} at {self._url}: {error or type(error).__name__}") from None

    async def _open(self) -> httpx.AsyncClient:
        opened = async_admin_client(self._url, timeout_s=self._timeout_s)
        client: httpx.AsyncClient = await self._stack.enter_async_context(opened)
        self._client = client
        return client

    async def json(self, path: str) -> Any:
        """The body of a GET that must succeed. Raises Unreachable."""
        response = await self.request("GET", path)
        if response.status_code != 200:
            raise self.unreadable(message_of(response))
        try:
            return response.json()
        except ValueError:
            raise self.unreadable("the answer is not JSON") from None

    def unreadable(self, what: str) -> Unreachable:
        """The error that names who gave this answer."""
        return Unreachable(f"{self._name} at {self._url}: {what}")

    async def close(self) -> None:
        """Closes it; the next request opens it again."""
        self._client = None
        await self._stack.aclose()


def message_of(response: httpx.Response) -> str:
    """The error message in an answer of our admin APIs, else its status."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
