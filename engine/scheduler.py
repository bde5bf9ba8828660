"""Scheduler: which tokens the next step computes. Plain Python over KVBlockPool, no torch, no clock of its own.

`schedule` returns a SchedulePlan and the caller carries it out, then hands it to `commit`.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.engine.kv_cache import KVBlockPool, OutOfBlocks, Reserved
from narrowgauge.engine.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start` to `start + count - 1` of a sequence; `samples`: they end it so far, and a token is to follow."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """One step: the chunks to compute (blocks are reserved) and who lost its blocks to make room for them."""

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Continuous batching under a token budget: decodes first, then prompts in order of arrival, in chunks as the budget allows.

    A prompt is admitted when blocks for all of it are free, and takes them at once, so that prompts never starve each other
    half-way. When a decode finds no block, the youngest sequence not yet in the plan loses its own and goes back to
    the head of the queue, to be computed again. Every sequence must fit the pool alone (RequestLimits sees to it); then
    the oldest always moves on, so every step makes progress.
    """

    def __init__(self, pool: KVBlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission, which is the order of arrival
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Sequences that hold no blocks yet (or no longer)."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind all others."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finishes a sequence, wherever it stands, and frees its blocks. Idempotent."""
        if sequence.state is SequenceState.FINISHED:
            return
        (self._running if sequence.state is SequenceState.RUNNING else self._waiting).remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> SchedulePlan:
        """The next step. Reserves blocks and moves sequences between queue and batch; computes nothing."""
        budget = self._budget
        chunks: list[ScheduledChunk] = []
        preempted: list[Sequence] = []
        planned: set[int] = set()
        for sequence in [s for s in self._running if s.pending == 1]:
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING or not self._make_room(sequence, planned, preempted):
                continue
            chunks.append(_chunk(sequence, 1))
            planned.add(id(sequence))
            budget -= 1
        for sequence in self._running:
            if budget and sequence.pending > 1:
                count = min(sequence.pending, budget)
                chunks.append(_chunk(sequence, count))
                budget -= count
        # Whoever was just preempted would be the first to be admitted, and would take the room that was made.
        while not preempted and budget and self._waiting and len(self._running) < self._max_seqs:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                break
            count = min(sequence.pending, budget)
            chunks.append(_chunk(sequence, count))
            budget -= count
        return SchedulePlan(tuple(chunks), tuple(preempted))

    def commit(self, plan: SchedulePlan, sampled: Mapping[int, int]) -> None:
        """Books a step that was carried out; `sampled` maps an index into plan.chunks to the token that follows it."""
        for index, chunk in enumerate(plan.chunks):
            if chunk.sequence.state is not SequenceState.RUNNING:
                continue
            chunk.sequence.computed = chunk.start + chunk.count
            if chunk.samples:
                chunk.sequence.tokens.append(sampled[index])

    def check_integrity(self) -> None:
        """Raises IntegrityError where blocks and sequences disagree."""
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.blocks
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING
            assert len(sequence.blocks) >= self._pool.blocks_for(sequence.computed)
        self._pool.check_integrity(sequence.blocks for sequence in self._running)

    def _admit(self, sequence: Sequence) -> bool:
        """Takes the head of the queue into the batch, with blocks for all its tokens and one to spare (unless it runs alone)."""
        spare = 1 if self._running else 0
        if self._pool.blocks_for(len(sequence.tokens)) + spare > self._pool.free:
            return False
        answer = self._pool.reserve(sequence.blocks, len(sequence.tokens))
        assert isinstance(answer, Reserved)
        self._waiting.popleft()
        sequence.state = SequenceState.RUNNING
        self._running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence, planned: set[int], preempted: list[Sequence]) -> bool:
        """Reserves the next token's slot, preempting the youngest unplanned ones; False where that is `sequence` itself."""
        while isinstance(self._pool.reserve(sequence.blocks, len(sequence.tokens)), OutOfBlocks):
            victim = next(s for s in reversed(self._running) if id(s) not in planned)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.computed = 0
        sequence.state = SequenceState.WAITING
        self._waiting.appendleft(sequence)
        self.preemptions += 1


def _chunk(sequence: Sequence, count: int) -> ScheduledChunk:
    ends = sequence.computed + count == len(sequence.tokens)
    return ScheduledChunk(sequence, sequence.computed, count, ends and sequence.wants_token)
