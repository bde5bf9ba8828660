from itertools import chain

import pytest

from narrowgauge.engine.request import PositionLogprobs, TokenLogprob


def scored(*ids):
    return tuple(PositionLogprobs(TokenLogprob(i, -float(n + 1)), (TokenLogprob(i, -0.5),)) for n, i in enumerate(ids))


async def test_the_answer_has_the_shape_that_clients_expect(api):
    body = (await api.complete()).json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["system_fingerprint"]) == ("text_completion", "rev1")
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [(1, 104, 105)]),
        (["hi", "a"], [(1, 104, 105), (1, 97)]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        ([[5, 6], "a"], [(5, 6), (1, 97)]),
    ],
)
async def test_a_prompt_is_text_or_ids_one_or_many(api, prompt, ids):
    body = (await api.complete(prompt=prompt)).json()
    assert [request.prompt_ids for request in api.engine.requests] == ids
    assert [choice["index"] for choice in body["choices"]] == list(range(len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("prompt", [None, [], 5, {"a": 1}, [[]], [1.5], [True], [["a"]], ["a", 5], [-1], [10**7]])
async def test_a_prompt_of_another_kind_is_refused(api, prompt):
    answer = await api.complete(prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert not api.engine.requests


async def test_choices_are_numbered_prompt_by_prompt(api):
    body = (await api.complete(prompt=["a", "b"], n=2)).json()
    assert [request.prompt_ids[-1] for request in api.engine.requests] == [97, 97, 98, 98]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}


async def test_more_sequences_than_the_server_can_ever_queue_are_refused(api):
    answer = await api.complete(prompt=["a"] * 9)
    assert answer.status_code == 400
    assert "8 sequences" in answer.json()["error"]["message"]


async def test_the_default_length_is_16_and_gives_way_at_the_end_of_the_context(api):
    await api.complete(prompt="x" * 80)
    await api.complete(prompt="x" * 90)
    assert [request.params.max_tokens for request in api.engine.requests] == [16, None]


async def test_echo_puts_the_prompt_before_the_answer(api, script):
    assert (await api.complete(echo=True)).json()["choices"][0]["text"] == "hiHello"
    assert (await api.complete(echo=True, prompt=[104, 105])).json()["choices"][0]["text"] == "hiHello"
    texts = [event["choices"][0]["text"] for event in script.events(await api.complete(echo=True, stream=True))]
    assert texts == ["hi", "He", "llo", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_without_an_answer(api, script, stream):
    api.engine.script = [script.ends("length", prompt_logprobs=(None, *scored(6, 7)))]
    answer = await api.complete(
        prompt=[5, 6, 7], echo=True, max_tokens=0, logprobs=20, return_tokens_as_token_ids=True, stream=stream
    )
    choice = script.events(answer)[0]["choices"][0] if stream else answer.json()["choices"][0]
    params = api.engine.requests[0].params
    assert (params.max_tokens, params.prompt_logprobs) == (0, 20)
    assert choice["logprobs"] == {
        "tokens": ["token_id:5", "token_id:6", "token_id:7"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"token_id:6": -0.5}, {"token_id:7": -0.5}],
        "text_offset": [0, 1, 2],
    }
    if not stream:
        assert choice["finish_reason"] == "length"
        assert answer.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


async def test_echoed_and_new_logprobs_run_on_in_one_list(api, script):
    api.engine.script = [
        script.says("a", prompt_logprobs=(None, *scored(105)), logprobs=scored(97)),
        script.says("b", logprobs=scored(98)),
        script.ends("length"),
    ]
    fields = {"prompt": [104, 105], "echo": True, "logprobs": 1, "max_tokens": 2}
    whole = (await api.complete(**fields)).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["h", "i", "a", "b"]
    assert whole["text_offset"] == [0, 1, 2, 3]
    chunks = [event["choices"][0]["logprobs"] for event in script.events(await api.complete(**fields, stream=True))]
    streamed = {name: list(chain.from_iterable(chunk[name] for chunk in chunks if chunk)) for name in whole}
    assert streamed == whole


async def test_a_stream_ends_apart_with_usage_if_asked_for(api, script):
    found = script.events(await api.complete(stream=True, stream_options={"include_usage": True}))
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]] == [None, None, "stop"]
    assert found[-2]["choices"][0]["text"] == ""
    assert (found[-1]["choices"], found[-1]["usage"]["total_tokens"]) == ([], 8)


async def test_logprobs_above_20_are_refused(api):
    assert (await api.complete(logprobs=21)).json()["error"]["param"] == "logprobs"
