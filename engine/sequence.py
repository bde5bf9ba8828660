"""Sequence: one sampled stream of a request, as the scheduler sees it. No torch."""

import enum
from dataclasses import dataclass, field

from narrowgauge.engine.request import PositionLogprobs, Request


class SequenceState(enum.Enum):
    """Where a sequence stands. A preempted one is WAITING again, with its tokens and without its blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's tokens and its share of the KV cache.

    `tokens` are the prompt and what was generated. The keys and values of the first `computed` of them are in the cache, at
    `blocks` (block i holds tokens i * B to i * B + B - 1). `seed` is the request's own, or the one the engine drew.
    `max_tokens` is what may be generated, resolved against the model's context. `stop_ids` end the output.
    `prompt_scores` are the logprobs of prompt tokens 1, 2, ... found so far; they survive a preemption.
    """

    request: Request
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    arrival_s: float
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: SequenceState = SequenceState.WAITING
    prompt_scores: list[PositionLogprobs] = field(default_factory=list)
    scheduled_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def wants_token(self) -> bool:
        """Whether a token is to be sampled once everything is computed (not so when a prompt is only scored)."""
        return self.output_tokens < self.max_tokens
