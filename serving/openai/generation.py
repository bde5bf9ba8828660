"""From a checked body to running sequences: admission, merging what they yield, and ending all of them when one side leaves."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from uuid import uuid4

from starlette.requests import Request as HttpRequest

from narrowgauge.engine.async_engine import AsyncEngine, EngineBusy, EngineDead, RequestStream
from narrowgauge.engine.request import Request, RequestError, RequestOutput, SamplingParams
from narrowgauge.serving.health import ReplicaState
from narrowgauge.serving.metrics import REQUEST_ROLES, ReplicaMetrics, SequenceMeter
from narrowgauge.serving.openai.errors import ApiError, bad_request, unavailable, unknown_model
from narrowgauge.serving.openai.logprobs import TokenTexts
from narrowgauge.serving.openai.sse import HEARTBEAT_S

_INLINE_CHARACTERS = 20_000  # ~ 5 ms to tokenize; longer texts go to a thread, so that probes are answered meanwhile


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request's facts: its answer's id and time, and whose it is."""

    answer_id: str
    created: int
    arrival_s: float
    role: str


class Service:
    """What every OpenAI route needs: the replica's state, its metrics, and the ways into the engine."""

    def __init__(self, state: ReplicaState, metrics: ReplicaMetrics, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.state, self.metrics, self.heartbeat_s = state, metrics, heartbeat_s
        self.created = int(time.time())
        self._texts: TokenTexts | None = None

    def call(self, request: HttpRequest, prefix: str) -> Call:
        """Facts of a request that has just come; the id is ours alone, whatever the client sends.

        Raises ApiError 503 where nothing is served now.
        """
        role = "shadow" if request.headers.get("x-narrowgauge-shadow") == "1" else "stable"
        if role == "stable" and request.headers.get("x-narrowgauge-role") in REQUEST_ROLES:
            role = request.headers["x-narrowgauge-role"]
        if self.state.why_not_ready() is not None:
            self.metrics.reject(role, "unavailable")
            self.engine()
        return Call(
            answer_id=f"{prefix}-{uuid4().hex}", created=int(time.time()), arrival_s=time.monotonic(), role=role
        )

    def engine(self) -> AsyncEngine:
        """The engine, if it takes requests now. Raises ApiError 503."""
        reason, engine = self.state.why_not_ready(), self.state.engine
        if reason is not None or engine is None:
            raise unavailable(f"this replica takes no requests: {reason}", retry_after_s=1 if engine else 5)
        return engine

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not this one; no name means this one."""
        if name is not None and name != self.state.identity.model:
            raise unknown_model(name)

    def texts(self, engine: AsyncEngine) -> TokenTexts:
        """Texts of single tokens."""
        if self._texts is None:
            self._texts = TokenTexts(engine.tokenizer)
        return self._texts

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Ids of a text; one that cannot fit is refused before the work of tokenizing it."""
        tokenizer = self.engine().tokenizer
        return await self._encoded(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text), param
        )

    async def encode_chat(self, pieces: Sequence[str], *, param: str) -> list[int]:
        """The same for what `render_chat` gave. Raises RequestError too."""
        tokenizer = self.engine().tokenizer
        return await self._encoded(lambda: tokenizer.encode_chat(pieces), sum(map(len, pieces)), param)

    async def _encoded(self, encode: Callable[[], list[int]], characters: int, param: str) -> list[int]:
        engine = self.engine()
        least = characters // engine.tokenizer.longest_token
        if least > engine.max_model_len:
            raise bad_request(
                f"This model's maximum context length is {engine.max_model_len} tokens. However, your prompt contains "
                f"at least {least} input tokens. Please shorten the prompt.",
                param=param,
            )
        return encode() if characters <= _INLINE_CHARACTERS else await asyncio.to_thread(encode)

    def admit(self, call: Call, prompts: Sequence[Sequence[int]], *, params: SamplingParams, n: int) -> "Generation":
        """Queues n sequences of each prompt, all or none (index = prompt · n + copy; copy i gets seed + i).

        Raises ApiError: 400 for what the engine refuses, 503 where it is full, dead or draining.
        """
        engine = self.engine()
        limit = engine.config.max_num_seqs + engine.config.max_waiting
        if len(prompts) * n > limit:
            raise bad_request(f"{len(prompts)} prompts with n = {n} are more than the {limit} sequences of this server")
        streams: list[RequestStream] = []
        try:
            for ids in prompts:
                for copy in range(n):
                    own = params if copy == 0 or params.seed is None else _reseeded(params, copy)
                    name = f"{call.answer_id}-{len(streams)}"
                    streams.append(engine.generate(Request(request_id=name, prompt_ids=tuple(ids), params=own)))
        except (RequestError, EngineBusy, EngineDead) as error:
            for request in range(len(streams)):
                engine.abort(f"{call.answer_id}-{request}")
            if not isinstance(error, RequestError):
                self.metrics.reject(call.role, "busy" if isinstance(error, EngineBusy) else "unavailable")
            raise as_api_error(error) from None
        meters = [self.metrics.meter(call.role, arrival_s=call.arrival_s) for _ in streams]
        return Generation(self.state, streams, meters)


class Generation:
    """The running sequences of one HTTP request. Counts as in flight until `aclose`, which aborts what still runs."""

    def __init__(self, state: ReplicaState, streams: list[RequestStream], meters: list[SequenceMeter]) -> None:
        self._state, self._streams, self._meters = state, streams, meters
        self._closed = False
        self.prompt_tokens = [0] * len(streams)
        self.output_tokens = [0] * len(streams)
        state.begin()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(choice index, output) as they come, until all have finished. Raises ApiError where one fails."""
        try:
            async with aclosing(_merged(self._streams)) as merged:
                async for index, output in merged:
                    self.prompt_tokens[index] = output.prompt_tokens
                    self.output_tokens[index] = output.output_tokens
                    meter = self._meters[index]
                    if output.token_ids or output.prompt_logprobs is not None:
                        meter.tokens(len(output.token_ids), prompt=output.prompt_tokens)
                    if output.finish_reason is not None:
                        meter.finish(output.finish_reason)
                        _raise_failure(output, self._state.identity.model)
                    yield index, output
        except EngineDead as error:
            for meter in self._meters:
                meter.finish("error")
            raise as_api_error(error) from None

    def usage(self, *, n: int) -> dict[str, int]:
        """OpenAI's usage over all choices so far; a prompt counts once, however many copies ran."""
        prompt, output = sum(self.prompt_tokens[::n]), sum(self.output_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    async def aclose(self) -> None:
        """Aborts what still runs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._state.end()
        for meter in self._meters:
            meter.finish("abort")
        for stream in self._streams:
            await stream.aclose()


def as_api_error(error: RequestError | EngineBusy | EngineDead) -> ApiError:
    """The engine's refusal as an answer."""
    if isinstance(error, RequestError):
        return bad_request(str(error), param=error.param)
    return unavailable(str(error))


def _raise_failure(output: RequestOutput, model: str) -> None:
    if output.finish_reason == "error":
        raise ApiError(500, f"{model}: {output.error or 'the engine failed on this request'}")
    if output.finish_reason == "abort":
        raise unavailable("the replica ended this request: it is shutting down")


def _reseeded(params: SamplingParams, copy: int) -> SamplingParams:
    assert params.seed is not None
    return replace(params, seed=(params.seed + copy) % 2**63)


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    if len(streams) == 1:  # the common case needs no tasks
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        async for output in stream:
            queue.put_nowait((index, output))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(queue.put_nowait)
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises what ended the pump
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
