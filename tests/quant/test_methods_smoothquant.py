"""SmoothQuant against its formula, written out in float64, and what must not change by it."""

import numpy as np
import pytest
import torch

from narrowgauge.quant.formats.rounding import round_activations
from narrowgauge.quant.formats.scheme import ActivationScheme, WeightScheme
from narrowgauge.quant.methods.base import InputStatistics
from narrowgauge.quant.methods.smoothquant import SmoothQuant
from narrowgauge.quant.observers import find_scales, nearest_values

W8 = WeightScheme(bits=8)


def _seen(x: torch.Tensor) -> InputStatistics:
    return InputStatistics(hessian=None, tokens=len(x), absmax=x.abs().amax(0), absmean=x.abs().mean(0))


def _inputs(tokens: int = 200, columns: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(tokens, columns, generator=generator) * torch.exp(
        1.5 * torch.randn(columns, generator=generator)
    )


def _weights(columns: int = 96) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(rows, columns, generator=generator) / 10 for rows in (32, 16)]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_scales_are_those_of_the_formula_over_all_linears_that_share_the_input(alpha):
    x, weights = _inputs(), _weights()
    smoothing = SmoothQuant(name="smoothquant", alpha=alpha).smooth(weights, W8, _seen(x))
    spread = np.abs(x.double().numpy()).max(0)
    reach = np.abs(torch.cat(weights).double().numpy()).max(0)
    np.testing.assert_allclose(smoothing.scales.numpy(), spread**alpha / reach ** (1 - alpha), rtol=1e-5)
    assert smoothing.note is None


def test_inputs_with_a_few_large_channels_lose_less_when_smoothed():
    x, weights = torch.randn(200, 96, generator=torch.Generator().manual_seed(8)), _weights()
    x[:, :4] *= 100
    scales = SmoothQuant(name="smoothquant").smooth(weights, W8, _seen(x)).scales
    tokenwise, exact = ActivationScheme(bits=8, type="int"), x @ torch.cat(weights).t()

    def lost(inputs: torch.Tensor, stacked: torch.Tensor) -> float:
        rounded = nearest_values(stacked, W8, find_scales([stacked], W8)[0])
        return float((round_activations(inputs, tokenwise) @ rounded.t() - exact).norm() / exact.norm())

    assert lost(x / scales, torch.cat(weights) * scales) < 0.7 * lost(x, torch.cat(weights))


def test_dead_channels_keep_scale_1_and_the_output_stays():
    x, weights = _inputs(), _weights()
    x[:, 3] = 0
    for weight in weights:
        weight[:, 7] = 0
    scales = SmoothQuant(name="smoothquant").smooth(weights, W8, _seen(x)).scales
    assert scales[3] == 1
    assert scales[7] == 1
    assert bool((torch.isfinite(scales) & (scales > 0)).all())
    for weight in weights:
        torch.testing.assert_close((x / scales) @ (weight * scales).t(), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_scales_stay_within_bounds_for_channels_that_are_all_but_dead():
    x, weights = _inputs(), _weights()
    x[:, 3] = 1e-38
    for weight in weights:
        weight[:, 7] = 1e-38
    scales = SmoothQuant(name="smoothquant").smooth(weights, W8, _seen(x)).scales
    assert float(scales.min()) == pytest.approx(1e-5)
    assert float(scales.max()) == pytest.approx(1e5)


@pytest.mark.parametrize(
    ("x", "weight", "note"),
    [
        (torch.zeros(0, 4), torch.ones(2, 4), "no calibration token"),
        (torch.zeros(5, 4), torch.ones(2, 4), "zero"),
        (torch.ones(5, 4), torch.zeros(2, 4), "zero"),
        (torch.full((5, 4), float("inf")), torch.ones(2, 4), "NaN or infinity"),
        (torch.ones(5, 4), torch.full((2, 4), float("nan")), "NaN or infinity"),
    ],
)
def test_what_cannot_be_smoothed_stays_as_it_is_and_says_why(x, weight, note):
    absmax = x.abs().amax(0) if len(x) else torch.zeros(4)
    inputs = InputStatistics(hessian=None, tokens=len(x), absmax=absmax, absmean=absmax)
    smoothing = SmoothQuant(name="smoothquant").smooth([weight], W8, inputs)
    assert smoothing.scales is None
    assert note in smoothing.note


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="alpha: must be between"):
        SmoothQuant(name="smoothquant", alpha=1.2)
    with pytest.raises(ValueError, match="sites: name at least one"):
        SmoothQuant(name="smoothquant", sites=())
