"""Which architectures there are, by the name that config.json gives, and what a model is to the engine.

T tokens, R rows, E hidden size, V vocabulary, N blocks, B block size, G kv heads, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from narrowgauge.engine.attention.base import AttentionBackend, AttentionInputs
from narrowgauge.engine.weights import WeightLoader
from narrowgauge.kernels.dispatch import Kernels
from narrowgauge.quant.formats.read import lookup

MODELS: Mapping[str, str] = {
    "LlamaForCausalLM": "narrowgauge.engine.models.llama:Llama",
}


class ModelError(ValueError):
    """A config.json that this engine cannot serve; the message says what it can."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the engine must know of a model to size its cache and check requests."""

    layers: int
    kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What a model is built from: everything chosen beforehand, nothing looked up while it runs."""

    loader: WeightLoader
    kernels: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


class Model(Protocol):
    """Plain tensors and functions: the same call for prompts, decode and both together."""

    shape: ClassVar[Any]

    def __init__(self, config: Mapping[str, Any], parts: ModelParts) -> None: ...

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        attention: AttentionInputs,
        caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm. Writes keys and values into `caches`, one [N, B, 2, G, D] a layer."""

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V] in the model's dtype."""


def model_class(config: Mapping[str, Any]) -> Any:
    """The class for config.json's architecture; its `read_shape(config)` gives the ModelShape. Raises ModelError."""
    architectures = config.get("architectures") or []
    name = str(architectures[0]) if architectures else "(none named)"
    if name not in MODELS:
        raise ModelError(f"architecture {name} is not supported; this engine runs: {', '.join(sorted(MODELS))}")
    return lookup(MODELS, name)
