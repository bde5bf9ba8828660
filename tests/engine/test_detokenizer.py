"""Text as it streams: whole characters, and no character of a stop string."""

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from narrowgauge.engine.detokenizer import Detokenizer, StopScanner
from narrowgauge.engine.tokenizer import Tokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve — “quotes”\n\tdef f(x): return x**2 🎉"


def streamed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*[detokenizer.push(token) for token in ids], detokenizer.flush()]


def test_pieces_add_up_to_the_text_and_never_hold_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = streamed(Detokenizer(tokenizer, tokenizer.encode("Say:")), ids)
    assert "".join(pieces) == TEXT
    assert all("�" not in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_survives_streaming(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    assume(whole == text)  # the tokenizer lacks a few bytes, which it turns into U+FFFD
    assert "".join(streamed(Detokenizer(tokenizer, [1]), ids)) == whole


def test_a_character_cut_off_by_the_end_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 漢", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [])
    shown = "".join(detokenizer.push(token) for token in ids[:-1])
    assert shown == "ok"
    assert detokenizer.flush().strip(" ") == "�"


def test_bytes_that_are_no_utf8_come_out_after_four_tokens(tokenizer: Tokenizer) -> None:
    stray = tokenizer.encode("漢", add_special_tokens=False)[0]  # a first byte that never gets its second
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push(stray) for _ in range(8)]
    assert "�" in "".join(pieces)
    after = [detokenizer.push(token) for token in tokenizer.encode("¶ fine", add_special_tokens=False)]
    assert ("".join(after) + detokenizer.flush()).endswith("¶ fine")


def test_special_tokens_are_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    end = next(iter(tokenizer.eos_ids))
    ids = [*tokenizer.encode("yes", add_special_tokens=False), end]
    assert "".join(streamed(Detokenizer(tokenizer, []), ids)) == "yes"
    assert "".join(streamed(Detokenizer(tokenizer, [], skip_special_tokens=False), ids)) == "yes<|im_end|>"


def test_the_prompt_is_never_part_of_the_output(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("half a 漢", add_special_tokens=False)
    ids = tokenizer.encode(" more", add_special_tokens=False)
    assert "".join(streamed(Detokenizer(tokenizer, prompt), ids)) == " more"


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_no_character_of_a_stop_string_is_given_out(piece: int) -> None:
    scanner = StopScanner(["DEFGHIJ"], include=False)
    text, shown, matched = "ABC DEF ABCDEFGHIJKL", "", None
    for start in range(0, len(text), piece):
        new, matched = scanner.push(text[start : start + piece])
        shown += new
        if matched:
            break
    assert (shown, matched) == ("ABC DEF ABC", "DEFGHIJ")


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["END"], include=False)
    assert [scanner.push(piece)[0] for piece in ("one ", "E", "x E", "N", "d")] == ["one ", "", "Ex ", "", "ENd"]
    scanner.push(" EN")
    assert scanner.flush() == "EN"


def test_the_earliest_match_wins_and_is_cut_inside_a_token() -> None:
    scanner = StopScanner(["ris", "Pari"], include=False)
    assert scanner.push("in Paris") == ("in ", "Pari")
    assert StopScanner(["Pari"], include=True).push("in Paris") == ("in Pari", "Pari")


def test_nothing_matches_before_the_scanner_is_armed() -> None:
    scanner = StopScanner(["a"], include=False)
    assert scanner.push("banana", armed=False) == ("banana", None)
    assert scanner.push("xa") == ("x", "a")


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_streaming_shows_what_a_search_of_the_whole_text_would(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner, shown, at, matched = StopScanner(stops, include=False), "", 0, None
    for cut in cuts:
        new, matched = scanner.push(text[at : at + cut])
        shown, at = shown + new, at + cut
        if matched:
            break
    if matched is None:
        assert shown + scanner.flush() == text
        assert not any(stop in text for stop in stops)
    else:
        seen = text[:at]
        assert shown == seen[: min(seen.find(stop) for stop in stops if stop in seen)]


def test_a_tokenizer_reads_what_the_folder_says(tokenizer: Tokenizer, smollm2: Path) -> None:
    assert tokenizer.eos_ids == {2}
    assert tokenizer.vocab_size == 49152
