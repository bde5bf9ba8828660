"""Every recipe that is shipped fits the model it names: planned against files of the real widths that hold no weights."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from narrowgauge.quant.formats.base import get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.plan import make_plan
from narrowgauge.quant.recipe import Recipe, load_recipe

RECIPES = sorted((Path(__file__).resolve().parents[2] / "flows" / "recipes").glob("*.yaml"))
KINDS = ("w4a16-gptq", "w4a16-awq", "w8a8-smoothquant", "fp8-dynamic", "fp8-block", "mixed-4.8bit", "kv-fp8")
MODELS = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}


def _hollow(folder: Path, **sizes: object) -> Path:
    """A bfloat16 model of two layers whose weight file is a header and a hole: it takes no space on the disk."""
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=512, architectures=["LlamaForCausalLM"])
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            start, end = end, end + 2 * tensor.numel()
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.fixture(scope="module")
def skeletons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Skeleton]:
    folder = tmp_path_factory.mktemp("hollow")
    return {name: Skeleton(CheckpointReader(_hollow(folder / name, **sizes))) for name, sizes in MODELS.items()}


def test_each_kind_stands_ready_for_each_model():
    names = {path.stem for path in RECIPES}
    assert names == {f"{model}-{kind}" for model in MODELS for kind in KINDS} | {"smollm2-w2a16-rtn"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_every_layer_of_its_model_and_needs_no_warning(path, skeletons):
    recipe: Recipe = load_recipe(path)
    skeleton = skeletons[recipe.model.name]
    planned = make_plan(recipe, skeleton)
    assert planned.warnings == ()
    if recipe.scheme is not None and recipe.scheme.weights is None:
        assert planned.layers == ()
        assert planned.attentions == ("model.layers.0.self_attn", "model.layers.1.self_attn")
        assert 0 < planned.size_bytes - planned.base_size_bytes < 100
    else:
        assert len(planned.layers) == 14
        assert planned.kept == ("lm_head",)
        assert planned.size_bytes < 0.75 * planned.base_size_bytes
    written = get_format(recipe.format).config(planned.schemes, planned.kept, planned.kv_cache)
    read = QuantizationConfig.model_validate(written)
    assert len(read.config_groups) == len(set(planned.schemes.values()))
    assert (read.kv_cache_scheme is None) == (planned.kv_cache is None)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_has_a_gate_on_every_figure(path):
    gate = load_recipe(path).gate
    assert 1 < gate.perplexity_ratio_max < 1.5
    assert 0 < gate.kl_mean_max < 0.5
    assert 0.5 < gate.top1_min < 1
