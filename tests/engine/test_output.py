"""What a caller sees of the engine's tokens."""

import pytest

from narrowgauge.engine.output import OutputBuilder, StepOutput
from narrowgauge.engine.request import Request, SamplingParams
from narrowgauge.engine.tokenizer import Tokenizer


def make_builder(tokenizer: Tokenizer, **params: object) -> OutputBuilder:
    return OutputBuilder(
        Request(request_id="r", prompt_ids=(1,), params=SamplingParams(**params)),  # type: ignore[arg-type]
        tokenizer,
    )


def feed(builder: OutputBuilder, ids: list[int], *, last: str | None = None) -> list[bool]:
    return [
        builder.push(StepOutput(request_id="r", token_id=token, finish_reason=last if index == len(ids) - 1 else None))  # type: ignore[arg-type]
        for index, token in enumerate(ids)
    ]


def test_tokens_that_overran_a_stop_string_are_neither_shown_nor_counted(tokenizer: Tokenizer) -> None:
    builder = make_builder(tokenizer, stop=("three",))
    ids = tokenizer.encode("one two three four five", add_special_tokens=False)
    dropped = feed(builder, ids)
    output = builder.take()
    assert output.text == "one two "
    assert (output.finish_reason, output.stop_reason) == ("stop", "three")
    assert output.output_tokens == len(output.token_ids) == 3
    assert dropped == [False, False, True, False, False]


def test_a_stop_string_is_not_matched_before_min_tokens(tokenizer: Tokenizer) -> None:
    builder = make_builder(tokenizer, stop=("two",), min_tokens=3)
    ids = tokenizer.encode("one two three two", add_special_tokens=False)
    feed(builder, ids)
    assert builder.take().text == "one two three "


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    builder = make_builder(tokenizer, stop=("two three",))
    feed(builder, tokenizer.encode("one two", add_special_tokens=False), last="length")
    output = builder.take()
    assert (output.text, output.finish_reason) == ("one two", "length")


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one two")])
def test_a_stop_token_is_counted_and_shown_only_when_asked_for(tokenizer: Tokenizer, include: bool, text: str) -> None:
    builder = make_builder(tokenizer, include_stop_str_in_output=include)
    one, two = tokenizer.encode("one two", add_special_tokens=False)
    builder.push(StepOutput(request_id="r", token_id=one))
    builder.push(StepOutput(request_id="r", token_id=two, hidden=not include, finish_reason="stop", stop_reason=two))
    output = builder.take()
    assert (output.text, output.output_tokens, output.stop_reason) == (text, 2, two)
    assert output.token_ids == (one, two)


def test_an_abort_gives_out_what_was_held_back(tokenizer: Tokenizer) -> None:
    builder = make_builder(tokenizer, stop=("two three",))
    feed(builder, tokenizer.encode("one two", add_special_tokens=False))
    assert builder.take().text == "one "
    builder.end("abort")
    output = builder.take()
    assert (output.text, output.finish_reason) == ("two", "abort")
