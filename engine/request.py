"""What a caller asks of the engine and what comes back. Standard library only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_BELOW = 1e-5
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
MAX_LOGPROBS = 1024


class RequestError(ValueError):
    """A request that cannot be served as asked: the caller's mistake. `param` names the field at fault."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """A prompt that leaves no room in the model's context; the message gives the figures."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises RequestError for a value out of range.

    temperature below 1e-5 is greedy (ties: the lowest id). top_k 0 or -1, top_p 1 and min_p 0 are off; they apply after the
    temperature in the order min_p, top_k, top_p. presence_ and frequency_penalty count generated tokens,
    repetition_penalty prompt and generated ones (as in vLLM and transformers). `stop` texts end the output before
    themselves (after, with include_stop_str_in_output); stop_token_ids and the model's end tokens are counted as output but
    not shown. Before `min_tokens` tokens neither can end it. `logprobs` N asks for the chosen token's logarithm of
    probability and the N best, from the distribution before temperature, penalties and filters; `prompt_logprobs`
    the same for each prompt token but the first. max_tokens None fills the context; 0 (with prompt_logprobs) only scores.
    `seed` makes the output independent of the batch, of chunking and of preemption; without it the engine draws one.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low=low, high=high)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0", param="top_p")
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty must be above 0", param="repetition_penalty")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens 0 scores a prompt and needs prompt_logprobs", param="max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", param="min_tokens")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError("seed must fit in 64 bits", param="seed")
        _check_stop(self.stop)
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise RequestError(
                    f"logit_bias of token {token} must be a finite number, not {bias}", param="logit_bias"
                )

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def plain_greedy(self) -> bool:
        """Whether the highest *raw* logit is the answer: greedy, and nothing changes the logits or asks for them."""
        return (
            self.greedy
            and self.logprobs is None
            and not self.logit_bias
            and not self.min_tokens
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One ask: token ids in (so that the engine knows no text), one sampled stream out. `request_id` is the caller's name."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs at one position: of the token that stands there, and the N best, best first (ties: the lower id first)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """When things happened, in seconds of `time.monotonic()`. first_token_s is None where no token was generated."""

    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one or more steps added to a request's output. The last one of a stream carries a finish_reason.

    `text` holds whole characters only; text that may yet become a stop string is held back, so `token_ids` may run ahead.
    prompt_logprobs stands in one output only (the first at or after the whole prompt is scored): one entry a prompt token,
    the first of them None. stop_reason is the matched stop text or token id where that ended it, None for an end token.
    prompt_tokens and output_tokens are totals; output_tokens counts up to and including the token that ended the output.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    timing: RequestTiming | None = None


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a request must fit into. `pool_tokens` is how many tokens the whole KV cache holds."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int

    def check(self, request: Request) -> None:
        """Raises RequestError (PromptTooLong) naming the field and the figures; returns for a request that can be served."""
        prompt, params = request.prompt_ids, request.params
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        self._check_ids(prompt, "prompt")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.logit_bias, "logit_bias")
        longest = min(self.max_model_len, self.pool_tokens)
        scoring = params.max_tokens == 0
        if len(prompt) > longest - (0 if scoring else 1):
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(prompt)} "
                f"input tokens{'' if scoring else ' and at least one must be left for output'}. Please shorten the prompt.",
                param="prompt",
            )
        if params.max_tokens is not None and len(prompt) + params.max_tokens > longest:
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens. However, you requested {params.max_tokens} output "
                f"tokens and your prompt contains {len(prompt)} input tokens, {len(prompt) + params.max_tokens} in total. "
                f"Please shorten the prompt or ask for at most {longest - len(prompt)} tokens.",
                param="max_tokens",
            )

    def _check_ids(self, ids: Mapping[int, float] | tuple[int, ...], param: str) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{param}: token id {token} is outside the vocabulary (0 to {self.vocab_size - 1})", param=param
                )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, math.inf),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, math.inf),
    ("min_p", 0.0, 1.0),
    ("min_tokens", 0, math.inf),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
)


def _check_range(name: str, value: float | None, *, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN fails too
        bounds = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bounds}, not {value}", param=name)


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOPS:
        raise RequestError(f"stop holds {len(stop)} texts; at most {MAX_STOPS} are allowed", param="stop")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError("stop must hold texts that are not empty", param="stop")
        if len(text) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop text has {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed", param="stop"
            )
