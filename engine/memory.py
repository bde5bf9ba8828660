"""How many KV blocks there are, and how long a sequence may be."""

import logging
from dataclasses import dataclass

import psutil
import torch

from narrowgauge.engine.config import EngineConfig, EngineConfigError
from narrowgauge.engine.models.registry import ModelShape

logger = logging.getLogger(__name__)

CPU_SHARE = 1 / 8
"""Of free memory, for a cache that nobody sized: pages are taken only when used, and replicas share the machine."""
GPU_SHARE = 0.8
"""Of free GPU memory beside the weights; the rest is for activations."""


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """Blocks of the cache, bytes of one block over all layers, and the longest sequence (prompt and output) in tokens."""

    num_blocks: int
    block_bytes: int
    max_model_len: int


def plan_kv_cache(
    config: EngineConfig, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, weight_bytes: int
) -> KVPlan:
    """Sizes the cache: 2 * layers * kv_heads * head_size * bytes for each token. `weight_bytes` are yet to be loaded.

    Raises EngineConfigError where a sequence of the length asked for does not fit, naming the length that does.
    """
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * dtype.itemsize
    block_bytes = token_bytes * config.block_size
    wanted = config.max_model_len or shape.max_positions
    if wanted > shape.max_positions:
        raise EngineConfigError(
            f"--max-model-len {wanted} exceeds the {shape.max_positions} positions that this model was trained for"
        )
    share = CPU_SHARE if device.type == "cpu" else GPU_SHARE
    budget = int((_free_bytes(device) - weight_bytes) * share)
    blocks = _blocks(config, block_bytes, wanted, budget=budget)
    capacity = blocks * config.block_size
    if wanted > capacity:
        if config.max_model_len is not None:
            needed = -(-wanted // config.block_size)
            raise EngineConfigError(
                f"--max-model-len {wanted} needs {needed} KV blocks of {config.block_size} tokens "
                f"({needed * block_bytes / 2**20:.0f} MiB), but there are {blocks}: "
                f"give --num-kv-blocks {needed}, or --max-model-len {capacity}"
            )
        logger.warning("sequences are limited to %d of the model's %d tokens by the KV cache", capacity, wanted)
    return KVPlan(num_blocks=blocks, block_bytes=block_bytes, max_model_len=min(wanted, capacity))


def _blocks(config: EngineConfig, block_bytes: int, wanted: int, *, budget: int) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes < block_bytes:
            raise EngineConfigError(
                f"--kv-cache-bytes {config.kv_cache_bytes} is less than one block of {block_bytes} bytes"
            )
        return config.kv_cache_bytes // block_bytes
    useful = -(-wanted // config.block_size) * config.max_num_seqs
    return max(1, min(useful, budget // block_bytes))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
