"""Rounding while the reference runs: the very logits of transformers' modules with the rounding written out by hand."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from narrowgauge.quant.evaluate.dequantized import DequantizedReader
from narrowgauge.quant.evaluate.reference import ReferenceModel, ReferenceModelError
from narrowgauge.quant.evaluate.rounded import separate_experts
from narrowgauge.quant.formats.base import FormatError
from narrowgauge.quant.formats.checkpoint import CheckpointReader

IDS = torch.randint(258, (2, 33), generator=torch.Generator().manual_seed(3))
INT8 = "{weights: {bits: 8, type: int}, activations: {bits: 8, type: int}}"
FP8 = "{weights: {bits: 8, type: float}, activations: {bits: 8, type: float}}"
STATIC = (
    "{weights: {bits: 8, type: float, per_tensor: true}, "
    "activations: {bits: 8, type: float, granularity: tensor, dynamic: false}}"
)
BLOCK = "{weights: {bits: 8, type: float, block: [32, 32]}, activations: {bits: 8, type: float, granularity: group, group: 32}}"
KV_FP8 = "{weights: null, kv_cache: {bits: 8, type: float}}"
KV_INT8_HEADS = "{weights: {bits: 8, type: int}, kv_cache: {bits: 8, type: int, granularity: head}}"


def _int8(x, scale):
    return (x / scale).round().clamp(-128, 127) * scale


def _fp8(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


ROUNDINGS = {
    INT8: lambda x, static: _int8(x, x.abs().amax(-1, keepdim=True) / 127.5),
    FP8: lambda x, static: _fp8(x, x.abs().amax(-1, keepdim=True) / 448),
    STATIC: lambda x, static: _fp8(x, static),
    BLOCK: lambda x, static: _fp8(
        x.unflatten(-1, (-1, 32)), x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 448
    ).flatten(-2),
}


def _plain(folder, base):
    """transformers' model of the base with the candidate's weights in it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    reader = CheckpointReader(folder)
    with torch.no_grad():
        for name in reader.layout.linears:
            model.get_submodule(name).weight.copy_(reader.weight(name, torch.float32))
    return model


@torch.inference_mode()
def _logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("scheme", [INT8, FP8, STATIC, BLOCK])
def test_inputs_are_rounded_as_the_scheme_says_and_not_when_switched_off(tiny_llama, quantized, scheme):
    base = tiny_llama()
    folder = quantized(base, scheme, method="{name: rtn}")
    model = _plain(folder, base)
    weights_only = _logits(model)
    stored = load_file(folder / "model.safetensors")
    for name in CheckpointReader(folder).layout.linears:
        static = stored.get(f"{name}.input_scale", torch.tensor(0.0)).float()
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, static=static: (ROUNDINGS[scheme](args[0], static),)
        )
    assert torch.equal(ReferenceModel(folder, dtype=torch.float32, round_activations=False).logits(IDS), weights_only)
    source = ReferenceModel(folder, dtype=torch.float32)
    torch.testing.assert_close(source.logits(IDS), _logits(model), rtol=1e-5, atol=1e-5)
    assert (source.logits(IDS) - weights_only).abs().mean() > 1e-3, "switching the rounding off must be seen"
    assert source.rounding.startswith("inputs of 14 Linears (W8A8")


@pytest.mark.parametrize("scheme", [KV_FP8, KV_INT8_HEADS])
def test_keys_after_the_rotary_embedding_and_values_are_rounded_by_the_files_scales(
    tiny_llama, quantized, monkeypatch, scheme
):
    base = tiny_llama()
    folder = quantized(base, scheme)
    model = _plain(folder, base)
    stored = load_file(folder / "model.safetensors")
    kind = _fp8 if scheme == KV_FP8 else _int8
    scales = [
        [stored[f"model.layers.{i}.self_attn.{which}_scale"].float().view(-1, 1, 1) for i in range(2)] for which in "kv"
    ]
    rotate, layer = modeling_llama.apply_rotary_pos_emb, iter(range(2))

    def rotate_and_round(q, k, *others, **named):
        q, k = rotate(q, k, *others, **named)
        return q, kind(k, scales[0][next(layer)])

    for i, block in enumerate(model.model.layers):
        block.self_attn.v_proj.register_forward_hook(
            lambda module, args, v, i=i: (
                kind(v.unflatten(-1, (2, 16)).transpose(1, 2), scales[1][i]).transpose(1, 2).flatten(-2)
            )
        )
    off = ReferenceModel(folder, dtype=torch.float32, round_kv=False)
    torch.testing.assert_close(off.logits(IDS), _logits(_plain(folder, base)), rtol=0, atol=0)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate_and_round)
        expected = _logits(model)
    source = ReferenceModel(folder, dtype=torch.float32)
    torch.testing.assert_close(source.logits(IDS), expected, rtol=1e-5, atol=1e-5)
    assert (source.logits(IDS) - off.logits(IDS)).abs().mean() > 1e-3
    assert source.attention == "sdpa"
    assert "keys and values (KV8-" in source.rounding
    assert off.rounding.endswith("SWITCHED OFF")


