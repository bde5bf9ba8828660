"""EngineLogits is the same function whatever the chunks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from narrowgauge.engine.scoring import EngineLogits


def test_chunks_and_block_sizes_do_not_change_the_logits(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()
    ids = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(4))
    whole = EngineLogits(folder, max_length=64, dtype="float32").logits(ids)
    cut = EngineLogits(folder, max_length=64, chunk=7, block_size=4, dtype="float32").logits(ids)
    torch.testing.assert_close(cut, whole, atol=1e-4, rtol=1e-4)
    assert whole.shape == (3, 50, 272)


def test_longer_text_than_it_was_made_for_is_refused(make_llama: Callable[..., Path]) -> None:
    source = EngineLogits(make_llama(), max_length=16, dtype="float32")
    with pytest.raises(ValueError, match="17 tokens a sequence"):
        source.logits(torch.zeros(1, 17, dtype=torch.int64))
    assert source.name == "engine"
