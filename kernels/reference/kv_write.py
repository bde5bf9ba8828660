"""Eager twin of the KV write. T tokens, N blocks, B block size, G kv heads, D head size."""

import torch


def kv_write(kv_TE: torch.Tensor, cache_NB2GD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Stores keys and values of T tokens, packed [T, 2 G D] = (keys | values), at their slots (block * B + offset), in place."""
    blocks, size = cache_NB2GD.shape[:2]
    cache_NB2GD.view(blocks * size, -1).index_copy_(0, slots_T, kv_TE)
