"""Texts: the halves of a source never share a document, and bad sources are named."""

import itertools
import json
from pathlib import Path

import pytest

from narrowgauge.quant.texts import Chat, TextError, documents, stream


def _paragraphs(tmp_path: Path, count: int) -> str:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Paragraph number {number}." for number in range(count)))
    return str(path)


def _halves(source: str) -> tuple[list[str], list[str], list[str]]:
    return tuple(documents(source, split=split) for split in ("calibration", "heldout", "all"))


def test_pydoc_is_split_by_topic_into_two_halves_that_share_nothing():
    calibration, heldout, everything = _halves("pydoc")
    assert sorted(calibration + heldout) == sorted(everything)
    assert not set(calibration) & set(heldout)
    assert sum(map(len, calibration)) > 250_000
    assert sum(map(len, heldout)) > 40_000
    assert documents("pydoc", split="heldout") == heldout


def test_a_text_file_is_split_in_runs_of_neighbouring_paragraphs(tmp_path):
    calibration, heldout, everything = _halves(_paragraphs(tmp_path, 200))
    assert len(everything) == 200
    assert sorted(calibration + heldout) == sorted(everything)
    assert heldout[:2] == ["Paragraph number 64.", "Paragraph number 65."]
    assert len(heldout) == 2 * 16


def test_json_lines_and_parquet_give_their_text_column(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = [f"text {number}" for number in range(10)]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)))
    parquet = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"content": texts}), parquet)
    assert documents(str(lines), split="all") == texts
    assert documents(str(parquet), split="all") == texts
    assert documents(str(lines), split="heldout") == ["text 8", "text 9"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", "", "holds no text"),
        ("blank.txt", "\n\n  \n\n", "holds no text"),
        ("two.txt", "one\n\ntwo", "2 documents are too few to hold some out"),
        ("wrong.jsonl", '{"body": "x"}', "has no column named text, content, messages or conversations, only body"),
        ("broken.jsonl", "{{{", "cannot be read as json"),
        ("chat.jsonl", '{"messages": [{"role": "user"}, "hello"]}', "row 0: a conversation must be a list of turns"),
        ("page.html", "<p>", "unknown text source"),
    ],
)
def test_a_source_that_gives_no_text_is_named_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(TextError, match=message) as caught:
        documents(str(path), split="heldout")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_dataset_that_cannot_be_reached_is_one_line(monkeypatch):
    import datasets

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'no/such' on the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        TextError, match=r"^hub:no/such: cannot be read from the hub: Couldn't reach 'no/such' on the Hub$"
    ):
        documents("hub:no/such", split="all")


def test_a_hub_dataset_names_its_configuration_and_split(monkeypatch):
    import datasets

    asked: list[object] = []

    def load(*arguments: object, **options: object) -> list[dict[str, str]]:
        asked.append((arguments, options))
        return [{"text": f"row {number}"} for number in range(3)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert documents("hub:org/name:config:test", split="all") == ["row 0", "row 1", "row 2"]
    assert asked == [(("org/name", "config"), {"split": "test", "streaming": True})]


def _lines(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_conversations_are_read_as_the_api_and_as_sharegpt_write_them(tmp_path):
    spoken = Chat((("system", "Be brief."), ("user", "Why?"), ("assistant", "Because.")))
    messages = [{"role": role, "content": content} for role, content in spoken.turns]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    conversations = [{"from": names[role], "value": content} for role, content in spoken.turns]
    for column, turns in (("messages", messages), ("conversations", conversations)):
        source = _lines(tmp_path / f"{column}.jsonl", [{"id": 1, column: turns}])
        assert list(stream(source, split="all", chat=True)) == [spoken]
        assert documents(source, split="all") == ["Be brief.\n\nWhy?\n\nBecause."]
    assert spoken.messages == messages


def test_a_row_with_text_and_conversation_gives_the_one_that_is_asked_for(tmp_path):
    source = _lines(tmp_path / "both.jsonl", [{"text": "plain", "messages": [{"role": "user", "content": "said"}]}])
    assert list(stream(source, split="all")) == ["plain"]
    assert list(stream(source, split="all", chat=True)) == [Chat((("user", "said"),))]


def test_of_a_large_file_only_what_is_taken_is_read(tmp_path):
    path = tmp_path / "large.jsonl"
    row = json.dumps({"text": "word " * 400}) + "\n"
    path.write_text(row * 12_000 + "{{{ not JSON\n")  # datasets reads ten megabytes at a time
    assert len(list(itertools.islice(stream(str(path), split="calibration"), 100))) == 100
    assert len(documents(str(path), split="heldout", characters=50_000)) == 25
    with pytest.raises(TextError, match="cannot be read as json"):
        list(stream(str(path), split="all"))


def test_the_halves_of_a_stream_share_nothing_even_when_rows_are_added(tmp_path):
    rows = [{"text": f"row {number}"} for number in range(300)]
    short, long = _lines(tmp_path / "short.jsonl", rows[:200]), _lines(tmp_path / "long.jsonl", rows)
    calibration, heldout, _ = _halves(long)
    assert not set(calibration) & set(heldout)
    assert set(_halves(short)[1]) <= set(heldout)
