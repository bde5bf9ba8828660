"""The engine for servers: a thread runs the step loop, callers await on their event loop, which is never blocked.

Callers put commands in an inbox; after each step the loop hands what it produced to each caller's event loop in one call.
Text is made on the event loop's side. The thread alone touches the LLMEngine once it is loaded.
"""

import asyncio
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.llm_engine import LLMEngine
from narrowgauge.engine.output import OutputBuilder, StepOutput
from narrowgauge.engine.request import FinishReason, Request, RequestLimits, RequestOutput
from narrowgauge.engine.stats import EngineStats
from narrowgauge.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
"""How long the loop sleeps without work before it shows a heartbeat again."""


class EngineDead(RuntimeError):
    """The step loop has ended (by an error or by shutdown); every stream fails with this, and so does every new request."""


class EngineBusy(RuntimeError):
    """The waiting queue is full; the caller should try again later."""


class RequestStream:
    """The outputs of one request: `async for output in stream`. Iterate it on the event loop where it was made.

    Ends after the output that carries a finish_reason; a slow reader gets fewer, longer outputs. `aclose()` (also by
    `async with`, and when the stream is dropped) aborts what still runs: its blocks are free within one step. Raises
    EngineDead where the loop dies.
    """

    def __init__(self, builder: OutputBuilder, drop: Callable[[], None]) -> None:
        """Made by AsyncEngine.generate. `drop` tells the engine to forget the request; it is idempotent."""
        self._builder = builder
        self._drop = drop
        self._changed = asyncio.Event()
        self._death: EngineDead | None = None
        self._over = False
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        while not self._builder.filled:
            if self._death is not None:
                self._over = True
                raise self._death
            self._changed.clear()
            await self._changed.wait()
        output = self._builder.take()
        self._over = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Aborts the request if it still runs. Idempotent."""
        self._over = True
        self._drop()

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._over:
            # Not at once: a finalizer may run in the engine's thread while that holds the lock which waking it takes.
            _call(self._loop, self._drop)

    def _push(self, step: StepOutput) -> None:
        if self._builder.push(step):
            self._drop()  # a stop string ended it: the engine does not know of texts
        self._changed.set()

    def _end(self, reason: FinishReason) -> None:
        self._builder.end(reason)
        self._changed.set()

    def _fail(self, death: EngineDead) -> None:
        self._death = death
        self._changed.set()


class AsyncEngine:
    """Owns the thread that loads the model and runs the step loop."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts loading in the engine's own thread and returns at once."""
        self.config = config
        self._tokenizer: Tokenizer | None = None
        self._engine: LLMEngine | None = None
        self._death: BaseException | None = None
        self._loaded = threading.Event()
        self._load_waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        # Makes admission one step: the queue's length is read, and stream and inbox are filled, with nobody in between.
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._inbox: deque[Request | str] = deque()  # a request to add, or the engine's id of one to drop
        self._queued = 0  # requests in the inbox
        self._streams: dict[str, _Live] = {}
        self._ids = itertools.count()
        self._heartbeat_s = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="narrowgauge-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; after `ready()`."""
        assert self._tokenizer is not None, "await ready() first"
        return self._tokenizer

    @property
    def limits(self) -> RequestLimits:
        """What a request must fit into; after `ready()`."""
        assert self._engine is not None, "await ready() first"
        return self._engine.limits

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together; after `ready()`."""
        return self.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """The model's: ids at or above it are refused; after `ready()`."""
        return self.limits.vocab_size

    @property
    def is_ready(self) -> bool:
        """Loaded, and the loop lives."""
        return self._loaded.is_set() and self._death is None

    @property
    def death(self) -> BaseException | None:
        """What ended the loop (or the load), or None while it lives."""
        return self._death

    async def ready(self) -> None:
        """Returns when requests can be served. Raises the error that ended the load."""
        event = asyncio.Event()
        with self._lock:
            if not self._loaded.is_set():
                self._load_waiters.append((asyncio.get_running_loop(), event))
            else:
                event.set()
        await event.wait()
        if self._death is not None:
            raise self._death

    def generate(self, request: Request) -> RequestStream:
        """Queues a request and returns its stream. Call it on the event loop, after `ready()`.

        Raises here, before anything is queued: RequestError (the caller's mistake), EngineBusy (queue full), EngineDead.
        Two live requests may carry the same request_id.
        """
        if self._death is not None:
            raise _dead(self._death)
        self.limits.check(request)
        assert self._engine is not None
        own_id = f"{next(self._ids)}/{request.request_id}"
        stream = RequestStream(OutputBuilder(request, self.tokenizer), partial(self._drop, own_id))
        with self._lock:
            if self._death is not None:
                raise _dead(self._death)
            waiting = self._engine.waiting + self._queued
            if waiting >= self.config.max_waiting:
                raise EngineBusy(
                    f"{waiting} requests are waiting already (--max-waiting {self.config.max_waiting}); try again later"
                )
            self._streams[own_id] = _Live(request.request_id, asyncio.get_running_loop(), weakref.ref(stream))
            self._inbox.append(Request(request_id=own_id, prompt_ids=request.prompt_ids, params=request.params))
            self._queued += 1
        self._wake.set()
        return stream

    def abort(self, request_id: str) -> None:
        """Ends every live request of that id with finish_reason "abort", within one step. Unknown ids are ignored."""
        # A copy, made in one step: the engine's thread and finalizers take streams out at any time, without the lock.
        found = [(own_id, live) for own_id, live in self._streams.copy().items() if live.request_id == request_id]
        for own_id, live in found:
            self._drop(own_id)
            _call(live.loop, partial(live.end, "abort"))

    def stats(self) -> EngineStats:
        """A snapshot; cheap, from any thread, after `ready()`. Requests not yet taken in count as waiting."""
        assert self._engine is not None, "await ready() first"
        return self._engine.stats(heartbeat_s=self._heartbeat_s, unseen=self._queued)

    async def shutdown(self) -> None:
        """Fails what still runs with EngineDead, stops the loop and joins the thread. Idempotent."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def _drop(self, own_id: str) -> None:
        """Forgets a request and tells the loop to free its blocks. Idempotent, from any thread (also a finalizer's)."""
        if self._streams.pop(own_id, None) is not None:
            self._inbox.append(own_id)
            self._wake.set()

    def _main(self) -> None:
        try:
            self._tokenizer = Tokenizer.from_folder(self.config.model)
            self._engine = LLMEngine(self.config, eos_ids=self._tokenizer.eos_ids)
            self._announce()
            while not self._stopping:
                self._turn(self._engine)
            self._die(EngineDead("the engine was shut down"))
        except BaseException as error:  # whatever it is, nobody may wait for this thread any longer
            if self._loaded.is_set():
                logger.exception("the engine's step loop has ended")
            self._die(error)
            self._announce()

    def _announce(self) -> None:
        with self._lock:
            self._loaded.set()
            waiters, self._load_waiters = self._load_waiters, []
        for loop, event in waiters:
            _call(loop, event.set)

    def _turn(self, engine: LLMEngine) -> None:
        """One round: commands, then a step, then delivery."""
        self._heartbeat_s = time.monotonic()
        self._wake.clear()
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, str):
                engine.abort(command)
                continue
            with self._lock:
                self._queued -= 1
            # Dropped before it was taken in: its abort may lie in the inbox already, or behind us.
            if command.request_id in self._streams:
                engine.add_request(command)
        if engine.has_work:
            self._deliver(engine.step())
        else:
            self._wake.wait(IDLE_WAIT_S)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Live, StepOutput]]] = {}
        for output in outputs:
            live = self._streams.get(output.request_id)
            if live is None:
                continue
            if output.finish_reason is not None:
                self._streams.pop(output.request_id, None)
            by_loop.setdefault(live.loop, []).append((live, output))
        for loop, pushes in by_loop.items():
            if not _call(loop, partial(_push_all, pushes)):
                for _, output in pushes:  # the caller's loop has closed: nobody reads these any more
                    self._drop(output.request_id)

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._death = error
            streams, self._streams = self._streams, {}
        for live in streams.values():
            _call(live.loop, partial(live.fail, _dead(error)))


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that has not ended: the caller's id and loop, and its stream, held weakly so that dropping it aborts."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    stream: "weakref.ref[RequestStream]"

    def push(self, output: StepOutput) -> None:
        if (stream := self.stream()) is not None:
            stream._push(output)

    def end(self, reason: FinishReason) -> None:
        if (stream := self.stream()) is not None:
            stream._end(reason)

    def fail(self, death: EngineDead) -> None:
        if (stream := self.stream()) is not None:
            stream._fail(death)


def _push_all(pushes: list[tuple[_Live, StepOutput]]) -> None:
    for live, output in pushes:
        live.push(output)


def _dead(error: BaseException) -> EngineDead:
    if isinstance(error, EngineDead):
        return error
    return EngineDead(f"the engine has stopped: {type(error).__name__}: {error}")


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    """Runs a function on a loop soon; False where that loop has closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True
