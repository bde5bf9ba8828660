"""Server-sent events: headers at once, a comment in every silence, and a client who leaves is noticed.

A client's departure shows only as `http.disconnect` on `receive()`, so something must wait there as long as we work;
and proxies tell us about it only once the answer has begun, hence the headers and `: queued` before the first token.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEARTBEAT_S = 3.0
QUEUED = b": queued\n\n"
ALIVE = b": alive\n\n"
DONE = b"data: [DONE]\n\n"

_Answer = TypeVar("_Answer")


class ClientGone(Exception):
    """The client hung up; nobody is left to answer."""


def event(value: dict[str, Any]) -> bytes:
    """One `data:` event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields (whole events as bytes). `close` runs at the end, however it comes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.events, self.close, self.heartbeat_s = events, close, heartbeat_s
        self.status_code = 200
        self.background = None
        self.body = b""
        self._last_sent_s = time.monotonic()
        self._ended = False
        # no content-length; proxies must neither buffer nor cache
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, QUEUED)
            work = asyncio.create_task(self._forward(send))
            watch = asyncio.create_task(_until_gone(receive))
            beat = asyncio.create_task(self._beat(send))
            await _first_of(work, watch, beat)
        finally:
            await self.close()

    async def _forward(self, send: Send) -> None:
        try:
            async for chunk in self.events:
                await self._send(send, chunk)
        finally:
            await self.events.aclose()
        self._ended = True  # a heartbeat that is due in this very moment must not follow the end
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        while not self._ended:
            silent_s = time.monotonic() - self._last_sent_s
            if silent_s >= self.heartbeat_s:
                await self._send(send, ALIVE)
                silent_s = 0.0
            await asyncio.sleep(self.heartbeat_s - silent_s)
        # The stream's end may still be on its way to a slow reader: were this task done, it would be cancelled.
        await asyncio.Event().wait()

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._last_sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def while_connected(receive: Receive, work: Awaitable[_Answer]) -> _Answer:
    """The result of `work`; cancels it and raises ClientGone where the client leaves first. The body must be read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_until_gone(receive))
    await _first_of(task, watch)
    if task.cancelled():
        raise ClientGone
    return task.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(*tasks: asyncio.Future[Any]) -> None:
    """Waits for one of the tasks, ends the others, and raises the first error among those that ended by themselves."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if not task.cancelled() and (error := task.exception()):
            raise error
