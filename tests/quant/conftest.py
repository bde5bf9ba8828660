"""A small world for the quant tests: random Llamas of a few thousand weights with a byte tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TinyLlama = Callable[..., Path]
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "phi3": {"pad_token_id": 0, "tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen2_moe": {**_MIXTURE, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 2},
    "qwen3_moe": {**_MIXTURE, "head_dim": 32},
    "cohere": {"layer_norm_eps": 1e-5},
}
"""What a tiny model of each family has beside the common sizes; the first layer of qwen2_moe is dense."""


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of one token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {symbol: index + 2 for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


@pytest.fixture
def tiny_llama(tmp_path: Path) -> TinyLlama:
    """Makes the folder of a random bfloat16 Llama; keyword arguments change its configuration."""

    def make(name: str = "tiny", **changes: object) -> Path:
        options: dict[str, object] = {
            "vocab_size": 258,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **changes,
        }
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**options))
        with torch.no_grad():
            for parameter in model.parameters():  # far from the tiny default range, so that rounding errors show
                if parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
        folder = tmp_path / name
        model.to(torch.bfloat16).save_pretrained(folder)
        save_byte_tokenizer(folder)
        return folder

    return make


@pytest.fixture
def tiny_model(tmp_path: Path) -> TinyLlama:
    """Makes the folder of a random model of one of FAMILIES; keyword arguments change its configuration."""

    def make(family: str, *, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
        common = {
            "vocab_size": 258,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
        }
        config = AutoConfig.for_model(family, **{**common, **FAMILIES[family], **changes})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # norms and biases away from their neutral start as well
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                elif "norm" in name:
                    parameter.add_(torch.randn(parameter.shape) * 0.3)
                else:
                    parameter.normal_(std=0.3)
        folder = tmp_path / family
        model.to(dtype).save_pretrained(folder)
        save_byte_tokenizer(folder)
        return folder

    return make


Quantized = Callable[..., Path]


@pytest.fixture
def quantized(tmp_path: Path) -> Quantized:
    """Quantizes a folder by a recipe in YAML parts: `quantized(folder, "{weights: {bits: 8}}", method="{name: rtn}")`."""

    def make(
        base: Path,
        scheme: str,
        *,
        method: str = "{name: rtn}",
        checkpoint_format: str = "compressed-tensors",
        calibration: str = "{samples: 4, length: 64, seed: 5}",
    ) -> Path:
        from narrowgauge.quant.pipeline.sequential import quantize
        from narrowgauge.quant.recipe import load_recipe
        from narrowgauge.quant.sources import resolve

        number = len(list(tmp_path.glob("recipe-*.yaml")))
        recipe = tmp_path / f"recipe-{number}.yaml"
        recipe.write_text(
            f"version: 1\nmodel: {{source: '{base}', name: tiny}}\nmethods: [{method}]\nscheme: {scheme}\n"
            f"calibration: {calibration}\nformat: {checkpoint_format}\n"
        )
        output = tmp_path / f"quantized-{number}"
        return quantize(load_recipe(recipe), resolve(str(base), cache=tmp_path / "cache"), output).path

    return make
