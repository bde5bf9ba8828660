"""Layer by layer: what hooks on transformers' own whole models see."""

import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.evaluate.layers import Precision, measure_layers
from narrowgauge.quant.evaluate.windows import EvaluationError
from narrowgauge.quant.formats.checkpoint import CheckpointReader

IDS = torch.randint(258, (3, 40), generator=torch.Generator().manual_seed(3))
W4 = "{weights: {bits: 4, group: 32}}"
INT8 = "{weights: {bits: 8, type: int}, activations: {bits: 8, type: int}}"


def _model(base, folder=None, rounding=None):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if folder is not None:
        reader = CheckpointReader(folder)
        for name in reader.layout.linears:
            linear = model.get_submodule(name)
            linear.weight.data = reader.weight(name, torch.float32)
            if rounding is not None:
                linear.register_forward_pre_hook(lambda module, args: (rounding(args[0]),))
    return model


@torch.inference_mode()
def _seen(model, names):
    """Inputs and outputs of modules, over all windows."""
    found = {name: ([], []) for name in names}

    def hook(name):
        def see(module, args, kwargs, output):
            found[name][0].append(args[0] if args else kwargs["hidden_states"])
            found[name][1].append(output[0] if isinstance(output, tuple) else output)

        return see

    handles = [model.get_submodule(n).register_forward_hook(hook(n), with_kwargs=True) for n in names]
    for row in IDS:
        model(row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: (torch.cat(x), torch.cat(y)) for name, (x, y) in found.items()}


def _int8(x):
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


@pytest.mark.parametrize(("scheme", "rounding"), [(W4, None), (INT8, _int8)])
def test_errors_are_those_of_hooks_on_the_whole_models(tiny_llama, quantized, scheme, rounding):
    base = tiny_llama()
    folder = quantized(base, scheme)
    report = measure_layers(base, folder, IDS)
    names = list(CheckpointReader(folder).layout.linears)
    assert sorted(layer.name for layer in report.layers) == sorted(names)
    one, two = _model(base), _model(base, folder, rounding)
    before, after = _seen(one, names), _seen(two, names)
    for layer in report.layers:
        weight, rounded_weight = (model.get_submodule(layer.name).weight.detach() for model in (one, two))
        x, y = before[layer.name]
        guess = (x if rounding is None else rounding(x)) @ rounded_weight.t()
        assert layer.weight_error == pytest.approx(((weight - rounded_weight).norm() / weight.norm()).item(), rel=1e-4)
        assert layer.output_error == pytest.approx(((y - guess).norm() / y.norm()).item(), rel=1e-3)
        assert layer.propagated_error == pytest.approx(((y - after[layer.name][1]).norm() / y.norm()).item(), rel=1e-3)
        assert layer.scheme == ("W4A16" if scheme == W4 else "W8A8")
        assert layer.output_kl > 0
    first = next(layer for layer in report.layers if layer.name.endswith("layers.0.self_attn.q_proj"))
    assert first.propagated_error == pytest.approx(first.output_error, rel=1e-4), "nothing lies before the first layer"


def test_attention_outputs_have_scipys_kurtosis_before_and_after(tiny_llama, quantized):
    base = tiny_llama()
    folder = quantized(base, W4)
    names = [f"model.layers.{i}.self_attn" for i in range(2)]
    before, after = _seen(_model(base), names), _seen(_model(base, folder), names)
    found = measure_layers(base, folder, IDS).attention
    assert [part.name for part in found] == names
    for part in found:
        for kurtosis, spike, seen in (
            (part.base_kurtosis, part.base_spike, before),
            (part.kurtosis, part.spike, after),
        ):
            values = seen[part.name][1].flatten().double()
            assert kurtosis == pytest.approx(scipy.stats.kurtosis(values.numpy()), rel=1e-3, abs=1e-3)
            assert spike == pytest.approx((values.abs().max() / values.abs().median()).item(), rel=0.006)


def test_a_model_against_itself_loses_nothing(tiny_llama):
    base = tiny_llama()
    report = measure_layers(base, base, IDS)
    for layer in report.layers:
        assert (layer.weight_error, layer.output_error, layer.propagated_error) == (0, 0, 0)
        assert layer.output_kl == pytest.approx(0, abs=1e-12)


def test_rounding_of_inputs_is_seen_in_the_layers_and_can_be_switched_off(tiny_llama, quantized):
    base = tiny_llama()
    folder = quantized(base, INT8)
    on = measure_layers(base, folder, IDS).layers
    off = measure_layers(base, folder, IDS, precision=Precision(round_activations=False)).layers
    assert all(a.output_error > b.output_error for a, b in zip(on, off, strict=True))
    assert [layer.weight_error for layer in on] == [layer.weight_error for layer in off]


def test_a_smoothed_candidate_is_judged_by_what_it_computes(tiny_llama, quantized):
    base = tiny_llama(intermediate_size=192)
    smoothed = quantized(base, "{weights: {bits: 8}}", method="{name: smoothquant, alpha: 0.5}, {name: rtn}")
    report = measure_layers(base, smoothed, IDS)
    assert max(layer.output_error for layer in report.layers) < 0.03
    assert max(layer.propagated_error for layer in report.layers) < 0.05


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_are_judged_one_by_one(tiny_model, quantized, family):
    base = tiny_model(family, dtype=torch.bfloat16)
    folder = quantized(base, INT8)
    report = measure_layers(base, folder, IDS)
    experts = [layer for layer in report.layers if ".experts." in layer.name]
    assert len(experts) in (2 * 4 * 3, 4 * 3)
    assert all(layer.propagated_error is None for layer in experts), "each model routes by itself"
    assert all(0 < layer.output_error < 0.1 for layer in experts if layer.output_error is not None)


def test_keys_and_values_are_rounded_in_the_layers_too(tiny_llama, quantized):
    base = tiny_llama()
    folder = quantized(base, "{weights: null, kv_cache: {bits: 8, type: float}}")
    by_name = {layer.name: layer for layer in measure_layers(base, folder, IDS).layers}
    assert by_name["model.layers.0.self_attn.v_proj"].propagated_error == 0
    assert by_name["model.layers.0.self_attn.o_proj"].propagated_error > 1e-3
    assert by_name["model.layers.0.self_attn.o_proj"].output_error == 0


def test_models_that_are_not_built_alike_are_not_compared(tiny_llama):
    with pytest.raises(EvaluationError, match=r"down_proj is \(64, 192\), in the base \(64, 128\)"):
        measure_layers(tiny_llama("one"), tiny_llama("two", intermediate_size=192), IDS)


@pytest.mark.gpu
def test_an_accelerator_gives_the_figures_of_the_processor(tiny_llama, quantized):
    base = tiny_llama()
    folder = quantized(
        base, "{weights: {bits: 8}, activations: {bits: 8, type: int}, kv_cache: {bits: 8, type: float}}"
    )
    here, there = (measure_layers(base, folder, IDS, precision=Precision(device=d)) for d in ("cpu", "cuda"))
    for one, two in zip(here.layers, there.layers, strict=True):
        assert two.weight_error == pytest.approx(one.weight_error, rel=1e-3)
        assert two.output_error == pytest.approx(one.output_error, rel=0.02)
        assert two.propagated_error == pytest.approx(one.propagated_error, rel=0.05, abs=1e-4)
        assert two.output_kl == pytest.approx(one.output_kl, rel=0.1, abs=1e-4)
    for one, two in zip(here.attention, there.attention, strict=True):
        assert two.base_kurtosis == pytest.approx(one.base_kurtosis, rel=1e-3, abs=1e-3)
