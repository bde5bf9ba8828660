"""Separate Linears in place of fused experts, against transformers' fused modules and both ways of storing them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.model.blocks import Skeleton, UnsupportedModel, run_block
from narrowgauge.quant.model.experts import UnknownExperts, fused_experts, linearize
from narrowgauge.quant.model.runner import BlockRunner, everywhere
from narrowgauge.quant.pipeline.sequential import quantize
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import resolve

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe"]
NAMES = ("gate_proj", "up_proj", "down_proj")


def _fuse(folder, stored: str, names: tuple[str, str, str]) -> None:
    """Rewrites the file with all experts of a layer in two tensors, as newer files have them."""
    tensors = load_file(folder / "model.safetensors")
    gates = [name for name in tensors if name.endswith(f"{stored}.0.{names[0]}.weight")]
    for gate in gates:
        prefix = gate.removesuffix(f".0.{names[0]}.weight")
        count = sum(name.startswith(f"{prefix}.") and f".{names[0]}." in name for name in tensors)
        parts = [
            torch.stack([tensors.pop(f"{prefix}.{index}.{name}.weight") for index in range(count)]) for name in names
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.cat(parts[:2], dim=1)
        tensors[f"{prefix}.down_proj"] = parts[2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("every_token", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_separate_experts_compute_what_the_fused_ones_do(tiny_model, family, every_token):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32)
    block = model.model.layers[1]
    ((name, fused),) = fused_experts(block)
    assert name == "mlp.experts"
    separate = linearize(fused, NAMES)
    inner = fused.down_proj.shape[2]
    for index, expert in enumerate(separate):
        for linear, weight in zip(
            expert.parts, (*fused.gate_up_proj[index].split(inner), fused.down_proj[index]), strict=True
        ):
            linear.weight = nn.Parameter(weight)
    separate.every_token = every_token
    x = torch.randn(20, 64)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(20)])
    weights = torch.rand(20, 2)
    with torch.no_grad():
        torch.testing.assert_close(separate(x, chosen, weights), fused(x, chosen, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_stored_as_one_tensor_are_the_same_model(tiny_model, family):
    folder = tiny_model(family)
    ids = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(0))
    separate = Skeleton(CheckpointReader(folder))
    before, names = _run(separate, ids), set(separate.linears())
    weights = {name: separate.weight(name).clone() for name in separate.block_linears(1)}
    assert all(separate.source(name) == f"{name}.weight" for name in weights)
    _fuse(folder, "experts", ("w1", "w3", "w2") if family == "mixtral" else NAMES)
    fused = Skeleton(CheckpointReader(folder))
    assert set(fused.linears()) == names
    assert torch.equal(_run(fused, ids), before)
    for name, weight in weights.items():
        assert torch.equal(fused.weight(name), weight)
        if ".experts." in name:
            assert fused.source(name).endswith(("experts.gate_up_proj", "experts.down_proj"))
            assert fused.reader.has(fused.source(name))


def _run(skeleton: Skeleton, ids: torch.Tensor) -> torch.Tensor:
    (hidden,) = skeleton.enter(ids, batch=len(ids))
    for index, call in enumerate(skeleton.calls(ids.shape[1])):
        with skeleton.loaded(index) as block:
            hidden = run_block(block, hidden, call)
    return hidden


@pytest.mark.parametrize("all_experts", [False, True])
def test_an_expert_is_calibrated_on_its_own_tokens_or_on_all(tiny_model, all_experts):
    skeleton = Skeleton(CheckpointReader(tiny_model("qwen3_moe")), all_experts=all_experts)
    ids = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(0))
    (hidden,), call = skeleton.enter(ids, batch=2), skeleton.calls(12)[0]
    with skeleton.loaded(0) as block:
        runner = BlockRunner(block, call, skeleton.probe(0))
        assert [len(stage) for stage in runner.stages] == ([1, 1, 1, 4] if all_experts else [1, 1, 4, 4])
        collector = runner.collect([expert.parts[0] for expert in block.mlp.experts])
        collector.add(hidden)
        tokens = [inputs.tokens for inputs in collector.statistics().values()]
        plain = run_block(block, hidden, call)
        with everywhere(block):
            torch.testing.assert_close(run_block(block, hidden, call), plain, rtol=1e-5, atol=1e-6)
    if all_experts:
        assert tokens == [24] * 4
    else:
        assert sum(tokens) == 24 * 2  # two experts a token
        assert len(set(tokens)) > 1


def test_a_mixture_passes_over_each_expert_once_when_a_stage_is_collected_together(tiny_model):
    skeleton = Skeleton(CheckpointReader(tiny_model("mixtral")))
    ids = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(0))
    (hidden,), call = skeleton.enter(ids, batch=2), skeleton.calls(12)[0]
    with skeleton.loaded(0) as block:
        runner = BlockRunner(block, call, skeleton.probe(0), cache_bytes=1 << 30)
        assert [len(stage) for stage in runner.stages] == [1, 1, 4, 4]
        attended, downs = [], []
        handles = [block.self_attn.q_proj.register_forward_hook(lambda *_: attended.append(1))]
        handles += [expert.parts[2].register_forward_hook(lambda *_: downs.append(1)) for expert in block.mlp.experts]
        for stage in runner.stages:
            collector = runner.collect([members[0] for members in stage])
            collector.add(hidden, key=0)
            for members in stage:
                for module in members:
                    module.weight.data = (module.weight * 8).round() / 8
                runner.settle(members)
        output = runner.output(hidden, key=0)
        for handle in handles:
            handle.remove()
        assert torch.equal(output, run_block(block, hidden, call))
    assert len(attended) == 1
    assert len(downs) == 4 * 3  # with gate and up, with its own input kept, and for the output


def test_experts_of_another_arithmetic_are_refused_by_name(tmp_path):
    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_local_experts=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnknownExperts, match=r"mlp\.experts: experts of GptOssExperts"):
        list(fused_experts(model.model.layers[0]))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"^model\.layers\.0\.mlp\.experts: experts of GptOssExperts"):
        Skeleton(CheckpointReader(tmp_path))


@pytest.mark.parametrize("experts", ["routed", "all"])
def test_a_recipe_says_on_which_tokens_experts_are_calibrated(tiny_model, tmp_path, experts):
    """Of 8 experts on 3 short samples some see next to nothing; those are rounded by their weights alone, and it is said."""
    folder = tiny_model("mixtral", dtype=torch.bfloat16, num_local_experts=8, num_experts_per_tok=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.gate.weight"][5] = 0  # never the largest of 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"samples": 3, "length": 16, "experts": experts},
        "methods": [{"name": "gptq"}],
        "scheme": {"weights": {"bits": 4, "group": 32}},
    }
    recipe = build(Recipe, mapping, registries={QuantMethod: METHODS})
    result = quantize(recipe, resolve(str(folder), cache=tmp_path / "cache"), tmp_path / "out")
    fallback = {layer.name: layer.fallback for layer in result.layers}
    unrouted = fallback["model.layers.0.block_sparse_moe.experts.5.w1"]
    assert (unrouted is None) == (experts == "all")
    if unrouted:
        assert "of 48 calibration tokens reached it" in unrouted


def test_names_of_mixtral_are_those_of_its_files(tiny_model):
    folder = tiny_model("mixtral")
    skeleton = Skeleton(CheckpointReader(folder))
    names = skeleton.block_linears(0)
    assert "model.layers.0.block_sparse_moe.experts.3.w2" in names
    assert skeleton.routers() == tuple(f"model.layers.{index}.block_sparse_moe.gate" for index in range(2))
    assert (
        json.loads((folder / "config.json").read_text())["model_type"] == AutoConfig.from_pretrained(folder).model_type
    )
