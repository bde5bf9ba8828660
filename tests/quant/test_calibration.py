"""Calibration windows: real text, packed, the same for the same specification."""

from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from narrowgauge.quant.calibration import build_calibration
from narrowgauge.quant.recipe import CalibrationSpec, TextSource
from narrowgauge.quant.texts import TextError, documents


@pytest.fixture
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama())


def _file(tmp_path: Path, letter: str, paragraphs: int = 40) -> TextSource:
    path = tmp_path / f"{letter}.txt"
    path.write_text("\n\n".join(letter * 30 for _ in range(paragraphs)))
    return TextSource(text=str(path))


def test_windows_hold_calibration_text_only_and_follow_the_seed(tokenizer):
    spec = CalibrationSpec(samples=8, length=64, seed=3)
    first, again = build_calibration(spec, tokenizer), build_calibration(spec, tokenizer)
    assert first.ids.shape == (8, 64)
    assert first.ids.dtype == torch.int64
    assert torch.equal(first.ids, again.ids)
    assert first.digest == again.digest
    other = build_calibration(CalibrationSpec(samples=8, length=64, seed=4), tokenizer)
    assert other.digest != first.digest
    allowed = "\n\n".join(documents("pydoc", split="calibration"))
    inside = [tokenizer.decode(window) in allowed for window in first.ids]
    assert sum(inside) >= 6  # a window may straddle two documents


def test_sources_get_samples_by_weight(tokenizer, tmp_path):
    first, second = _file(tmp_path, "a"), _file(tmp_path, "b")
    spec = CalibrationSpec(sources=(first, TextSource(text=second.text, weight=3.0)), samples=10, length=16)
    texts = [tokenizer.decode(window) for window in build_calibration(spec, tokenizer).ids]
    assert sum("a" in text for text in texts) in (2, 3)
    assert sum("b" in text for text in texts) in (7, 8)


def test_each_window_begins_with_bos_where_the_tokenizer_adds_one(tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ids = build_calibration(CalibrationSpec(samples=4, length=32), tokenizer).ids
    assert ids[:, 0].tolist() == [0] * 4
    assert not bool((ids[:, 1:] == 0).any())


def test_too_little_text_says_how_much_there_is(tokenizer, tmp_path):
    spec = CalibrationSpec(sources=(_file(tmp_path, "a"),), samples=100, length=64)
    with pytest.raises(TextError, match=r"holds 1024 tokens for calibration; 100 samples of 64 need 6400; lower"):
        build_calibration(spec, tokenizer)
