"""What SamplingParams refuses and accepts."""

import pytest

from narrowgauge.engine.request import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2),
        ("min_p", 1.5), ("min_tokens", -1), ("logprobs", -1), ("prompt_logprobs", 10**6), ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0), ("repetition_penalty", 0.0), ("stop", ("",)), ("stop", ("x",) * 100), ("stop", ("x" * 9999,)),
        ("seed", 2**64), ("logit_bias", {1: float("inf")}),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_combinations_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match="exceeds max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(RequestError, match="needs prompt_logprobs"):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).max_tokens == 0


def test_one_stop_text_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_a_temperature_of_almost_zero_is_greedy_and_plain_only_where_nothing_else_is_asked() -> None:
    assert SamplingParams(temperature=1e-6).plain_greedy
    assert not SamplingParams(temperature=0.0, logprobs=0).plain_greedy
    assert not SamplingParams(temperature=0.0, presence_penalty=0.1).plain_greedy
    assert not SamplingParams(temperature=0.1).greedy
