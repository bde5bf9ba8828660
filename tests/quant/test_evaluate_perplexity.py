"""Perplexity: the same as transformers' own loss and torch's cross entropy, whatever the chunks and the batch."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.evaluate import perplexity as module
from narrowgauge.quant.evaluate.perplexity import perplexity, token_losses


@pytest.mark.parametrize(("windows", "length", "vocabulary"), [(1, 2, 5), (3, 17, 11), (2, 40, 1023)])
@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * 11, 2 << 20])
def test_losses_are_the_cross_entropy_of_the_shifted_targets(monkeypatch, windows, length, vocabulary, chunk_bytes):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    logits = torch.randn(windows, length, vocabulary) * 4
    ids = torch.randint(vocabulary, (windows, length))
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocabulary), ids[:, 1:].reshape(-1), reduction="none"
    )
    torch.testing.assert_close(token_losses(logits, ids), expected)


def test_perplexity_is_exp_of_transformers_own_loss_on_a_random_llama(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float32)
    torch.manual_seed(1)
    ids = torch.randint(258, (3, 50))
    with torch.inference_mode():
        out = model(ids, labels=ids)
    assert perplexity(token_losses(out.logits, ids)) == pytest.approx(math.exp(out.loss.item()), rel=1e-5)


def test_a_uniform_distribution_has_the_perplexity_of_its_size():
    ids = torch.randint(37, (2, 9))
    assert perplexity(token_losses(torch.zeros(2, 9, 37), ids)) == pytest.approx(37)


def test_the_last_logits_of_a_window_predict_nothing_that_is_scored():
    torch.manual_seed(2)
    logits, ids = torch.randn(2, 8, 13), torch.randint(13, (2, 8))
    changed = logits.clone()
    changed[:, -1] = 100 * torch.randn(2, 13)
    assert torch.equal(token_losses(changed, ids), token_losses(logits, ids))


def test_a_loss_too_large_for_a_float_gives_infinity_and_a_nan_gives_nan():
    assert perplexity(torch.tensor([1000.0])) == math.inf
    assert math.isnan(perplexity(torch.tensor([1.0, math.nan])))
