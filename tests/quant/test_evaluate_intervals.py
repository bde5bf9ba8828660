"""Intervals over windows: scipy's for equal windows, and covering the truth as often as they claim."""

import numpy as np
import pytest
import scipy.stats
import torch

from narrowgauge.quant.evaluate.intervals import over_windows


def test_windows_of_one_size_give_scipys_interval_of_the_mean_of_their_means():
    values = torch.rand(6 * 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    means = values.view(6, 50).mean(1).numpy()
    low, high = scipy.stats.t.interval(0.95, 5, loc=means.mean(), scale=scipy.stats.sem(means))
    found = over_windows(values, [50] * 6)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_it_covers_the_true_mean_though_tokens_of_a_window_depend_on_one_another():
    random = np.random.default_rng(2)
    covered, counts = 0, [40, 50, 50, 60, 50, 50, 50, 45, 55, 50]
    for _ in range(400):
        values = np.concatenate([random.normal(random.normal(1.0, 0.5), 1.0, count) for count in counts])
        found = over_windows(torch.tensor(values), counts)
        covered += found.low <= 1.0 <= found.high
    assert 0.92 < covered / 400 < 0.98


@pytest.mark.parametrize(("values", "counts"), [([1.0, 2.0], [2]), ([1.0, float("nan")], [1, 1])])
def test_one_window_or_a_value_that_is_not_finite_has_no_interval(values, counts):
    assert over_windows(torch.tensor(values), counts) is None
