"""Sensitivities block by block: transformers' whole model with one unit's weights replaced is the oracle."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.allocation import sensitivity
from narrowgauge.quant.allocation.sensitivity import Unit, measure, measured_options
from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.rounding import round_activations
from narrowgauge.quant.formats.scheme import ActivationScheme, Scheme, WeightScheme
from narrowgauge.quant.methods.gptq import GPTQ
from narrowgauge.quant.methods.rtn import RTN
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.model.fused import units
from narrowgauge.quant.observers import round_to_nearest

W4, W4_FINE, W8 = (
    Scheme(weights=WeightScheme(bits=4, group=64)),
    Scheme(weights=WeightScheme(bits=4, group=32)),
    Scheme(weights=WeightScheme(bits=8)),
)
W8A8 = Scheme(weights=WeightScheme(bits=8), activations=ActivationScheme(bits=8, type="int"))
NEAREST = RTN(name="rtn")


def _ids(samples: int = 8, length: int = 24) -> torch.Tensor:
    return torch.randint(2, 258, (samples, length), generator=torch.Generator().manual_seed(0))


def _judged(ids: torch.Tensor) -> torch.Tensor:
    """The samples that a KL is measured on: the last quarter, which no Hessian has seen."""
    return ids[-(len(ids) // 4) :]


def _logits(
    folder: Path, ids: torch.Tensor, layers: tuple[str, ...] = (), scheme: Scheme | None = None
) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name in layers:
        linear = model.get_submodule(name)
        stored = linear.weight.detach().to(model.config.dtype)
        linear.weight.data = dequantize_weight(round_to_nearest(stored, scheme.weights), torch.float32)
        if scheme.activations:
            linear.register_forward_pre_hook(lambda _, x: (round_activations(x[0], scheme.activations),))
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def _kl(base: torch.Tensor, other: torch.Tensor) -> float:
    p, q = torch.log_softmax(base.double(), -1), torch.log_softmax(other.double(), -1)
    return float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean())


def _units(skeleton: Skeleton, options: tuple[Scheme, ...], measured: tuple[Scheme, ...]) -> list[Unit]:
    names = [name for index in range(len(skeleton.blocks)) for name in skeleton.block_linears(index)]
    return [Unit(name=unit, layers=layers, options=options, measured=measured) for unit, layers in units(names).items()]


def _quiet(_: str) -> None:
    pass


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_units_kl_is_that_of_the_whole_model_with_only_this_unit_rounded(tiny_model, family):
    folder, ids = tiny_model(family), _ids()
    skeleton = Skeleton(CheckpointReader(folder))
    own = _units(skeleton, (W4, W8A8), (W4, W8A8))
    found = measure(own, NEAREST, skeleton, ids=ids, progress=_quiet)
    judged = _judged(ids)
    base = _logits(folder, judged)
    assert len(found) == 8
    for unit in own:
        expected = [_kl(base, _logits(folder, judged, unit.layers, scheme)) for scheme in unit.options]
        assert found[unit.name] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_options_that_are_not_measured_are_scaled_from_the_measured_one_and_come_close(tiny_llama):
    folder, ids = tiny_llama(), _ids()
    skeleton = Skeleton(CheckpointReader(folder))
    own = _units(skeleton, (W4, W4_FINE, W8), (W4,))
    found = measure(own, NEAREST, skeleton, ids=ids, progress=_quiet)
    judged = _judged(ids)
    base = _logits(folder, judged)
    for unit in own:
        coarse, fine, eight = found[unit.name]
        assert fine == pytest.approx(_kl(base, _logits(folder, judged, unit.layers, W4_FINE)), rel=0.3)
        assert eight == pytest.approx(_kl(base, _logits(folder, judged, unit.layers, W8)), rel=0.5, abs=1e-6)
        assert eight < 0.05 * coarse


def test_the_recipes_own_rounder_is_what_is_measured(tiny_llama):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    own = _units(skeleton, (W4,), (W4,))
    ids = _ids(samples=16, length=64)
    nearest = measure(own, NEAREST, skeleton, ids=ids, progress=_quiet)
    better = measure(own, GPTQ(name="gptq"), skeleton, ids=ids, progress=_quiet)
    assert sum(kl for (kl,) in better.values()) < 0.8 * sum(kl for (kl,) in nearest.values())


def test_experts_are_measured_together_and_one_without_tokens_does_no_harm(tiny_model):
    folder, ids = tiny_model("mixtral"), _ids(samples=1, length=4)
    skeleton = Skeleton(CheckpointReader(folder))
    own = _units(skeleton, (W4, W8), (W4,))
    found = measure(own, GPTQ(name="gptq"), skeleton, ids=ids, progress=_quiet)
    assert len(found) == 8
    assert all(0 <= eight <= four < 1 for four, eight in found.values())


def test_the_weights_are_whole_again_afterwards_and_the_figures_the_same_twice(tiny_llama):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    own = _units(skeleton, (W4, W8), (W4,))
    first, second = (measure(own, NEAREST, skeleton, ids=_ids(), progress=_quiet) for _ in range(2))
    assert first == second


def test_states_that_would_not_fit_in_memory_are_measured_on_fewer_tokens(tiny_llama, monkeypatch):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    ids = _ids(samples=8, length=64)
    told: list[str] = []
    monkeypatch.setattr(sensitivity, "_STATES_BYTES", 4 * 64 * 9 * 32)  # eight units and the base, 32 tokens each
    own = _units(skeleton, (W4,), (W4,))
    less = measure(own, NEAREST, skeleton, ids=ids, progress=told.append)
    assert less == measure(own, NEAREST, skeleton, ids=ids[-1:, :32], progress=_quiet)
    assert told == [f"sensitivity of model.layers.{index}" for index in range(2)] + ["sensitivity: divergence"]


def test_the_option_to_measure_is_the_costliest_that_the_average_allows_one_for_each_kind_of_activations():
    options, costs = (W8, W4, W4_FINE, W8A8), (8.03, 4.25, 4.5, 8.03)
    assert measured_options(options, costs, 4.78) == (W4_FINE, W8A8)
    assert measured_options(options, costs, 4.3) == (W4, W8A8)
    assert measured_options(options, costs, 3.0) == (W4, W8A8)
