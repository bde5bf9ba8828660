"""GPTQ against its definition: a slow, literal transcription of the paper, and properties that need no second program."""

import numpy as np
import pytest
import scipy.linalg
import torch

from narrowgauge.quant.formats.base import QuantizedWeight, dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics
from narrowgauge.quant.methods.gptq import GPTQ
from narrowgauge.quant.observers import WeightNotFinite, round_to_nearest

W4 = WeightScheme(bits=4, group=32)


def _correlated(tokens: int, columns: int, seed: int = 0) -> InputStatistics:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ (mixing + 0.3 * torch.eye(columns))
    return InputStatistics(hessian=x.t() @ x, tokens=tokens, absmax=x.abs().amax(0), absmean=x.abs().mean(0))


def _seen(hessian: torch.Tensor, tokens: int) -> InputStatistics:
    nothing = torch.zeros(len(hessian))
    return InputStatistics(hessian=hessian, tokens=tokens, absmax=nothing, absmean=nothing)


def _weight(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _loss(weight: torch.Tensor, quantized: QuantizedWeight, inputs: InputStatistics) -> float:
    difference = weight.float() - dequantize_weight(quantized, torch.float32)
    return float(((difference @ inputs.hessian) * difference).sum())


def _literal(weight: torch.Tensor, inputs: InputStatistics, scheme: WeightScheme, damping: float) -> np.ndarray:
    """Optimal brain quantization one column at a time in float64: the rest takes w -= err * Hinv[:, i] / Hinv[i, i]."""
    hessian = inputs.hessian.double().numpy()
    order = np.argsort(-hessian.diagonal(), kind="stable")
    work, nearest = weight.double().numpy().copy(), round_to_nearest(weight, scheme)
    scales = nearest.scales.double().repeat_interleave(scheme.group or weight.shape[1], dim=1).numpy()
    damped = hessian + damping * hessian.diagonal().mean() * np.eye(len(hessian))
    codes = np.zeros_like(work)
    for position, column in enumerate(order):
        rest = order[position:]
        inverse = scipy.linalg.inv(damped[np.ix_(rest, rest)])
        codes[:, column] = np.clip(np.round(work[:, column] / scales[:, column]), scheme.qmin, scheme.qmax)
        error = (work[:, column] - codes[:, column] * scales[:, column]) / inverse[0, 0]
        work[:, rest] -= np.outer(error, inverse[0])
    return codes


@pytest.mark.parametrize("block", [7, 128])
def test_codes_are_those_of_a_literal_column_by_column_computation(block):
    weight, inputs = _weight(24, 96), _correlated(400, 96)
    ours = GPTQ(name="gptq", block=block).round([weight], W4, inputs)[0].weight.codes.numpy()
    theirs = _literal(weight, inputs, W4, damping=0.01)
    # A column within float32 of a rounding boundary may go the other way and move its row's later columns.
    assert (ours != theirs).mean() < 0.01


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("order", ["static", "none"])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 64), (4, None), (8, 32)])
def test_the_loss_is_below_that_of_rounding_to_nearest(bits, group, order, symmetric):
    weight, inputs = _weight(48, 192), _correlated(1000, 192)
    scheme = WeightScheme(bits=bits, group=group, symmetric=symmetric)
    ours = GPTQ(name="gptq", order=order).round([weight], scheme, inputs)[0]
    assert ours.fallback is None
    assert _loss(weight, ours.weight, inputs) < 0.8 * _loss(weight, round_to_nearest(weight, scheme), inputs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_uncorrelated_inputs_give_exactly_round_to_nearest(symmetric):
    weight, scheme = _weight(16, 160), WeightScheme(bits=4, group=32, symmetric=symmetric)
    diagonal = torch.rand(160, generator=torch.Generator().manual_seed(5)) + 0.1
    ours = GPTQ(name="gptq").round([weight], scheme, _seen(torch.diag(diagonal), 10))[0].weight
    nearest = round_to_nearest(weight, scheme)
    assert torch.equal(ours.codes, nearest.codes)
    assert torch.equal(ours.scales, nearest.scales)
    assert symmetric or torch.equal(ours.zeros, nearest.zeros)


def test_stacked_weights_get_the_codes_they_get_alone():
    inputs = _correlated(500, 64)
    weights = [_weight(rows, 64, seed=rows) for rows in (16, 8, 8)]
    together = GPTQ(name="gptq").round(weights, W4, inputs)
    for weight, rounded in zip(weights, together, strict=True):
        alone = GPTQ(name="gptq").round([weight], W4, inputs)[0].weight
        assert (rounded.weight.codes != alone.codes).float().mean() < 0.01
        assert torch.equal(rounded.weight.scales, alone.scales)


def test_a_column_that_no_token_excited_is_rounded_to_nearest():
    weight, inputs = _weight(16, 64), _correlated(500, 64)
    dead = [0, 17, 63]
    inputs.hessian[dead] = 0
    inputs.hessian[:, dead] = 0
    rounded = GPTQ(name="gptq").round([weight], W4, inputs)[0]
    assert rounded.fallback is None
    assert torch.equal(rounded.weight.codes[:, dead], round_to_nearest(weight, W4).codes[:, dead])


@pytest.mark.parametrize("tokens", [1, 5])
def test_fewer_tokens_than_columns_still_work(tokens):
    weight, inputs = _weight(16, 64), _correlated(tokens, 64)
    rounded = GPTQ(name="gptq").round([weight], W4, inputs)[0]
    assert rounded.fallback is None
    assert _loss(weight, rounded.weight, inputs) <= _loss(weight, round_to_nearest(weight, W4), inputs)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (None, "no calibration token"),
        (_seen(torch.zeros(64, 64), 0), "no calibration token"),
        (_seen(torch.zeros(64, 64), 9), "inputs are zero"),
        (_seen(torch.full((64, 64), float("nan")), 9), "NaN or infinity"),
        (_seen(torch.eye(64) - 3 * torch.ones(64, 64) / 64, 9), "not positive definite"),
    ],
)
def test_inputs_that_cannot_be_used_fall_back_to_nearest_and_say_why(inputs, reason):
    weight = _weight(16, 64)
    rounded = GPTQ(name="gptq").round([weight], W4, inputs)[0]
    assert reason in rounded.fallback
    assert torch.equal(rounded.weight.codes, round_to_nearest(weight, W4).codes)


def test_a_weight_with_nan_is_refused():
    weight = _weight(16, 64)
    weight[3, 3] = float("nan")
    with pytest.raises(WeightNotFinite):
        GPTQ(name="gptq").round([weight], W4, _correlated(100, 64))


@pytest.mark.parametrize("options", [{"block": 0}, {"damping": 0.0}, {"damping": 2.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        GPTQ(name="gptq", **options)
