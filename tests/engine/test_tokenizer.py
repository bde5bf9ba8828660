"""The tokenizer against transformers' on the real model."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from narrowgauge.engine.tokenizer import ChatTemplateError, Tokenizer, TokenizerError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>2 + 2</b>?\n“two”"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Grüße 漢"},
]


def test_ids_and_chat_are_transformers(tokenizer: Tokenizer, smollm2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2)
    for text in ("", "Hello", "  two  spaces\n\n", "漢字 🎉", "<|im_start|>user"):
        assert tokenizer.encode(text) == theirs(text).input_ids
        assert tokenizer.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    for generation in (True, False):
        chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=generation, tokenize=False)
        assert tokenizer.render_chat(MESSAGES, add_generation_prompt=generation) == (chat,)
        assert (
            tokenizer.chat(MESSAGES, add_generation_prompt=generation)
            == theirs(chat, add_special_tokens=False).input_ids
        )


def test_text_of_n_bytes_has_at_least_n_over_longest_token_ids(tokenizer: Tokenizer) -> None:
    for text in ("a" * 500, " " * 500, "漢" * 100):
        assert len(tokenizer.encode(text)) >= len(text.encode()) / tokenizer.longest_token


def test_a_special_token_shows_its_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_str(2) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""
    assert 2 in tokenizer.special_ids


def test_a_model_without_a_template_refuses_to_chat(smollm2: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2 / "tokenizer.json", tmp_path)
    bare = Tokenizer.from_folder(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template") as caught:
        bare.chat(MESSAGES)
    assert caught.value.param == "messages"


def test_what_a_template_raises_is_the_callers_mistake(smollm2: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2 / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    )
    with pytest.raises(ChatTemplateError, match="one at a time"):
        Tokenizer.from_folder(tmp_path).chat(MESSAGES)


def test_end_tokens_come_from_the_generation_settings_as_a_list_too(smollm2: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2 / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 77}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == {5, 9}


def test_a_beginning_token_follows_the_settings(smollm2: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2 / "tokenizer.json", tmp_path)
    settings = {"bos_token": "<|im_start|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("Hello")[0] == 1
    assert tokenizer.encode("Hello", add_special_tokens=False)[0] != 1


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="not a tokenizer file"):
        Tokenizer.from_folder(tmp_path)
