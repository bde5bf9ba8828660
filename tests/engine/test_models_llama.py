"""Logits of tiny random Llamas against transformers, for every switch that config.json has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.layers.rope import RopeError
from narrowgauge.engine.model_runner import ModelRunner
from narrowgauge.engine.models.registry import ModelError
from narrowgauge.engine.scoring import EngineLogits
from narrowgauge.engine.weights import WeightError
from narrowgauge.quant.formats.base import FormatError

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": LLAMA3},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 20},
        {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
    ids=["plain", "tied", "biases", "llama3", "one kv head", "no grouping"],
)
def test_logits_equal_transformers_within_fp32_noise(make_llama: Callable[..., Path], settings: dict[str, Any]) -> None:
    folder = make_llama(**settings)
    ids = torch.randint(0, 256, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    mine = EngineLogits(folder, max_length=150, chunk=64, dtype="float32").logits(ids)
    assert mine.shape == expected.shape
    assert mine.dtype == torch.float32
    assert float((mine - expected).abs().max() / expected.abs().max()) < 1e-5


def test_the_older_way_to_write_rope_is_read(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(rope_parameters=LLAMA3)
    ids = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(2))
    new = EngineLogits(folder, max_length=100, dtype="float32").logits(ids)
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    edit_config(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    torch.testing.assert_close(EngineLogits(folder, max_length=100, dtype="float32").logits(ids), new)


def test_what_cannot_be_run_is_refused_in_one_line(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()
    original = (folder / "config.json").read_text()
    for error, match, changes in (
        (
            ModelError,
            "architecture BertModel is not supported; this engine runs: LlamaForCausalLM",
            {"architectures": ["BertModel"]},
        ),
        (ModelError, r"\(none named\)", {"architectures": []}),
        (ModelError, "hidden_act 'gelu'", {"hidden_act": "gelu"}),
        (RopeError, "'yarn' is not supported", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        (ModelError, "cannot share 3", {"num_key_value_heads": 3}),
        (WeightError, "embed_tokens.weight has shape", {"vocab_size": 300}),
        (WeightError, "does not use it", {"num_hidden_layers": 1}),
        (FormatError, "layers.2", {"num_hidden_layers": 3}),
    ):
        (folder / "config.json").write_text(original)
        edit_config(folder, **changes)
        with pytest.raises(error, match=match):
            ModelRunner(EngineConfig(model=folder))


def test_a_tied_head_that_is_stored_twice_is_accepted(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert ModelRunner(EngineConfig(model=folder)).shape.layers == 2


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))
