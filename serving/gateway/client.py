"""The client's side of one request: an answer sent whole, or a stream that begins once and is kept alive."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Send

from narrowgauge.serving.gateway.ask import Headers
from narrowgauge.serving.gateway.events import error_event
from narrowgauge.serving.openai.errors import ApiError

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientStream:
    """Sends one answer. `started`: the headers are out. `forwarded`: a data event is, so nothing can be repeated."""

    def __init__(self, send: Send, own_headers: Headers) -> None:
        self._send = send
        self._own = own_headers
        self._lock = asyncio.Lock()  # headers and comments of the pacing task never mix with what the replica sends
        self.started = False
        self.forwarded = False
        self.ended = False
        self.last_sent = time.monotonic()

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer. Its length is ours to say: two lengths, even equal ones, are a malformed answer to strict clients."""
        self.started = self.forwarded = self.ended = True
        given = [header for header in headers if header[0] != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        await self._message("http.response.start", status=status, headers=[*given, *self._own, length])
        await self._message("http.response.body", body=body)

    async def error(self, error: ApiError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """An OpenAI-shaped error: as the answer where nothing was sent yet, else in-band with the stream's end."""
        if self.started:
            await self.end(error_event(error))
            return
        response = error.response()
        await self.answer(error.status, [*response.raw_headers, *headers], bytes(response.body))

    async def start(self, headers: Headers) -> None:
        """The stream's headers, if they are not out yet."""
        async with self._lock:
            await self._start(headers)

    async def write(self, events: bytes, headers: Headers) -> None:
        """Whole events, after the headers if those are not out yet."""
        async with self._lock:
            self.forwarded = True
            if not self.started:
                await self._start(headers)
            self.last_sent = time.monotonic()
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def comment(self) -> None:
        """A sign of life."""
        async with self._lock:
            if self.started and not self.ended:
                self.last_sent = time.monotonic()
                await self._message("http.response.body", body=b": waiting\n\n", more_body=True)

    async def end(self, events: bytes = b"") -> None:
        """The last events and the end of the stream; a stream that ended already stays as it is."""
        async with self._lock:
            if not self.ended:
                self.ended = self.forwarded = True
                await self._message("http.response.body", body=events)

    async def _start(self, headers: Headers) -> None:
        if not self.started:
            self.started = True
            self.last_sent = time.monotonic()
            await self._message("http.response.start", status=200, headers=[*_STREAM_HEADERS, *headers, *self._own])

    async def _message(self, kind: str, **fields: Any) -> None:
        await self._send({"type": kind, **fields})


async def gone(receive: Receive) -> None:
    """Returns once the client has closed the connection (or has had its whole answer)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, headers: Sequence[tuple[bytes, bytes]], *, limit: int) -> bytes | None:
    """The request's body, or None where the client left first. Raises ApiError (413) above `limit` bytes."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes; shorten the prompt")
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        if not message.get("more_body"):
            return b"".join(parts)
