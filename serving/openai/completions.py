"""POST /v1/completions: plain completions of texts or ids, and scoring them (`echo` with `max_tokens: 0`)."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from narrowgauge.engine.request import RequestError, RequestOutput, SamplingParams
from narrowgauge.serving.openai.errors import ApiError, bad_request
from narrowgauge.serving.openai.generation import Call, Generation, Service, as_api_error
from narrowgauge.serving.openai.logprobs import CompletionLogprobs, joined
from narrowgauge.serving.openai.protocol import (
    NEUTRAL_COMPLETION,
    CompletionBody,
    ignored_fields,
    read_body,
    refuse_unsupported,
)
from narrowgauge.serving.openai.sse import DONE, EventStream, event, while_connected

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Prompt:
    """One prompt: its ids, and its text where the client gave one (else echo decodes the ids)."""

    ids: list[int]
    text: str | None


def completion_routes(service: Service) -> APIRouter:
    """The plain completion endpoint."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        call = service.call(request, "cmpl")
        body = await read_body(request, CompletionBody)
        service.check_model(body.model)
        refuse_unsupported(body, NEUTRAL_COMPLETION)
        ignored = ignored_fields(body, NEUTRAL_COMPLETION)
        prompts = await _prompts(service, body)
        params = _params(service, body, longest=max(len(prompt.ids) for prompt in prompts))
        answer = CompletionAnswer(service, call, body, prompts=prompts, params=params)
        if body.stream:
            stream = EventStream(answer.events(), close=answer.generation.aclose, heartbeat_s=service.heartbeat_s)
            stream.headers.update(ignored)
            return stream
        return JSONResponse(await while_connected(request.receive, answer.whole()), headers=ignored)

    return router


class CompletionAnswer:
    """One text completion of one or more prompts: whole, or as events."""

    def __init__(
        self, service: Service, call: Call, body: CompletionBody, *, prompts: list[Prompt], params: SamplingParams
    ) -> None:
        """Admits the sequences. Raises ApiError."""
        self._service, self._call, self._body, self._prompts = service, call, body, prompts
        self._count = len(prompts) * body.choices
        self._tokenizer = service.engine().tokenizer
        texts, as_ids = service.texts(service.engine()), bool(body.return_tokens_as_token_ids)
        self._logprobs = [CompletionLogprobs(texts, as_ids=as_ids) for _ in range(self._count)]
        self.generation: Generation = service.admit(
            call, [prompt.ids for prompt in prompts], params=params, n=body.choices
        )

    async def whole(self) -> dict[str, Any]:
        """The text_completion object. Raises ApiError where a sequence fails."""
        choices: list[dict[str, Any]] = [
            {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
            for index in range(self._count)
        ]
        begun: set[int] = set()
        try:
            async with aclosing(self.generation.outputs()) as outputs:
                async for index, output in outputs:
                    choice = choices[index]
                    for text, logprobs in self._pieces(index, output, begun):
                        choice["text"] += text
                        choice["logprobs"] = joined(choice["logprobs"], logprobs)
                    choice["finish_reason"], choice["stop_reason"] = output.finish_reason, output.stop_reason
        finally:
            await self.generation.aclose()
        return {**self._head(), "choices": choices, "usage": self.generation.usage(n=self._body.choices)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The prompt (with echo), text, end (apart, with an empty text), usage if asked for, [DONE]."""
        options = self._body.stream_options
        include, running = bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        try:
            async with aclosing(self.generation.outputs()) as outputs:
                async for index, output in outputs:
                    usage = self.generation.usage(n=self._body.choices) if running else None
                    rest: dict[str, Any] = {"usage": usage} if include or running else {}
                    for text, logprobs in self._pieces(index, output, begun):
                        if text or logprobs:
                            yield self._chunk(index, text, logprobs, rest=rest)
                    if output.finish_reason is not None:
                        yield self._chunk(index, "", None, rest=rest, end=output)
            if include:
                usage = self.generation.usage(n=self._body.choices)
                yield event({**self._head(), "choices": [], "usage": usage})
        except ApiError as error:
            yield event(error.body())
        yield DONE

    def _pieces(self, index: int, output: RequestOutput, begun: set[int]) -> list[tuple[str, dict[str, Any] | None]]:
        """(text, logprobs) of one output: the echoed prompt before the first one, then what is new."""
        pieces: list[tuple[str, dict[str, Any] | None]] = []
        wanted = self._body.logprobs is not None
        if self._body.echo and index not in begun:
            prompt, logprobs = self._prompts[index // self._body.choices], None
            if wanted:
                assert output.prompt_logprobs is not None, "the engine scores the prompt before the first token"
                logprobs = self._logprobs[index].lists(prompt.ids, output.prompt_logprobs)
            pieces.append((self._echo(prompt), logprobs))
        begun.add(index)
        new = None
        if wanted and output.logprobs:
            ids = [position.chosen.token_id for position in output.logprobs]
            new = self._logprobs[index].lists(ids, output.logprobs)
        pieces.append((output.text, new))
        return pieces

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, skip_special_tokens=False)

    def _head(self) -> dict[str, Any]:
        identity = self._service.state.identity
        return {
            "id": self._call.answer_id,
            "object": "text_completion",
            "created": self._call.created,
            "model": identity.model,
            "system_fingerprint": identity.revision,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        *,
        rest: dict[str, Any],
        end: RequestOutput | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason if end else None,
        }
        if end:
            choice["stop_reason"] = end.stop_reason
        return event({**self._head(), "choices": [choice], **rest})


async def _prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    special = body.add_special_tokens is not False
    value = body.prompt
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad_request(
            "prompt: must be a text, a list of texts, a list of token ids or a list of lists of token ids, not empty",
            param="prompt",
        )
    prompts = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            ids = await service.encode(item, add_special_tokens=special, param="prompt")
            prompts.append(Prompt(ids, item))
        elif _is_ids(item):
            prompts.append(Prompt(item, None))
        else:
            raise bad_request(f"prompt.{index}: must be a text or a list of token ids, not empty", param="prompt")
    return prompts


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)  # bool is no id


def _params(service: Service, body: CompletionBody, *, longest: int) -> SamplingParams:
    tokens = body.max_tokens
    if tokens is None:  # the default gives way where the context ends sooner
        tokens = DEFAULT_MAX_TOKENS if longest + DEFAULT_MAX_TOKENS <= service.engine().max_model_len else None
    if tokens is not None and tokens < (0 if body.echo else 1):
        hint = " (0 only with `echo`: true, to score the prompt)" if tokens == 0 else ""
        raise bad_request(
            f"max_tokens must be at least {0 if body.echo else 1}, not {tokens}{hint}", param="max_tokens"
        )
    scores = body.logprobs if body.echo else None
    if tokens == 0:
        scores = scores or 0
    try:
        return body.sampling(
            service.state.sampling_defaults, max_tokens=tokens, logprobs=body.logprobs, prompt_logprobs=scores
        )
    except RequestError as error:
        raise as_api_error(error) from None
