"""GPTQ against its definition: a slow, literal transcription of the paper, and properties that need no second program."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.quant.formats.base import QuantizedWeight, dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics
from narrowgauge.quant.methods.gptq import GPTQ
from narrowgauge.quant.methods.rtn import RTN
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


def _literal_order(diagonal: np.ndarray, order: str, group: int) -> np.ndarray:
    """Columns by falling diagonal; or groups by their largest, and columns so within each; or as they stand."""
    if order == "none":
        return np.arange(len(diagonal))
    if order == "static":
        return np.argsort(-diagonal, kind="stable")
    groups = sorted(range(0, len(diagonal), group), key=lambda start: -diagonal[start : start + group].max())
    return np.concatenate([start + np.argsort(-diagonal[start : start + group], kind="stable") for start in groups])


def _literal(
    weight: torch.Tensor, inputs: InputStatistics, scheme: WeightScheme, *, damping: float, how: str = "static"
) -> np.ndarray:
    """Optimal brain quantization one column at a time in float64: the rest takes w -= err * Hinv[:, i] / Hinv[i, i]."""
    hessian = inputs.hessian.double().numpy()
    order = _literal_order(hessian.diagonal(), how, scheme.group or weight.shape[1])
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


@pytest.mark.parametrize(("block", "order"), [(7, "static"), (128, "static"), (128, "group"), (40, "none")])
def test_codes_are_those_of_a_literal_column_by_column_computation(block, order):
    weight, inputs = _weight(24, 96), _correlated(400, 96)
    method = GPTQ(name="gptq", block=block, order=order, search="none")
    ours = method.round([weight], W4, inputs)[0].weight.codes.numpy()
    theirs = _literal(weight, inputs, W4, damping=0.01, how=order)
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
    ours = GPTQ(name="gptq", search="none").round([weight], scheme, _seen(torch.diag(diagonal), 10))[0].weight
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
    rounded = GPTQ(name="gptq", search="none").round([weight], W4, inputs)[0]
    assert rounded.fallback is None
    assert torch.equal(rounded.weight.codes[:, dead], round_to_nearest(weight, W4).codes[:, dead])


SCHEMES = [
    WeightScheme(bits=4, group=32),
    WeightScheme(bits=4, group=64, symmetric=False),
    WeightScheme(bits=3),
    WeightScheme(bits=8, per_tensor=True),
    WeightScheme(bits=8, per_tensor=True, symmetric=False),
    WeightScheme(bits=8, type="float"),
    WeightScheme(bits=8, type="float", per_tensor=True),
    WeightScheme(bits=8, type="float", block=(128, 128)),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_loses_less_than_rounding_to_nearest_and_keeps_its_layout(scheme):
    weights, inputs = [_weight(48, 192), 2 * _weight(40, 192, seed=2)], _correlated(1000, 192)
    ours = GPTQ(name="gptq").round(weights, scheme, inputs)
    nearest = RTN(name="rtn").round(weights, scheme, None)
    for weight, one, other in zip(weights, ours, nearest, strict=True):
        assert one.fallback is None
        assert one.weight.scales.shape == other.weight.scales.shape
        assert one.weight.codes.dtype == other.weight.codes.dtype
        assert one.weight.block == other.weight.block
        assert one.weight.codes.is_contiguous()
        assert _loss(weight, one.weight, inputs) < 0.7 * _loss(weight, other.weight, inputs)
    assert not scheme.per_tensor or torch.equal(ours[0].weight.scales, ours[1].weight.scales)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[2]])
def test_ranges_chosen_by_the_output_lose_less_than_whole_ones(scheme):
    weight, inputs = _weight(64, 256), _correlated(2000, 256)

    def lost(search):
        return _loss(weight, GPTQ(name="gptq", search=search).round([weight], scheme, inputs)[0].weight, inputs)

    assert lost("output") < 0.97 * lost("none")
    assert lost("mse") < lost("none")


def test_limits_from_outside_are_kept_whatever_the_search():
    weight, inputs = _weight(16, 64), _correlated(500, 64)
    limit = torch.full((16, 2), 0.5)
    for search in ("none", "output"):
        rounded = GPTQ(name="gptq", search=search).round([weight], W4, inputs, limits=[limit])[0].weight
        torch.testing.assert_close(rounded.scales.float(), limit / 7.5, rtol=1e-2, atol=0)
        assert rounded.codes.abs().max() == 8


@pytest.mark.parametrize("tokens", [1, 5])
def test_fewer_tokens_than_columns_still_work(tokens):
    weight, inputs = _weight(16, 64), _correlated(tokens, 64)
    rounded = GPTQ(name="gptq").round([weight], W4, inputs)[0]
    assert rounded.fallback is None
    assert _loss(weight, rounded.weight, inputs) <= _loss(weight, round_to_nearest(weight, W4), inputs)


def test_the_second_of_two_equal_columns_makes_up_for_the_first():
    generator = torch.Generator().manual_seed(7)
    half = torch.randn(4000, 64, generator=generator)
    x = torch.cat([half, half], dim=1)
    weight, inputs = _weight(32, 128), _seen(x.t() @ x, 4000)
    rounded = GPTQ(name="gptq", search="none").round([weight], W4, inputs)[0]
    assert rounded.fallback is None
    # Only the sum of a pair's errors reaches the output: one rounding error is left of two.
    ratio = _loss(weight, rounded.weight, inputs) / _loss(weight, round_to_nearest(weight, W4), inputs)
    assert ratio == pytest.approx(0.5, abs=0.05)


def test_a_hessian_that_single_precision_cannot_factorize_takes_what_it_needs_and_says_so():
    weight = _weight(16, 64)
    eye = torch.eye(64)
    indefinite = eye - 1.05 * torch.ones(64, 64) / 64  # one eigenvalue is -0.05: damping of 0.01 is too little
    rounded = GPTQ(name="gptq").round([weight], W4, _seen(indefinite, 9))[0]
    assert rounded.fallback == "H took 10 times the damping to factorize"
    assert not torch.equal(rounded.weight.codes, round_to_nearest(weight, W4).codes)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (None, "no calibration token"),
        (_seen(torch.zeros(64, 64), 0), "no calibration token"),
        (_seen(torch.zeros(64, 64), 9), "inputs are zero"),
        (_seen(torch.full((64, 64), float("nan")), 9), "NaN or infinity"),
        (_seen(torch.full((64, 64), float("inf")), 9), "NaN or infinity"),
        (_seen(torch.eye(64) - 3 * torch.ones(64, 64) / 64, 9), "not positive definite"),
    ],
)
def test_inputs_that_cannot_be_used_fall_back_to_nearest_and_say_why(inputs, reason):
    weight = _weight(16, 64)
    rounded = GPTQ(name="gptq", search="none").round([weight], W4, inputs)[0]
    assert reason in rounded.fallback
    assert torch.equal(rounded.weight.codes, round_to_nearest(weight, W4).codes)
    searched = GPTQ(name="gptq").round([weight], W4, inputs)[0]
    assert torch.equal(searched.weight.codes, round_to_nearest(weight, W4, search="mse").codes)


def test_the_same_inputs_give_the_same_bits():
    weight, inputs = _weight(64, 256), _correlated(800, 256)
    first, second = (GPTQ(name="gptq").round([weight], W4, inputs)[0].weight for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scales, second.scales)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 15, 17]),
    columns=st.integers(1, 16).map(lambda n: 32 * n),
    scheme=st.sampled_from([scheme for scheme in SCHEMES if scheme.group in (None, 32)]),
    order=st.sampled_from(["static", "group", "none"]),
    block=st.sampled_from([1, 24, 128]),
    tokens=st.sampled_from([1, 40, 600]),
    dead=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_gives_codes_of_the_scheme_and_no_more_loss_than_nearest(
    rows, columns, scheme, order, block, tokens, dead, seed
):
    weight, inputs = _weight(rows, columns, seed), _correlated(tokens, columns, seed)
    if dead:
        weight[:, :32] = 0
        inputs.hessian[5] = inputs.hessian[:, 5] = 0
    rounded = GPTQ(name="gptq", order=order, block=block).round([weight], scheme, inputs)[0].weight
    codes = rounded.codes.float()
    assert codes.shape == weight.shape
    assert bool(torch.isfinite(codes).all())
    if scheme.type == "int":
        assert scheme.qmin <= int(codes.min()) <= int(codes.max()) <= scheme.qmax
    assert bool((torch.isfinite(rounded.scales) & (rounded.scales > 0)).all())
    nearest = _loss(weight, round_to_nearest(weight, scheme), inputs)
    assert _loss(weight, rounded, inputs) <= 1.05 * nearest + 1e-6 * float(inputs.hessian.trace())


def test_a_weight_with_nan_is_refused():
    weight = _weight(16, 64)
    weight[3, 3] = float("nan")
    for inputs in (None, _correlated(100, 64)):
        with pytest.raises(WeightNotFinite):
            GPTQ(name="gptq").round([weight], W4, inputs)


@pytest.mark.parametrize("options", [{"block": 0}, {"damping": 0.0}, {"damping": 2.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        GPTQ(name="gptq", **options)
