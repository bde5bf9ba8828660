"""Batch: the tensors of one step, made from a SchedulePlan. T tokens, R rows whose logits are wanted."""

import itertools
from dataclasses import dataclass

import torch

from narrowgauge.engine.attention.base import AttentionBackend, AttentionInputs, BatchLayout
from narrowgauge.engine.scheduler import ScheduledChunk


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs.

    rows: indices [R] into the T tokens whose logits are wanted, prompt scores first, or None where that is every token.
    scored: (index of the chunk in the plan, first and last + 1 row) of each chunk with prompt scores.
    sampled: index of the chunk in the plan of each of the remaining rows, in order.
    order: index in the plan of each chunk as it lies in T; last_rows: index [S] into T of each one's last token.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: AttentionInputs
    rows: torch.Tensor | None
    scored: tuple[tuple[int, int, int], ...]
    sampled: tuple[int, ...]
    order: tuple[int, ...]
    last_rows: torch.Tensor


def build_batch(
    chunks: tuple[ScheduledChunk, ...], *, block_size: int, backend: AttentionBackend, device: torch.device
) -> Batch:
    """Lays the chunks out as BatchLayout wants them: single tokens first, by falling context, then the longer ones."""
    order = sorted(range(len(chunks)), key=lambda i: (chunks[i].count > 1, -chunks[i].start))
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    score_rows: list[int] = []
    sample_rows: list[int] = []
    scored, sampled = [], []
    for index in order:
        chunk = chunks[index]
        sequence, end, offset = chunk.sequence, chunk.start + chunk.count, len(ids) - chunk.start
        ids += sequence.tokens[chunk.start : end]
        positions += range(chunk.start, end)
        blocks = sequence.blocks
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)]
        if sequence.request.params.prompt_logprobs is not None:
            # The token at position p is scored by the row before it; what was scored before a preemption is kept.
            first = max(chunk.start, len(sequence.prompt_scores))
            last = min(end, sequence.prompt_tokens - 1)
            if first < last:
                scored.append((index, len(score_rows), len(score_rows) + last - first))
                score_rows += range(offset + first, offset + last)
        if chunk.samples:
            sampled.append(index)
            sample_rows.append(offset + end - 1)
    contexts = tuple(chunks[i].start + chunks[i].count for i in order)
    layout = BatchLayout(
        query_lens=tuple(chunks[i].count for i in order),
        context_lens=contexts,
        # A prompt holds blocks for all of itself from the start; its context is only what has been computed.
        tables=tuple(chunks[i].sequence.blocks[: -(-c // block_size)] for i, c in zip(order, contexts, strict=True)),
        block_size=block_size,
    )
    rows = score_rows + sample_rows
    every = rows == list(range(len(ids)))
    return Batch(
        ids_T=torch.tensor(ids, device=device),
        positions_T=torch.tensor(positions, device=device),
        attention=AttentionInputs(torch.tensor(slots, device=device), backend.plan(layout)),
        rows=None if every else torch.tensor(rows, dtype=torch.int64, device=device),
        scored=tuple(scored),
        sampled=tuple(sampled),
        order=tuple(order),
        last_rows=torch.tensor(list(itertools.accumulate(chunks[i].count for i in order)), device=device) - 1,
    )
