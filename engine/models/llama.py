"""The Llama family: RMSNorm, rotary positions, grouped queries, gated SiLU; biases and a tied head where config.json says so.

T tokens, R rows, E hidden size, I intermediate size, H query heads, G kv heads, D head size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.engine.attention.base import AttentionInputs
from narrowgauge.engine.layers.rope import read_rope, rope_tables
from narrowgauge.engine.linear_methods.base import LinearMethod
from narrowgauge.engine.models.registry import ModelError, ModelParts, ModelShape
from narrowgauge.engine.weights import WeightLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaLayer:
    """The weights of one block; `next_norm` is the following block's input norm, or the model's last one."""

    qkv: LinearMethod
    output: LinearMethod
    gate_up: LinearMethod
    down: LinearMethod
    post_attention_norm: torch.Tensor
    next_norm: torch.Tensor


class Llama:
    """LlamaForCausalLM (transformers' models/llama/modeling_llama.py), with q, k, v and gate, up packed."""

    def __init__(self, config: Mapping[str, Any], parts: ModelParts) -> None:
        """Raises ModelError, WeightError or FormatError for a checkpoint that it cannot run."""
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported for Llama; only 'silu'")
        shape = self.read_shape(config)
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = shape.kv_heads
        self._size = shape.head_size
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._scale = shape.head_size**-0.5
        self._kernels = parts.kernels
        self._attend = parts.attention.attend
        self._cos, self._sin = rope_tables(
            read_rope(config), shape.head_size, parts.max_model_len, dtype=parts.dtype, device=parts.device
        )
        loader = parts.loader
        self._embedding = loader.tensor("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
        norms = [
            loader.tensor(f"model.layers.{i}.input_layernorm.weight", (shape.hidden_size,)) for i in range(shape.layers)
        ]
        self._first_norm = norms[0]
        norms.append(loader.tensor("model.norm.weight", (shape.hidden_size,)))
        self._layers = [_load_layer(loader, i, shape, next_norm=norms[i + 1]) for i in range(shape.layers)]
        tied = bool(config.get("tie_word_embeddings", False)) or not loader.has("lm_head.weight")
        if tied and loader.has("lm_head.weight"):  # some exporters write the shared tensor twice
            loader.tensor("lm_head.weight", (shape.vocab_size, shape.hidden_size))
        self._head = loader.tied(self._embedding) if tied else loader.linear("lm_head")

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """Raises ModelError where config.json lacks a figure or the heads do not divide."""
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            shape = ModelShape(
                layers=int(config["num_hidden_layers"]),
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or hidden // heads),
                hidden_size=hidden,
                vocab_size=int(config["vocab_size"]),
                max_positions=int(config["max_position_embeddings"]),
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error.args[0]!r}, which a Llama model needs") from None
        if heads % shape.kv_heads:
            raise ModelError(f"{heads} attention heads cannot share {shape.kv_heads} key-value heads")
        return shape

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        attention: AttentionInputs,
        caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; keys and values are written into `caches`."""
        kernels, eps, size = self._kernels, self._eps, self._size
        rotated, queries = self._heads + self._kv_heads, self._heads * size
        cos_TD, sin_TD = self._cos[positions_T], self._sin[positions_T]
        residual_TE = torch.nn.functional.embedding(ids_T, self._embedding)
        x_TE = kernels.rms_norm(residual_TE, self._first_norm, eps)
        for layer, cache in zip(self._layers, caches, strict=True):
            qkv = layer.qkv(x_TE)
            qk_THD = qkv[:, : rotated * size].view(-1, rotated, size)
            kernels.apply_rope(qk_THD, cos_TD, sin_TD)
            kernels.kv_write(qkv[:, queries:], cache, attention.slots_T)
            out_THD = self._attend(qk_THD[:, : self._heads], cache, attention.work, scale=self._scale)
            x_TE = layer.output(out_THD.flatten(1))
            x_TE = kernels.add_rms_norm(x_TE, residual_TE, layer.post_attention_norm, eps=eps)
            x_TE = layer.down(kernels.silu_mul(layer.gate_up(x_TE)))
            x_TE = kernels.add_rms_norm(x_TE, residual_TE, layer.next_norm, eps=eps)
        return x_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V]."""
        return self._head(hidden_RE)


def _load_layer(loader: WeightLoader, index: int, shape: ModelShape, *, next_norm: torch.Tensor) -> LlamaLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LlamaLayer(
        qkv=loader.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        output=loader.linear(f"{attention}.o_proj"),
        gate_up=loader.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=loader.linear(f"{mlp}.down_proj"),
        post_attention_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", (shape.hidden_size,)),
        next_norm=next_norm,
    )
