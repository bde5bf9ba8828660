"""HTTP to the replicas: kept-alive connections, no proxy from the environment, bytes as they come."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import aiohttp
from yarl import URL

from narrowgauge.serving.gateway.ask import Ask, Headers, end_to_end
from narrowgauge.serving.gateway.config import GatewayConfig
from narrowgauge.serving.gateway.replicas import Replica, Seen
from narrowgauge.serving.gateway.routing import Route

# A pooled connection must be gone before the replica closes it (uvicorn: after 5 s), else a request meets the closing.
_KEEP_ALIVE_S = 4.0
_NOT_RETURNED = frozenset(b"content-length date server x-request-id".split())
_IGNORED = b"x-narrowgauge-ignored-fields"  # what the replica alone can tell
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class ReplicaFailed(Exception):
    """A replica gave no (whole) answer. `status` counts as the outcome: 502 lost, 504 silent.

    `sent`: the replica may have seen the request. `refused`: nobody listens at its address.
    """

    def __init__(self, message: str, *, status: int, sent: bool, refused: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.sent = sent
        self.refused = refused


class UpstreamAnswer:
    """A replica's answer whose headers have come. Its reading methods raise ReplicaFailed."""

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._response = response
        self._url = url
        self.status = response.status
        self.is_event_stream = response.status == 200 and response.content_type == "text/event-stream"

    @property
    def headers(self) -> Headers:
        """What of its headers the client is to see; lengths, dates and our own headers are set anew."""
        return [
            (name, value)
            for name, value in end_to_end(self._response.raw_headers)
            if name not in _NOT_RETURNED and (not name.startswith(b"x-narrowgauge-") or name == _IGNORED)
        ]

    @property
    def ignored_fields(self) -> Headers:
        """The header by which a replica names the request's fields that nobody read, if it does."""
        return [(name, value) for name, value in self.headers if name == _IGNORED]

    async def chunk(self) -> bytes:
        """The next bytes as soon as there are any; empty at the end."""
        with _named(self._url):
            return await self._response.content.readany()

    async def whole(self) -> bytes:
        """All (remaining) bytes."""
        with _named(self._url):
            return await self._response.read()


class Upstream:
    """The client side of the gateway; use it as an async context manager."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            skip_auto_headers=_AUTO_HEADERS,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.close()

    @property
    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside `async with`"
        return self._session

    @contextlib.asynccontextmanager
    async def send(self, route: Route, ask: Ask, *, shadow: bool = False) -> AsyncIterator[UpstreamAnswer]:
        """Sends the request and gives the answer once its headers are there. Raises ReplicaFailed.

        Leaving the block before the answer's end closes the connection at once, so that the replica stops its work.
        """
        headers = [(name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in ask.headers]
        headers.append(("x-narrowgauge-role", route.role))
        if shadow:
            headers.append(("x-narrowgauge-shadow", "1"))
        url = route.replica.url
        silence = self._config.idle_s if ask.stream else self._config.answer_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_s, sock_read=silence)
        with _named(url):
            response = await self._opened.post(
                URL(url + ask.target, encoded=True),
                data=ask.body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            )
        try:
            yield UpstreamAnswer(response, url)
        finally:
            response.close()  # a connection whose answer was read to its end has gone back to the pool before

    async def probe(self, replica: Replica, timeout_s: float) -> Seen:
        """Asks /ready once."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._opened.get(f"{replica.url}/ready", timeout=timeout, allow_redirects=False) as response:
                return "ready" if response.status == 200 else "missed"
        except aiohttp.ClientConnectorError as error:
            return "refused" if isinstance(error.os_error, ConnectionRefusedError) else "missed"
        except (aiohttp.ClientError, TimeoutError):
            return "missed"


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """Turns what the client library raises into ReplicaFailed."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        raise ReplicaFailed(f"{url}: cannot connect: {error}", status=502, sent=False, refused=refused) from error
    except aiohttp.ConnectionTimeoutError as error:
        raise ReplicaFailed(f"{url}: no connection in time", status=504, sent=False) from error
    except (aiohttp.ServerTimeoutError, TimeoutError) as error:
        raise ReplicaFailed(f"{url}: fell silent", status=504, sent=True) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ReplicaFailed(f"{url}: {error!r}", status=502, sent=True) from error