def test_a_model_with_soft_capped_attention_rounds_keys_and_values_too(tiny_model, quantized):
    folder = tiny_model("gemma2", dtype=torch.bfloat16)
    checkpoint = quantized(folder, KV_FP8)
    on, off = (ReferenceModel(checkpoint, dtype=torch.float32, round_kv=switch).logits(IDS) for switch in (True, False))
    assert torch.equal(off, _logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    assert (on - off).abs().mean() > 1e-3


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_mixtures_of_experts_run_whole_quantized_and_with_rounded_inputs(tiny_model, quantized, family):
    base = tiny_model(family, dtype=torch.bfloat16)
    original = _logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert torch.equal(ReferenceModel(base, dtype=torch.float32).logits(IDS), original)
    folder = quantized(base, INT8)
    weights_only = ReferenceModel(folder, dtype=torch.float32, round_activations=False).logits(IDS)
    source = ReferenceModel(folder, dtype=torch.float32)
    assert sum(".experts." in name for name in CheckpointReader(folder).layout.linears) >= 2 * 2 * 3
    assert 0 < (weights_only - original).norm() / original.norm() < 0.2
    assert (source.logits(IDS) - weights_only).abs().mean() > 1e-4


def test_experts_taken_apart_compute_what_they_did_together(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("mixtral"), dtype=torch.float32)
    together = _logits(model)
    separate_experts(model)
    assert sum(isinstance(module, torch.nn.Linear) for module in model.model.layers[0].mlp.modules()) >= 2 * 3
    torch.testing.assert_close(_logits(model), together, rtol=1e-5, atol=1e-5)


def test_a_dynamic_scale_of_the_whole_input_is_one_of_a_window_whatever_the_batch(tiny_llama, quantized):
    folder = quantized(tiny_llama(), INT8)
    config = json.loads((folder / "config.json").read_text())
    group = next(iter(config["quantization_config"]["config_groups"].values()))
    group["input_activations"]["strategy"] = "tensor"
    (folder / "config.json").write_text(json.dumps(config))
    source = ReferenceModel(folder, dtype=torch.float32)
    alone = torch.cat([source.logits(row[None]) for row in IDS])
    assert torch.equal(source.logits(IDS), alone)


def _change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_static_scale_that_divides_by_nothing_is_refused_by_name(tiny_llama, quantized, value):
    folder = quantized(tiny_llama(), STATIC)
    name = "model.layers.1.mlp.up_proj"
    _change(folder, lambda tensors: tensors[f"{name}.input_scale"].fill_(value))
    with pytest.raises((ReferenceModelError, FormatError), match=name.replace(".", r"\.")):
        ReferenceModel(folder)


def test_a_cache_scheme_without_scales_is_refused_by_name(tiny_llama, quantized):
    folder = quantized(tiny_llama(), KV_FP8)
    _change(folder, lambda tensors: [tensors.pop(f"model.layers.1.self_attn.{which}_scale") for which in "kv"])
    with pytest.raises((ReferenceModelError, FormatError), match=r"model\.layers\.1\.self_attn"):
        ReferenceModel(folder)


@pytest.mark.parametrize("scheme", [INT8, KV_INT8_HEADS, "{weights: {bits: 4, group: 32}}"])
def test_a_quantized_checkpoint_reads_as_the_tensors_of_its_base(tiny_llama, quantized, scheme):
    base = tiny_llama()
    reader, original = DequantizedReader(quantized(base, scheme)), CheckpointReader(base)
    assert reader.names() == original.names()
    assert reader.layout is None
    for name in original.names():
        assert reader.has(name)
        found, wanted = reader.tensor(name).float(), original.tensor(name).float()
        assert (found - wanted).norm() <= 0.15 * wanted.norm()
    assert not reader.has("model.layers.0.self_attn.q_proj.weight_scale")
