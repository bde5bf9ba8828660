"""Attention by torch's fused operator over gathered blocks.

Single-token queries of several sequences go in one call: their query heads are laid out as (kv head, heads sharing it), so
that grouped queries need no copy of keys, and shorter contexts are padded and masked. A context that lies in consecutive
blocks is read in place. T tokens, S sequences, H query heads, G kv heads, D head size, N blocks, B block size, C context.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from narrowgauge.engine.attention.base import BatchLayout

MAX_PADDING = 2
"""Sequences share a call while the longest context is at most this many times the shortest: padding is read like the rest."""


@dataclass(frozen=True, slots=True)
class SdpaCall:
    """One call of the operator: tokens `start` to `stop`, of `sequences` sequences.

    blocks: ids [S * M] to gather, or None where the one context is the slots `first_slot` to `first_slot + context`.
    mask: additive [S, 1, 1 or queries, C], None where all is visible.
    """

    start: int
    stop: int
    sequences: int
    context: int
    first_slot: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


class SdpaAttention:
    """torch.nn.functional.scaled_dot_product_attention behind the AttentionBackend protocol."""

    name = "sdpa"

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def plan(self, layout: BatchLayout) -> tuple[SdpaCall, ...]:
        """Groups single-token queries by length of context; longer queries get a call each."""
        calls = []
        singles = next((s for s, queries in enumerate(layout.query_lens) if queries > 1), len(layout.query_lens))
        row = 0
        while row < singles:
            end = row + 1
            while end < singles and len(layout.tables[end]) * MAX_PADDING >= len(layout.tables[row]):
                end += 1
            calls.append(self._single(layout, row) if end == row + 1 else self._group(layout, row, end))
            row = end
        start = singles
        for row in range(singles, len(layout.query_lens)):
            calls.append(self._chunk(layout, row, start))
            start += layout.query_lens[row]
        return tuple(calls)

    def attend(
        self, q_THD: torch.Tensor, cache_NB2GD: torch.Tensor, work: tuple[SdpaCall, ...], *, scale: float
    ) -> torch.Tensor:
        """softmax(q k^T * scale) v: [T, H, D]."""
        if len(work) == 1:
            return _call(q_THD, cache_NB2GD, work[0], scale=scale)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for call in work:
            out_THD[call.start : call.stop] = _call(q_THD[call.start : call.stop], cache_NB2GD, call, scale=scale)
        return out_THD

    def _single(self, layout: BatchLayout, row: int) -> SdpaCall:
        context, first_slot, blocks = self._blocks(layout, row)
        return SdpaCall(row, row + 1, 1, context, first_slot, blocks, None)

    def _group(self, layout: BatchLayout, row: int, end: int) -> SdpaCall:
        widest = len(layout.tables[row])
        # Padded with a block of its own: another sequence's may hold NaN, which no mask keeps out of a sum of products.
        tables = layout.tables[row:end]
        ids = [block for table in tables for block in table + table[-1:] * (widest - len(table))]
        lens = torch.tensor(layout.context_lens[row:end], device=self._device)
        width = widest * layout.block_size
        hidden = torch.arange(width, device=self._device) >= lens.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        blocks = torch.tensor(ids, device=self._device)
        return SdpaCall(row, end, end - row, width, 0, blocks, mask.view(end - row, 1, 1, width))

    def _chunk(self, layout: BatchLayout, row: int, start: int) -> SdpaCall:
        queries = layout.query_lens[row]
        context, first_slot, blocks = self._blocks(layout, row)
        mask = torch.full((queries, context), -torch.inf, dtype=self._dtype, device=self._device)
        mask.triu_(context - queries + 1)
        return SdpaCall(start, start + queries, 1, context, first_slot, blocks, mask.view(1, 1, queries, context))

    def _blocks(self, layout: BatchLayout, row: int) -> tuple[int, int, torch.Tensor | None]:
        context = layout.context_lens[row]
        table = layout.tables[row]
        if table == list(range(table[0], table[0] + len(table))):
            return context, table[0] * layout.block_size, None
        return context, 0, torch.tensor(table, device=self._device)


def _call(q_THD: torch.Tensor, cache_NB2GD: torch.Tensor, call: SdpaCall, *, scale: float) -> torch.Tensor:
    heads, size = q_THD.shape[1:]
    groups = cache_NB2GD.shape[3]
    if call.blocks is None:
        kv = cache_NB2GD.view(-1, 2, groups, size)[call.first_slot : call.first_slot + call.context].unsqueeze(0)
    else:
        gathered = torch.index_select(cache_NB2GD, 0, call.blocks)
        kv = gathered.view(call.sequences, -1, 2, groups, size)[:, : call.context]
    k_SGCD, v_SGCD = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    queries = (call.stop - call.start) // call.sequences
    if queries == 1:
        q_SGRD = q_THD.reshape(call.sequences, groups, heads // groups, size)
        out = scaled_dot_product_attention(q_SGRD, k_SGCD, v_SGCD, attn_mask=call.mask, scale=scale)
        return out.reshape(call.sequences, heads, size)
    q_1HQD = q_THD.transpose(0, 1).unsqueeze(0)
    out = scaled_dot_product_attention(q_1HQD, k_SGCD, v_SGCD, attn_mask=call.mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
