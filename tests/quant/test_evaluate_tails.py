"""Streamed statistics: those of scipy and numpy on all values at once."""

import numpy as np
import pytest
import scipy.stats
import torch

from narrowgauge.quant.evaluate.tails import Tails, TwoHistograms


def _streamed(values, parts=7):
    tails = Tails()
    for part in torch.tensor_split(values, parts):
        tails.add(part)
    return tails


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("degrees", [3, 100])
def test_kurtosis_is_scipys(offset, degrees):
    values = torch.tensor(scipy.stats.t(degrees).rvs(20_000, random_state=1) + offset, dtype=torch.float32)
    expected = scipy.stats.kurtosis(values.double().numpy())
    assert _streamed(values).kurtosis == pytest.approx(expected, rel=1e-6)


def test_the_spike_is_the_largest_magnitude_over_the_median():
    torch.manual_seed(0)
    values = torch.randn(9_999) ** 3 * 1e-4
    values[17] = -250.0
    expected = 250.0 / np.median(values.abs().numpy())
    assert _streamed(values).spike == pytest.approx(expected, rel=0.004)


def test_values_without_spread_have_no_tails():
    constant = _streamed(torch.full((100,), 3.0))
    assert constant.kurtosis == 0
    assert constant.spike == pytest.approx(1, rel=0.004)
    assert _streamed(torch.zeros(100)).spike is None


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_divergence_of_two_histograms_is_scipys_entropy_over_the_same_bins(shift):
    torch.manual_seed(0)
    first, second = torch.randn(8, 5_000), torch.randn(6, 5_000) + shift
    both = TwoHistograms(bins=64)
    for part in first:
        both.add(part)
    for part in second:
        both.add(part, second=True)
    edges = both.edges.numpy()
    assert len(edges) == 63
    p, q = (
        np.bincount(np.searchsorted(edges, values.numpy().ravel(), side="left"), minlength=64) + 0.5
        for values in (first, second)
    )
    assert both.divergence == pytest.approx(scipy.stats.entropy(p, q), rel=1e-6)
    assert p.max() / p.min() < 2.5, "bins hold about equal shares of the first stream"


def test_a_bin_that_the_second_never_reaches_gives_no_infinity_and_an_empty_stream_nothing():
    both = TwoHistograms()
    both.add(torch.randn(1000))
    assert both.divergence is None
    both.add(torch.full((1000,), 9.0), second=True)
    assert 1 < both.divergence < 20
