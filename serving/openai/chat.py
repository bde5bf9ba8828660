"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from narrowgauge.engine.request import PositionLogprobs, RequestError, RequestOutput, SamplingParams
from narrowgauge.serving.openai.errors import ApiError, bad_request
from narrowgauge.serving.openai.generation import Call, Generation, Service, as_api_error
from narrowgauge.serving.openai.logprobs import chat_content
from narrowgauge.serving.openai.protocol import (
    NEUTRAL_CHAT,
    ChatBody,
    ChatFields,
    ignored_fields,
    read_body,
    refuse_unsupported,
)
from narrowgauge.serving.openai.sse import DONE, EventStream, event, while_connected

_RESERVED_KWARGS = {"messages", "add_generation_prompt", "self"}


def chat_routes(service: Service) -> APIRouter:
    """The chat endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        call = service.call(request, "chatcmpl")
        body = await read_body(request, ChatBody)
        service.check_model(body.model)
        refuse_unsupported(body, NEUTRAL_CHAT)
        ignored = ignored_fields(body, NEUTRAL_CHAT)
        params = _params(service, body)
        ids = await conversation_ids(service, body)
        answer = ChatAnswer(service, call, body, params=params, ids=ids)
        if body.stream:
            stream = EventStream(answer.events(), close=answer.generation.aclose, heartbeat_s=service.heartbeat_s)
            stream.headers.update(ignored)
            return stream
        return JSONResponse(await while_connected(request.receive, answer.whole()), headers=ignored)

    return router


async def conversation_ids(service: Service, body: ChatFields) -> list[int]:
    """Ids of a conversation by the model's own template. Raises ApiError 400 for what it cannot render."""
    messages = [
        {"role": message.role, "content": _text(message.content, index)} for index, message in enumerate(body.messages)
    ]
    if not messages:
        raise bad_request("messages: must hold at least one message", param="messages")
    if any((message.model_extra or {}).get("tool_calls") for message in body.messages):
        raise bad_request("messages: tool calls are not supported by this server", param="messages")
    variables = body.chat_template_kwargs or {}
    if taken := _RESERVED_KWARGS & set(variables):
        raise bad_request(f"chat_template_kwargs: {sorted(taken)[0]!r} cannot be set", param="chat_template_kwargs")
    prompt = body.add_generation_prompt is not False
    tokenizer = service.engine().tokenizer
    try:
        return await service.encode_chat(
            tokenizer.render_chat(messages, add_generation_prompt=prompt, **variables), param="messages"
        )
    except RequestError as error:
        raise as_api_error(error) from None


class ChatAnswer:
    """One chat completion: whole, or as events."""

    def __init__(self, service: Service, call: Call, body: ChatBody, *, params: SamplingParams, ids: list[int]) -> None:
        """Admits the sequences. Raises ApiError."""
        self._service, self._call, self._body = service, call, body
        self._texts = service.texts(service.engine())
        self.generation: Generation = service.admit(call, [ids], params=params, n=body.choices)

    async def whole(self) -> dict[str, Any]:
        """The chat.completion object. Raises ApiError where a sequence fails."""
        count = self._body.choices
        texts, entries = [""] * count, [list[dict[str, Any]]() for _ in range(count)]
        ends: list[dict[str, Any]] = [{}] * count
        try:
            async with aclosing(self.generation.outputs()) as outputs:
                async for index, output in outputs:
                    texts[index] += output.text
                    entries[index] += self._entries(output.logprobs) or []
                    ends[index] = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        finally:
            await self.generation.aclose()
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": texts[index], "refusal": None},
                "logprobs": {"content": entries[index]} if self._body.logprobs else None,
                **ends[index],
            }
            for index in range(count)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self.generation.usage(n=count)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Role, text, end (apart, with an empty content), usage if asked for, [DONE]; an error goes in-band."""
        options = self._body.stream_options
        include, running = bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        try:
            async with aclosing(self.generation.outputs()) as outputs:
                async for index, output in outputs:
                    usage = self.generation.usage(n=self._body.choices) if running else None
                    rest: dict[str, Any] = {"usage": usage} if include or running else {}
                    if index not in begun:
                        begun.add(index)
                        yield self._chunk(index, {"role": "assistant", "content": ""}, rest)
                    entries = self._entries(output.logprobs)
                    if output.text or entries:
                        yield self._chunk(index, {"content": output.text}, rest, entries=entries)
                    if output.finish_reason is not None:
                        yield self._chunk(index, {"content": ""}, rest, end=output)
            if include:
                usage = self.generation.usage(n=self._body.choices)
                yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})
        except ApiError as error:
            yield event(error.body())
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        identity = self._service.state.identity
        return {
            "id": self._call.answer_id,
            "object": kind,
            "created": self._call.created,
            "model": identity.model,
            "system_fingerprint": identity.revision,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        rest: dict[str, Any],
        *,
        entries: list[dict[str, Any]] | None = None,
        end: RequestOutput | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": entries} if entries else None,
            "finish_reason": end.finish_reason if end else None,
        }
        if end:
            choice["stop_reason"] = end.stop_reason
        return event({**self._head("chat.completion.chunk"), "choices": [choice], **rest})

    def _entries(self, positions: tuple[PositionLogprobs, ...] | None) -> list[dict[str, Any]] | None:
        if not self._body.logprobs or not positions:
            return None
        return chat_content(positions, self._texts, as_ids=bool(self._body.return_tokens_as_token_ids))


def _params(service: Service, body: ChatBody) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("`top_logprobs` is allowed only with `logprobs`: true", param="top_logprobs")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is not None and wanted < 1:
        raise bad_request(f"{name} must be at least 1, not {wanted}", param=name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        return body.sampling(service.state.sampling_defaults, max_tokens=wanted, logprobs=logprobs)
    except RequestError as error:
        raise as_api_error(error) from None


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise bad_request(
                f"messages.{index}.content: parts of type {kind!r} are not supported; this model reads only "
                '{"type": "text", "text": ...}',
                param="messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)
