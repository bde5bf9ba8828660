"""Looking at what attention is given and gives, through transformers' attention interface.

Whatever a model calls its cache and however it reads it, keys (after RoPE) and values pass through that interface.
Shapes: N samples, L tokens of a sample, H query heads, G kv heads, D head size.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NAME = "narrowgauge-watched"


@dataclass(frozen=True)
class Attended:
    """One call of attention: the module, its keys (after RoPE) and values [N, G, L, D], what came out [N, L, H, D]."""

    module: nn.Module
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


@dataclass
class KVRange:
    """The largest |key| (after RoPE) and |value| of each kv head, [G] fp32; None where none was seen, or only zeros."""

    key: torch.Tensor | None = None
    value: torch.Tensor | None = None


def attention_modules(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that call transformers' attention interface with keys and values by head."""
    return [
        module
        for module in block.modules()
        if hasattr(module, "is_causal") and hasattr(getattr(module, "config", None), "_attn_implementation")
    ]


def kv_heads(attention: nn.Module) -> int:
    """How many heads of keys and values an attention module has."""
    config: Any = attention.config
    own = getattr(attention, "num_key_value_heads", None) or getattr(config, "num_key_value_heads", None)
    return int(own or config.num_attention_heads)


@contextlib.contextmanager
def observe_kv(block: nn.Module) -> Iterator[KVRange]:
    """Inside, every forward pass of the block widens the range that is yielded."""
    seen = KVRange()

    def watch(attended: Attended) -> None:
        heads = kv_heads(attended.module)
        seen.key = _widened(seen.key, attended.key, heads)
        seen.value = _widened(seen.value, attended.value, heads)

    with watched_attention(block, watch):
        yield seen


@contextlib.contextmanager
def watched_attention(block: nn.Module, watch: Callable[[Attended], None]) -> Iterator[None]:
    """Inside, `watch` is told of every call of attention in the block, whose result stays what it is without."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    modules: list[Any] = attention_modules(block)
    configs = {id(module.config): module.config for module in modules}
    implementations = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for module in modules:
            module.watched = (watch, implementations[id(module.config)])
        for config in configs.values():
            config._attn_implementation = _NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = implementations[key]
        for module in modules:
            del module.watched


def _attend(module: Any, *states: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function as transformers calls it: (module, query, key, value, mask, ...)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    watch, implementation = module.watched
    if implementation == "eager":  # not registered: each file of transformers has its own
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
    result: tuple[torch.Tensor, torch.Tensor | None] = attend(module, *states, **named)
    watch(Attended(module, states[1], states[2], result[0]))
    return result


def _widened(seen: torch.Tensor | None, states: torch.Tensor, heads: int) -> torch.Tensor | None:
    """Keys that a model repeats for its query heads count for the kv head that they are copies of."""
    repeats = states.shape[1] // heads if states.shape[1] % heads == 0 else 1
    absmax = states.detach().abs().amax((0, 2, 3)).float().view(-1, repeats).amax(1)
    widened = absmax if seen is None else torch.maximum(seen, absmax)
    return None if bool((widened == 0).all()) else widened
