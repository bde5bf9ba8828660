"""What clients may ask: request bodies, and the fields that are refused because ignoring them would be a lie.

Types are strict ("5" is no number, true is no integer). Fields that we know and cannot honour are a 400 which names them,
unless they hold the value that changes nothing. Clients send new fields before servers know them, so those that we do not
know are passed over, and the answer names them in a header.
Ranges are checked where the numbers are used, by the engine's SamplingParams.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HttpRequest

from narrowgauge.engine.request import SamplingParams
from narrowgauge.serving.openai.errors import ApiError, bad_request, from_validation

MAX_BODY_BYTES = 64 * 2**20
MAX_CHOICES = 128  # n, as at OpenAI
MAX_LOGPROBS = 20
IGNORED_HEADER = "x-narrowgauge-ignored-fields"
_LONGEST_HEADER = 512

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "logprob_token_ids": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "return_token_ids": (None, False),
    "return_prompt_text": (None, False),
    "stream_interval": (None, 1),
    "priority": (None, 0),
    "kv_transfer_params": (None,),
    "logits_processors": (None, []),
    "vllm_xargs": (None, {}),
    "store": (None, False),
    "verbosity": (None, "medium"),
}
NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "echo": (None, False),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "documents": (None, []),
    "chat_template": (None,),
    "mm_processor_kwargs": (None, {}),
}
NEUTRAL_COMPLETION: Mapping[str, tuple[Any, ...]] = {**NEUTRAL, "suffix": (None, "")}

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_SAMPLING_FIELDS = (
    *SAMPLING_DEFAULTS,
    *("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "skip_special_tokens"),
)

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Body = TypeVar("_Body", bound="Body")


class GenerationConfigError(ValueError):
    """A checkpoint whose generation_config.json cannot be used; the message names the file."""


class Body(BaseModel):
    """Any JSON object sent to us."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`: usage in a last chunk, or running on every chunk."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateBody(Body):
    """What chat and plain completions have in common."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int64 | None = None
    min_p: float | None = None
    seed: _Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Int64] | None = None
    ignore_eos: bool | None = None
    min_tokens: _Int64 | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[_Int64, float] | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # About the caller, its account or tools that are refused anyway: they ask nothing of the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def choices(self) -> int:
        """`n` with its default."""
        return 1 if self.n is None else self.n

    def sampling(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """The engine's parameters: what was asked, else the checkpoint's `defaults`, else OpenAI's. `own` comes last.

        Raises RequestError for a value out of range.
        """
        asked = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return SamplingParams(**{**defaults, **{k: v for k, v in asked.items() if v is not None}, **own})


class Message(BaseModel):
    """One turn of a conversation; content is text or a list of text parts."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None


class ChatFields(Body):
    """A conversation and how to render it; `/tokenize` takes one too."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerateBody, ChatFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: _Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionBody(GenerateBody):
    """POST /v1/completions; `prompt` is a text, a list of texts, a list of ids, or a list of lists of ids."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatFields):
    """POST /tokenize with a conversation."""

    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**63)]]


async def read_body(request: HttpRequest, kind: type[_Body]) -> _Body:
    """Reads and checks a JSON body, whatever its content type says. Raises ApiError (400, or 413 when it is too big)."""
    return parse_body(await read_bytes(request), kind)


async def read_bytes(request: HttpRequest) -> bytes:
    """The whole body, at most MAX_BODY_BYTES."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def parse_body(data: bytes, kind: type[_Body]) -> _Body:
    """JSON bytes as `kind`. Raises ApiError 400 that names the field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None


def refuse_unsupported(body: GenerateBody, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises a 400 naming the first field that asks for what this server cannot do."""
    for name, value in (body.model_extra or {}).items():
        if name in neutral and not any(_same(value, allowed) for allowed in neutral[name]):
            raise bad_request(f"`{name}` is not supported by this server", param=name)
    if body.best_of not in (None, body.choices):
        raise bad_request("`best_of` is not supported by this server: ask for `n` answers instead", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise bad_request("`stream_options` is allowed only with `stream`: true", param="stream_options")


def ignored_fields(body: Body, neutral: Mapping[str, tuple[Any, ...]] | None = None) -> dict[str, str]:
    """The header that names the fields of a body which nobody reads; {} where there are none."""
    names = dict.fromkeys(name for name in body.model_extra or {} if name not in (neutral or {}))
    for where in [name for name in ("stream_options", "messages") if name in type(body).model_fields]:
        value = getattr(body, where)
        for inner in value if isinstance(value, list) else [value]:
            names |= dict.fromkeys(
                f"{where}.{name}" for name in (inner.model_extra if inner is not None else None) or {}
            )
    # Names are whatever the client wrote: what a header cannot hold is replaced.
    text = ", ".join(re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in names)
    return {IGNORED_HEADER: text[:_LONGEST_HEADER]} if text else {}


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)  # to Python, True is 1


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The checkpoint's own sampling defaults (generation_config.json), where they are numbers that we know.

    Raises GenerationConfigError for a file that is no JSON object, or holds a number that the engine refuses.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        value = dict(json.loads(path.read_text(encoding="utf-8")))
        found = {name: value[name] for name in SAMPLING_DEFAULTS if isinstance(value.get(name), int | float)}
        SamplingParams(**found)
    except (ValueError, TypeError) as error:
        raise GenerationConfigError(f"{path}: {error}; mend or remove it") from None
    return found
