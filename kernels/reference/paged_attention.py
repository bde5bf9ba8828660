"""Eager twin of paged attention, for decode and for chunks of a prompt alike: the oracle of every attention backend.

T tokens, S sequences, H query heads, G kv heads, D head size, N blocks, B block size, M block-table entries.
"""

from collections.abc import Sequence

import torch


def paged_attention(
    q_THD: torch.Tensor,
    cache_NB2GD: torch.Tensor,
    tables_SM: torch.Tensor,
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """softmax(q k^T * scale) v over each sequence's own cached tokens, causal: [T, H, D] in q's dtype, in fp32 inside.

    The queries of sequence s are the last query_lens[s] of its context_lens[s] tokens, whose keys and values are in the cache
    already. H must be a multiple of G: consecutive query heads share a kv head.
    """
    out_THD = torch.empty_like(q_THD)
    heads, groups = q_THD.shape[1], cache_NB2GD.shape[3]
    start = 0
    for row, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks = tables_SM[row, : -(-context // cache_NB2GD.shape[1])].long()
        kv = cache_NB2GD[blocks].flatten(0, 1)[:context].float()
        k_CHD, v_CHD = (kv[:, part].repeat_interleave(heads // groups, dim=1) for part in (0, 1))
        scores_HQC = torch.einsum("qhd,chd->hqc", q_THD[start : start + queries].float(), k_CHD) * scale
        allowed_QC = torch.ones(queries, context, dtype=torch.bool, device=q_THD.device).tril(context - queries)
        weights_HQC = scores_HQC.masked_fill(~allowed_QC, -torch.inf).softmax(-1)
        out_THD[start : start + queries] = torch.einsum("hqc,chd->qhd", weights_HQC, v_CHD).to(q_THD.dtype)
        start += queries
    return out_THD
