"""LLMEngine: requests in, tokens out, one step a call. Synchronous, for one thread; it knows no text.

The life of a request: checked and queued (`add_request`) -> admitted with blocks for its prompt -> computed in chunks ->
decoded a token a step, perhaps preempted and computed again -> finished by a token, by length, by `abort` or because what
was computed for it is not finite (it alone fails), blocks freed.
"""

import logging
import time
from collections.abc import Callable

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.kv_cache import KVBlockPool
from narrowgauge.engine.model_runner import ModelRunner, StepResult
from narrowgauge.engine.output import StepOutput
from narrowgauge.engine.request import FinishReason, Request, RequestError, RequestLimits, RequestTiming
from narrowgauge.engine.scheduler import ScheduledChunk, Scheduler
from narrowgauge.engine.sequence import Sequence
from narrowgauge.engine.stats import EngineStats

logger = logging.getLogger(__name__)

_SEED_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: spreads consecutive requests over the seeds


class LLMEngine:
    """Scheduler, block pool and model runner behind one `step`."""

    def __init__(
        self, config: EngineConfig, *, eos_ids: frozenset[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Loads the model. `eos_ids` end an output unless a request ignores them."""
        self.config = config
        self._eos_ids = eos_ids
        self._clock = clock
        self._runner = ModelRunner(config)
        self._pool = KVBlockPool(self._runner.kv.num_blocks, config.block_size)
        self._scheduler = Scheduler(
            self._pool, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self._sequences: dict[str, Sequence] = {}
        self._drawn_seeds = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._steps = 0
        self._step_tokens = 0
        self.limits = RequestLimits(
            vocab_size=self._runner.shape.vocab_size,
            max_model_len=self._runner.kv.max_model_len,
            pool_tokens=self._pool.capacity_tokens,
        )

    @property
    def runner(self) -> ModelRunner:
        """The model runner, for those who report what was chosen."""
        return self._runner

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._scheduler.has_work

    @property
    def waiting(self) -> int:
        """Requests that hold no blocks."""
        return self._scheduler.waiting

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises RequestError where it cannot be served, or its id is in use."""
        self.limits.check(request)
        if request.request_id in self._sequences:
            raise RequestError(f"a request with id {request.request_id!r} is running already", param="request_id")
        params = request.params
        room = min(self.limits.max_model_len, self.limits.pool_tokens) - len(request.prompt_ids)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        sequence = Sequence(
            request=request,
            seed=self._draw_seed() if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            stop_ids=stop_ids,
            arrival_s=self._clock(),
        )
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drops a request and frees its blocks now; it gives no further output. Unknown ids are ignored."""
        if (sequence := self._sequences.pop(request_id, None)) is not None:
            self._scheduler.remove(sequence)

    def step(self) -> list[StepOutput]:
        """Schedules, computes and books one step; [] where there is no work."""
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return []
        now = self._clock()
        for chunk in plan.chunks:
            if chunk.sequence.scheduled_s is None:
                chunk.sequence.scheduled_s = now
        result = self._runner.run(plan)
        for index in result.failed:  # before the commit, which passes finished sequences over
            self._runner.scrub(plan.chunks[index].sequence.blocks)
            self.abort(plan.chunks[index].sequence.id)
        self._scheduler.commit(plan, {index: sampled.token_id for index, sampled in result.sampled.items()})
        self._steps += 1
        self._step_tokens += plan.tokens
        now = self._clock()
        outputs = [self._book(chunk, index, result, now=now) for index, chunk in enumerate(plan.chunks)]
        return [output for output in outputs if output is not None]

    def stats(self, *, heartbeat_s: float | None = None, unseen: int = 0) -> EngineStats:
        """A snapshot, from any thread. `heartbeat_s`: when the loop last came round, on this engine's clock; `unseen`:
        requests on their way to `add_request`, counted as waiting."""
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + unseen,
            kv_blocks_total=self._pool.num_blocks,
            kv_blocks_used=self._pool.used,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            step_tokens=self._step_tokens,
            heartbeat_age_s=0.0 if heartbeat_s is None else max(0.0, self._clock() - heartbeat_s),
            fragmentation=self._pool.fragmentation(),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError where blocks and sequences disagree."""
        self._scheduler.check_integrity()

    def _book(self, chunk: ScheduledChunk, index: int, result: StepResult, *, now: float) -> StepOutput | None:
        """One chunk's part of the step: what to tell the caller, and the end of the request where it has come."""
        sequence = chunk.sequence
        if (unusable := result.failed.get(index)) is not None:
            logger.warning("a request of %d tokens has failed: %s", len(sequence.tokens), unusable.reason)
            timing = self._timing(sequence, now)
            return StepOutput(request_id=sequence.id, finish_reason="error", error=unusable.reason, timing=timing)
        sequence.prompt_scores += result.scores.get(index, [])
        wants_scores = sequence.request.params.prompt_logprobs is not None
        finished_prompt = (
            chunk.start < sequence.prompt_tokens <= chunk.start + chunk.count and not sequence.output_tokens
        )
        sampled = result.sampled.get(index)
        if sampled is None and sequence.pending:
            return None
        first = sampled is not None and sequence.output_tokens == 1
        if first:
            sequence.first_token_s = now
        if first or (sampled is None and finished_prompt):
            self._prompt_tokens += sequence.prompt_tokens
        self._generated_tokens += sampled is not None
        reason, stop_id = self._finish(sequence)
        if reason is not None:
            self.abort(sequence.id)
        scores = (None, *sequence.prompt_scores) if wants_scores and (first or sampled is None) else None
        hidden = reason == "stop" and not sequence.request.params.include_stop_str_in_output
        return StepOutput(
            request_id=sequence.id,
            token_id=None if sampled is None else sampled.token_id,
            hidden=hidden,
            logprobs=None if sampled is None else sampled.logprobs,
            prompt_logprobs=scores,
            finish_reason=reason,
            stop_reason=stop_id,
            timing=self._timing(sequence, now),
        )

    def _finish(self, sequence: Sequence) -> tuple[FinishReason | None, int | None]:
        """Why a sequence ends with its last token, if it does, and the stop token id where one of the request's did it."""
        if sequence.output_tokens:
            last = sequence.tokens[-1]
            if last in sequence.stop_ids and sequence.output_tokens > sequence.request.params.min_tokens:
                return "stop", last if last in sequence.request.params.stop_token_ids else None
        return ("length", None) if sequence.output_tokens >= sequence.max_tokens else (None, None)

    def _timing(self, sequence: Sequence, now: float) -> RequestTiming:
        return RequestTiming(
            arrival_s=sequence.arrival_s,
            scheduled_s=sequence.scheduled_s,
            first_token_s=sequence.first_token_s,
            finished_s=now,
        )

    def _draw_seed(self) -> int:
        self._drawn_seeds += 1
        return (self.config.seed + self._drawn_seeds * _SEED_STRIDE) % 2**64
