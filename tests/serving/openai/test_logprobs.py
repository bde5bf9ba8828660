import math

from narrowgauge.engine.request import PositionLogprobs, TokenLogprob
from narrowgauge.serving.openai.logprobs import CompletionLogprobs, TokenTexts, chat_content, joined


class Letters:
    """A tokenizer of two letters, in which ids 1 and 3 share a text."""

    def token_str(self, token_id):
        return {0: "é", 1: "bc", 2: "", 3: "bc"}[token_id]


def position(chosen, *top):
    return PositionLogprobs(TokenLogprob(*chosen), tuple(TokenLogprob(*entry) for entry in top))


def test_chat_entries_carry_bytes_and_the_best_tokens():
    entries = chat_content([position((0, -1.0), (1, -0.5), (0, -1.0))], TokenTexts(Letters()), as_ids=False)
    assert entries == [
        {
            "token": "é",
            "logprob": -1.0,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "bc", "logprob": -0.5, "bytes": [98, 99]},
                {"token": "é", "logprob": -1.0, "bytes": [195, 169]},
            ],
        }
    ]


def test_ids_stand_for_tokens_that_share_a_text():
    lists = CompletionLogprobs(TokenTexts(Letters()), as_ids=True).lists([1], [position((1, -2.0), (3, -0.1))])
    assert lists["tokens"] == ["token_id:1"]
    assert lists["top_logprobs"] == [{"token_id:3": -0.1, "token_id:1": -2.0}]


def test_of_tokens_that_share_a_text_the_best_is_shown():
    lists = CompletionLogprobs(TokenTexts(Letters()), as_ids=False).lists([1], [position((1, -2.0), (3, -0.1))])
    assert lists["top_logprobs"] == [{"bc": -0.1}]


def test_offsets_run_on_from_chunk_to_chunk_and_the_first_position_is_null():
    builder = CompletionLogprobs(TokenTexts(Letters()), as_ids=False)
    first = builder.lists([0, 1], [None, position((1, -1.0))])
    second = builder.lists([2, 0], [position((2, -1.0)), position((0, -1.0))])
    both = joined(joined(None, first), second)
    assert both["text_offset"] == [0, 1, 3, 3]
    assert both["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert both["top_logprobs"][0] is None


def test_infinity_becomes_a_number_that_json_can_say():
    lists = CompletionLogprobs(TokenTexts(Letters()), as_ids=False).lists(
        [0, 1], [position((0, -math.inf)), position((1, math.nan))]
    )
    assert lists["token_logprobs"] == [-9999.0, -9999.0]
