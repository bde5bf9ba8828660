"""Calibration windows: real text, packed, the same for the same specification."""

import json
import logging
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


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}"
)


def _chats(tmp_path: Path, count: int, roles: tuple[str, str] = ("user", "assistant")) -> TextSource:
    path = tmp_path / f"{roles[0]}.jsonl"
    rows = [
        {"messages": [{"role": role, "content": f"{role} says {number}"} for role in roles]} for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TextSource(text=str(path))


def test_conversations_stand_as_the_chat_template_writes_them_with_one_bos_a_window(tokenizer, tmp_path):
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    source = _chats(tmp_path, 60)
    spec = CalibrationSpec(sources=(source,), samples=4, length=128, template="chat", seed=1)
    ids = build_calibration(spec, tokenizer).ids
    assert ids[:, 0].tolist() == [0] * 4
    assert not bool((ids[:, 1:] == 0).any())
    lines = "".join(tokenizer.decode(window[1:]) for window in ids).splitlines()
    turns = set()
    for row in Path(source.text).read_text().splitlines():
        messages = json.loads(row)["messages"]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        turns |= set(rendered.removeprefix("<s>").splitlines())
    assert sum(line in turns for line in lines) >= len(lines) - 8  # a window's ends may cut a turn
    plain = build_calibration(CalibrationSpec(sources=(source,), samples=1, length=64), tokenizer).ids
    assert "[user]" not in tokenizer.decode(plain[0])


def test_a_source_may_differ_from_the_template_of_the_others(tokenizer, tmp_path):
    tokenizer.chat_template = CHAT_TEMPLATE
    text = TextSource(text=_file(tmp_path, "a").text, template="none")
    spec = CalibrationSpec(sources=(text, _chats(tmp_path, 60)), samples=8, length=32, template="chat")
    texts = [tokenizer.decode(window) for window in build_calibration(spec, tokenizer).ids]
    assert sum("aaaa" in text for text in texts) == 4
    assert sum("says" in text for text in texts) == 4


def test_conversations_that_the_template_refuses_are_passed_over_and_told(tokenizer, tmp_path, caplog):
    tokenizer.chat_template = CHAT_TEMPLATE
    good, bad = _chats(tmp_path, 40), _chats(tmp_path, 40, roles=("tool", "assistant"))
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(Path(bad.text).read_text() + Path(good.text).read_text())
    with caplog.at_level(logging.WARNING):
        spec = CalibrationSpec(sources=(TextSource(text=str(mixed)),), samples=8, length=64, template="chat")
        ids = build_calibration(spec, tokenizer).ids
    assert "tool" not in "".join(tokenizer.decode(window) for window in ids)
    assert "the chat template refused" in caplog.text
    with pytest.raises(TextError, match=r"holds 0 tokens .*refused 32 conversations, the last with: no role tool"):
        build_calibration(CalibrationSpec(sources=(bad,), samples=1, length=8, template="chat"), tokenizer)


def test_a_template_that_is_missing_or_asked_for_text_is_refused_with_the_remedy(tokenizer, tmp_path):
    spec = CalibrationSpec(sources=(_chats(tmp_path, 10),), samples=1, length=8, template="chat")
    with pytest.raises(TextError, match=r"needs a tokenizer with a chat template.* write template: none"):
        build_calibration(spec, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    spec = CalibrationSpec(sources=(_file(tmp_path, "a"),), samples=1, length=8, template="chat")
    with pytest.raises(TextError, match=r"a\.txt: holds plain text, and template: chat needs conversations"):
        build_calibration(spec, tokenizer)


def test_one_sample_of_one_document_is_enough(tokenizer, tmp_path):
    source = _file(tmp_path, "a", paragraphs=1)
    ids = build_calibration(CalibrationSpec(sources=(source,), samples=1, length=16), tokenizer).ids
    assert tokenizer.decode(ids[0]) == "a" * 16


def test_a_source_longer_than_the_buffer_is_shuffled_buffer_by_buffer(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.quant.calibration._BUFFER", 20)
    path = tmp_path / "numbers.txt"
    path.write_text("\n\n".join(f"{number:04}" for number in range(200)))
    spec = CalibrationSpec(sources=(TextSource(text=str(path)),), samples=1, length=6 * 40)
    drawn = [int(text) for text in tokenizer.decode(build_calibration(spec, tokenizer).ids[0]).split()]
    first, second = drawn[:20], drawn[20:]
    assert sorted(first) == list(range(20))
    assert first != sorted(first)
    assert sorted(second) == list(range(20, 40))
