"""The eager twin as a backend: slow, and what the others are compared with."""

import torch

from narrowgauge.engine.attention.base import BatchLayout
from narrowgauge.kernels.reference.paged_attention import paged_attention

Work = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]


class ReferenceAttention:
    """kernels/reference/paged_attention.py behind the AttentionBackend protocol."""

    name = "reference"

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device

    def plan(self, layout: BatchLayout) -> Work:
        """Query lengths, context lengths and the block tables as one tensor [S, M]."""
        longest = max(map(len, layout.tables))
        rows = [table + [0] * (longest - len(table)) for table in layout.tables]
        return layout.query_lens, layout.context_lens, torch.tensor(rows, device=self._device)

    def attend(self, q_THD: torch.Tensor, cache_NB2GD: torch.Tensor, work: Work, *, scale: float) -> torch.Tensor:
        """softmax(q k^T * scale) v: [T, H, D]."""
        query_lens, context_lens, tables_SM = work
        return paged_attention(
            q_THD, cache_NB2GD, tables_SM, query_lens=query_lens, context_lens=context_lens, scale=scale
        )
