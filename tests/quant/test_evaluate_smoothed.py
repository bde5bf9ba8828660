"""Scales that smoothing left in weights are found again, and none where there was only rounding."""

import pytest
import torch

from narrowgauge.quant.evaluate.smoothed import fit_scales


def _rounded(weight, bits):
    scale = weight.abs().amax(1, keepdim=True) / (2**bits - 1) * 2
    return (weight / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


@pytest.fixture
def world():
    torch.manual_seed(0)
    return torch.randn(96, 160), (torch.randn(160) * 0.4).exp(), (torch.randn(96) * 0.3).exp()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_alone_leaves_no_scales(world, bits):
    weight, *_ = world
    found = fit_scales(weight, _rounded(weight, bits))
    assert torch.equal(found.rows, torch.ones(96))
    assert torch.equal(found.columns, torch.ones(160))


@pytest.mark.parametrize(("bits", "error"), [(4, 0.06), (8, 0.004)])
def test_scales_of_input_channels_are_found(world, bits, error):
    weight, columns, _ = world
    found = fit_scales(weight, _rounded(weight * columns, bits))
    assert torch.equal(found.rows, torch.ones(96))
    assert ((found.columns / columns - 1).norm() / 160**0.5) < error


def test_scales_of_output_channels_are_found(world):
    weight, _, rows = world
    found = fit_scales(weight, _rounded(weight * rows[:, None], 8))
    assert torch.equal(found.columns, torch.ones(160))
    assert ((found.rows / rows - 1).norm() / 96**0.5) < 0.004


def test_of_both_at_once_outputs_settle_the_common_factor(world):
    weight, columns, rows = world
    found = fit_scales(weight, _rounded(weight * rows[:, None] * columns, 8))
    torch.testing.assert_close(found.apply(weight), weight * rows[:, None] * columns, rtol=0.05, atol=0.02)
    x = torch.randn(40, 160)
    settled = found.settled(x @ weight.t(), x @ weight.t() * rows)
    assert ((settled.rows / rows - 1).norm() / 96**0.5) < 0.01
    torch.testing.assert_close(settled.apply(weight), found.apply(weight))


def test_a_column_of_zeros_has_the_scale_one(world):
    weight, columns, _ = world
    weight[:, 5] = 0
    assert fit_scales(weight, _rounded(weight * columns, 8)).columns[5] == 1
