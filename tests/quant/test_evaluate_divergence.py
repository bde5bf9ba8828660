"""KL and its companions, compared with torch's and scipy's own on random logits."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from narrowgauge.quant.evaluate import perplexity as chunks
from narrowgauge.quant.evaluate.divergence import compare, join, summarize
from narrowgauge.quant.evaluate.perplexity import token_losses

WINDOWS, LENGTH, VOCABULARY = 3, 21, 101


@pytest.fixture
def world():
    torch.manual_seed(0)
    base = torch.randn(WINDOWS, LENGTH, VOCABULARY) * 3
    candidate = base + torch.randn(WINDOWS, LENGTH, VOCABULARY) * 0.7
    return base, candidate, torch.randint(VOCABULARY, (WINDOWS, LENGTH))


def _rows(logits):
    return logits[:, :-1].reshape(-1, logits.shape[-1])


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 4 * VOCABULARY, 2 << 20])
def test_kl_is_torchs_kl_div_of_the_scored_rows(monkeypatch, world, chunk_bytes):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    base, candidate, ids = world
    expected = torch.nn.functional.kl_div(
        torch.log_softmax(_rows(candidate), -1), torch.log_softmax(_rows(base), -1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(compare(base, candidate, ids).kl, expected)


def test_kl_has_the_base_as_its_first_distribution(world):
    base, candidate, ids = world
    p = scipy.special.softmax(_rows(base).double().numpy(), axis=-1)
    q = scipy.special.softmax(_rows(candidate).double().numpy(), axis=-1)
    forward, backward = scipy.stats.entropy(p, q, axis=-1), scipy.stats.entropy(q, p, axis=-1)
    kl = compare(base, candidate, ids).kl.numpy()
    np.testing.assert_allclose(kl, forward, rtol=1e-5, atol=1e-6)
    assert np.abs(kl - backward).max() > 0.01


def test_the_figures_are_numpys_on_the_values_of_scipy(world):
    base, candidate, ids = world
    p = scipy.special.softmax(_rows(base).double().numpy(), axis=-1)
    q = scipy.special.softmax(_rows(candidate).double().numpy(), axis=-1)
    kl, right = scipy.stats.entropy(p, q, axis=-1), ids[:, 1:].reshape(-1).numpy()
    at = np.arange(len(right))
    figures = summarize(compare(base, candidate, ids))
    assert figures.kl_mean == pytest.approx(kl.mean(), rel=1e-5)
    assert figures.kl_median == pytest.approx(np.median(kl), rel=1e-5)
    assert figures.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-5)
    assert figures.kl_max == pytest.approx(kl.max(), rel=1e-5)
    assert figures.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert figures.delta_p_rms == pytest.approx(np.sqrt(((q[at, right] - p[at, right]) ** 2).mean()), rel=1e-5)


def test_equal_logits_diverge_by_exactly_nothing(world):
    base, _, ids = world
    figures = summarize(compare(base, base.clone(), ids))
    assert figures == type(figures)(kl_mean=0, kl_median=0, kl_p99=0, kl_max=0, top1=1, delta_p_rms=0)


def test_a_constant_added_to_all_logits_changes_no_distribution(world):
    base, _, ids = world
    figures = summarize(compare(base, base + 5, ids))
    assert figures.kl_max < 1e-5
    assert figures.top1 == 1


def test_losses_of_both_models_come_out_as_if_measured_alone(world):
    base, candidate, ids = world
    comparison = compare(base, candidate, ids)
    assert torch.equal(comparison.base_loss, token_losses(base, ids))
    assert torch.equal(comparison.candidate_loss, token_losses(candidate, ids))


def test_windows_compared_one_at_a_time_give_the_same_values(world):
    base, candidate, ids = world
    whole = compare(base, candidate, ids)
    parts = join([compare(base[i : i + 1], candidate[i : i + 1], ids[i : i + 1]) for i in range(WINDOWS)])
    assert torch.equal(parts.kl, whole.kl)
    assert torch.equal(parts.agrees, whole.agrees)
    assert torch.equal(parts.delta_p, whole.delta_p)


def test_ties_are_broken_by_the_lower_id():
    base, candidate = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    base[0, 0, 1] = base[0, 0, 2] = 1.0
    candidate[0, 0, 1] = 1.0
    assert compare(base, candidate, torch.tensor([[0, 3]])).agrees.tolist() == [True]


def test_one_nan_in_the_candidate_is_not_averaged_away(world):
    base, candidate, ids = world
    candidate[1, 4, 7] = math.nan
    figures = summarize(compare(base, candidate, ids))
    assert math.isnan(figures.kl_mean)
    assert math.isnan(figures.kl_max)
    assert math.isnan(figures.kl_p99)
