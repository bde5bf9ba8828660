"""AWQ against a literal search on the inputs themselves, and what it must never do."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.awq import AWQ
from narrowgauge.quant.methods.base import InputStatistics
from narrowgauge.quant.methods.gptq import GPTQ
from narrowgauge.quant.methods.rtn import RTN
from narrowgauge.quant.observers import round_to_nearest

W4 = WeightScheme(bits=4, group=32)
METHOD = AWQ(name="awq")


def _inputs(tokens: int, columns: int, seed: int = 13) -> torch.Tensor:
    """Channels of very different size, the same whatever the seed."""
    gains = torch.exp(torch.randn(columns, generator=torch.Generator().manual_seed(99)))
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)) * gains


def _weight(rows: int, columns: int, seed: int = 14) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _seen(x: torch.Tensor, heldout: torch.Tensor | None = None) -> InputStatistics:
    return InputStatistics(
        hessian=x.t() @ x,
        tokens=len(x),
        absmax=x.abs().amax(0),
        absmean=x.abs().mean(0),
        heldout=None if heldout is None else heldout.t() @ heldout,
    )


def _lost(weights: list[torch.Tensor], x: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme = W4) -> float:
    """‖x Wᵀ - (x / s) round(W s)ᵀ‖² by running x through."""
    total = 0.0
    for weight in weights:
        rounded = dequantize_weight(round_to_nearest(weight * scales, scheme), torch.float32)
        total += float(((x / scales) @ rounded.t() - x @ weight.t()).square().sum())
    return total


def _literal(weights: list[torch.Tensor], x: torch.Tensor, grid: int) -> torch.Tensor:
    """The best of all candidates, each run: half of them mean|x|^r, half over size^(1 - r), and no scales at all."""
    stacked = torch.cat(weights)
    largest = stacked.view(len(stacked), -1, 32).abs().amax(-1).repeat_interleave(32, dim=1)
    size, salience = (stacked.abs() / (largest + 1e-6)).mean(0), x.abs().mean(0)
    half = grid // 2
    tried = [torch.ones(x.shape[1])]
    tried += [salience**r / (size ** (1 - r) + 1e-4) for r in torch.linspace(0, 1, half)]
    tried += [salience**r for r in torch.linspace(0, 1, half + 1)[1:]]
    tried = [s / (s.max() * s.min()).sqrt() for s in tried]
    return min(tried, key=lambda s: _lost(weights, x, s))


def test_scales_are_the_best_of_a_literal_search():
    x, weights = _inputs(500, 128), [_weight(24, 128), _weight(16, 128, seed=15)]
    smoothing = METHOD.smooth(weights, W4, _seen(x))
    torch.testing.assert_close(smoothing.scales, _literal(weights, x, 20), rtol=1e-4, atol=1e-6)
    assert _lost(weights, x, smoothing.scales) < 0.8 * _lost(weights, x, torch.ones(128))
    assert smoothing.note is None


@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(bits=4, group=32, symmetric=False),
        WeightScheme(bits=3),
        WeightScheme(bits=8, per_tensor=True),
        WeightScheme(bits=8, type="float", block=(128, 128)),
    ],
)
def test_scales_of_every_scheme_lose_less_or_are_left_out(scheme):
    x, other, weights = _inputs(500, 128), _inputs(300, 128, seed=16), [_weight(40, 128), _weight(16, 128, seed=15)]
    smoothing = METHOD.smooth(weights, scheme, _seen(x, other))
    if smoothing.scales is None:
        assert smoothing.note is not None
        return
    rounded = RTN(name="rtn").round([w * smoothing.scales for w in weights], scheme, None)
    plain = RTN(name="rtn").round(weights, scheme, None)

    def lost(parts, scales):
        values = [dequantize_weight(part.weight, torch.float32) / scales for part in parts]
        return sum(float((other @ (v - w).t()).square().sum()) for v, w in zip(values, weights, strict=True))

    assert lost(rounded, smoothing.scales) < lost(plain, torch.ones(128))


def test_a_search_over_many_rows_looks_at_some_and_still_wins():
    x, weights = _inputs(300, 64), [_weight(3000, 64), _weight(500, 64, seed=15)]
    scales = METHOD.smooth(weights, W4, _seen(x)).scales
    best = _literal(weights, x, 20)
    assert _lost(weights, x, scales) < 1.02 * _lost(weights, x, best)


def test_scales_that_lose_more_on_samples_held_out_are_refused():
    x = _inputs(500, 128)
    contrary = _inputs(300, 128, seed=16) / x.square().mean(0)  # what is large in calibration is small here
    smoothing = METHOD.smooth([_weight(24, 128)], W4, _seen(x, contrary))
    assert smoothing.scales is None
    assert "held out" in smoothing.note
    assert METHOD.smooth([_weight(24, 128)], W4, _seen(x, _inputs(300, 128, seed=16))).scales is not None


def _lost_by_gptq(weight: torch.Tensor, scales: torch.Tensor, seen: torch.Tensor, fresh: torch.Tensor) -> float:
    """‖x(W - Q)ᵀ‖² on fresh inputs, Q by GPTQ on what it has seen of the scaled inputs, by running them through."""
    statistics = _seen(seen / scales)
    rounded = GPTQ(name="gptq").round(
        [weight * scales], W4, statistics, limits=METHOD.limits([weight * scales], W4, statistics)
    )
    value = dequantize_weight(rounded[0].weight, torch.float32) / scales
    return float((fresh @ (weight - value).t()).square().sum())


@pytest.mark.parametrize("seed", range(6))
def test_what_the_rounder_makes_of_the_scales_decides(seed):
    weight, seen, fresh = _weight(24, 64, seed), _inputs(256, 64, seed), _inputs(256, 64, seed + 100)
    inputs = dataclasses.replace(_seen(seen), heldout=fresh.t() @ fresh)
    alone = METHOD.smooth([weight], W4, inputs).scales
    chosen = METHOD.smooth([weight], W4, inputs, rounder=GPTQ(name="gptq"))
    assert alone is not None
    lost = {
        name: METHOD._lost_by(GPTQ(name="gptq"), [weight], W4, scales=scales, inputs=inputs, hessian=inputs.heldout)
        for name, scales in {"none": torch.ones(64), "best": alone, "milder": alone.sqrt()}.items()
    }
    wanted = {"none": None, "best": alone, "milder": alone.sqrt()}[min(lost, key=lost.__getitem__)]
    assert (chosen.scales is None) == (wanted is None)
    if wanted is None:
        assert chosen.note == "gptq loses less without scales on samples held out"
    else:
        torch.testing.assert_close(chosen.scales, wanted)
    unchecked = dataclasses.replace(inputs, heldout=None)
    loss = METHOD._lost_by(GPTQ(name="gptq"), [weight], W4, scales=alone, inputs=unchecked, hessian=inputs.heldout)
    assert loss == pytest.approx(_lost_by_gptq(weight, alone, seen, fresh), rel=1e-3)


def test_dead_channels_and_groups_of_zeros_keep_scale_1_and_the_output_stays():
    x, weight = _inputs(500, 128), _weight(24, 128)
    x[:, 5] = 0
    weight[:, 32:64] = 0
    weight[:, 9] = 0
    scales = METHOD.smooth([weight], W4, _seen(x)).scales
    assert scales[5] == 1
    assert scales[9] == 1
    assert bool((scales[32:64] == 1).all())
    assert bool((torch.isfinite(scales) & (scales > 0)).all())
    torch.testing.assert_close((x / scales) @ (weight * scales).t(), x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"tokens": 0}, "no calibration token"),
        ({"hessian": None}, "no calibration token"),
        ({"hessian": torch.full((64, 64), float("nan"))}, "NaN or infinity"),
        ({"hessian": torch.zeros(64, 64)}, "inputs are zero"),
    ],
)
def test_inputs_that_say_nothing_leave_the_weights_alone_and_say_why(change, note):
    inputs = dataclasses.replace(_seen(_inputs(50, 64)), **change)
    smoothing = METHOD.smooth([_weight(8, 64)], W4, inputs)
    assert smoothing.scales is None
    assert note in smoothing.note
    assert METHOD.limits([_weight(8, 64)], W4, inputs) is None


def test_weights_with_nan_and_weights_of_zeros_are_left_alone():
    inputs, broken = _seen(_inputs(50, 64)), _weight(8, 64)
    broken[2, 3] = float("nan")
    assert "NaN or infinity" in METHOD.smooth([_weight(8, 64), broken], W4, inputs).note
    assert METHOD.smooth([torch.zeros(8, 64)], W4, inputs).scales is None


def test_one_calibration_sample_is_used_unchecked():
    x, weight = _inputs(1, 64), _weight(8, 64)
    heldout = dataclasses.replace(_seen(x), heldout=torch.zeros(64, 64))
    for inputs in (_seen(x), heldout):
        smoothing = METHOD.smooth([weight], W4, inputs)
        assert smoothing.scales is None or _lost([weight], x, smoothing.scales) < _lost([weight], x, torch.ones(64))


def test_limits_lose_less_than_whole_ranges_on_fresh_samples():
    x, other, fresh = (_inputs(600, 128, seed=seed) for seed in (1, 2, 3))
    weights = [_weight(40, 128), _weight(16, 128, seed=15)]
    limits = METHOD.limits(weights, W4, _seen(x, other))
    for weight, limit in zip(weights, limits, strict=True):
        clipped = dequantize_weight(round_to_nearest(weight, W4, limits=limit), torch.float32)
        whole = dequantize_weight(round_to_nearest(weight, W4), torch.float32)
        assert (fresh @ (clipped - weight).t()).norm() < 0.97 * (fresh @ (whole - weight).t()).norm()
    assert AWQ(name="awq", clip=False).limits(weights, W4, _seen(x, other)) is None
    assert METHOD.limits(weights, WeightScheme(bits=8, per_tensor=True), _seen(x, other)) is None


@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([1, 15, 17]),
    columns=st.integers(1, 16).map(lambda n: 32 * n),
    symmetric=st.booleans(),
    tokens=st.sampled_from([1, 30, 300]),
    seed=st.integers(0, 99),
)
def test_any_shape_gives_finite_scales_above_zero_that_lose_less_or_none(rows, columns, symmetric, tokens, seed):
    scheme = WeightScheme(bits=4, group=32, symmetric=symmetric)
    x, weight = _inputs(tokens, columns, seed), _weight(rows, columns, seed)
    smoothing = METHOD.smooth([weight], scheme, _seen(x))
    if smoothing.scales is None:
        assert smoothing.note is not None
        return
    assert bool((torch.isfinite(smoothing.scales) & (smoothing.scales > 0)).all())
    plain = _lost([weight], x, torch.ones(columns), scheme)
    assert _lost([weight], x, smoothing.scales, scheme) < 1.001 * plain


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="grid: must be at least 2"):
        AWQ(name="awq", grid=1)
    with pytest.raises(ValueError, match="sites: name at least one"):
        AWQ(name="awq", sites=(), clip=False)
