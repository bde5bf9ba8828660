"""The engine for servers: a thread runs the step loop, callers await on their event loop, which is never blocked."""

from types import TracebackType

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.request import Request, RequestOutput
from narrowgauge.engine.stats import EngineStats
from narrowgauge.engine.tokenizer import Tokenizer


class EngineDead(RuntimeError):
    """The step loop has ended (by an error or by shutdown); every stream fails with this, and so does every new request."""


class EngineBusy(RuntimeError):
    """The waiting queue is full; the caller should try again later."""


class RequestStream:
    """The outputs of one request: `async for output in stream`. Iterate it on the event loop where it was made.

    Ends after the output that carries a finish_reason. `aclose()` (also by `async with`, and when the stream is dropped)
    aborts what still runs: its blocks are free within one step. Raises EngineDead where the loop dies.
    """

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Aborts the request if it still runs. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncEngine:
    """Owns the thread that loads the model and runs the step loop."""

    tokenizer: Tokenizer  # after ready()
    max_model_len: int  # after ready()
    vocab_size: int  # after ready(): the model's, ids at or above it are refused

    def __init__(self, config: EngineConfig) -> None:
        """Starts loading in the engine's own thread and returns at once."""
        self.config = config

    async def ready(self) -> None:
        """Returns when requests can be served. Raises the error that ended the load."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Loaded, and the loop lives."""
        raise NotImplementedError

    @property
    def death(self) -> BaseException | None:
        """What ended the loop, or None while it lives (or loads)."""
        raise NotImplementedError

    def generate(self, request: Request) -> RequestStream:
        """Queues a request and returns its stream. Call it on the event loop, after `ready()`.

        Raises here, before anything is queued: RequestError (the caller's mistake), EngineBusy (queue full), EngineDead.
        Two live requests may carry the same request_id.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Ends every live request of that id with finish_reason "abort", within one step. Unknown ids are ignored."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """A snapshot; cheap, from any thread."""
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Fails what still runs with EngineDead, stops the loop and joins the thread. Idempotent."""
        raise NotImplementedError
