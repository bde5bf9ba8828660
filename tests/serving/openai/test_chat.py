import pytest

from narrowgauge.engine.request import PositionLogprobs, TokenLogprob


async def test_the_answer_has_the_shape_that_clients_expect(api):
    body = (await api.chat(model="m", temperature=0)).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert (body["model"], body["system_fingerprint"]) == ("m", "rev1")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


async def test_a_stream_is_role_then_text_then_an_end_apart(api, script):
    answer = await api.chat(stream=True)
    assert answer.text.startswith(": queued\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = script.events(answer)
    choices = [event["choices"][0] for event in found]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "He"},
        {"content": "llo"},
        {"content": ""},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert all("logprobs" in choice for choice in choices)
    assert len({event["id"] for event in found}) == 1
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in found)


async def test_usage_comes_in_a_chunk_of_its_own_and_is_null_before(api, script):
    found = script.events(await api.chat(stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] for event in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


async def test_running_usage_grows_on_every_chunk(api, script):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = script.events(await api.chat(stream=True, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in found] == [2, 2, 5, 5, 5]


async def test_usage_is_summed_over_the_choices_and_each_ends_once(api, script):
    found = script.events(await api.chat(stream=True, n=3, stream_options={"include_usage": True}))
    assert found[-1]["usage"] == {"prompt_tokens": 9, "completion_tokens": 15, "total_tokens": 24}
    choices = [event["choices"][0] for event in found[:-1]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
        assert "".join(choice["delta"]["content"] for choice in mine) == "Hello"
    whole = (await api.chat(n=3)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["Hello"] * 3
    assert whole["usage"] == found[-1]["usage"]


async def test_copies_get_seeds_of_their_own(api):
    await api.chat(n=3, seed=7)
    assert [request.params.seed for request in api.engine.requests] == [7, 8, 9]


async def test_empty_deltas_are_not_sent_but_logprobs_are(api, script):
    position = PositionLogprobs(TokenLogprob(97, -0.5), (TokenLogprob(97, -0.5),))
    api.engine.script = [
        script.says("", token_ids=(97,), logprobs=(position,)),
        script.says("ab", logprobs=(position, position)),
        script.ends("length"),
    ]
    quiet = script.events(await api.chat(stream=True))
    assert [event["choices"][0]["delta"]["content"] for event in quiet] == ["", "ab", ""]
    loud = script.events(await api.chat(stream=True, logprobs=True, top_logprobs=1))
    counts = [len((event["choices"][0]["logprobs"] or {"content": []})["content"]) for event in loud]
    assert counts == [0, 1, 2, 0]
    entry = loud[1]["choices"][0]["logprobs"]["content"][0]
    assert entry == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }


async def test_without_a_limit_the_context_is_the_limit_and_the_newer_name_wins(api):
    await api.chat()
    await api.chat(max_tokens=5)
    await api.chat(max_tokens=5, max_completion_tokens=6)
    assert [request.params.max_tokens for request in api.engine.requests] == [None, 5, 6]


async def test_text_parts_are_joined_and_the_template_gets_its_arguments(api):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    await api.chat(messages=messages, chat_template_kwargs={"think": False})
    text = "".join(map(chr, api.engine.requests[0].prompt_ids))
    assert text == "<system>s<user>a\nb<think=False>>"


async def test_stop_reason_says_what_matched(api, script):
    api.engine.script = [script.says("a"), script.ends("stop", stop_reason="END")]
    assert (await api.chat(stop=["END"])).json()["choices"][0]["stop_reason"] == "END"
    assert script.events(await api.chat(stop="END", stream=True))[-1]["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_fields_that_nobody_read(api, stream):
    header = "x-narrowgauge-ignored-fields"
    assert (await api.chat(stream=stream, frobnicate=1)).headers[header] == "frobnicate"
    assert header not in (await api.chat(stream=stream, user="me")).headers
    assert (await api.complete(stream=stream, frobnicate=1)).headers[header] == "frobnicate"
    assert (await api.http.post("/tokenize", json={"prompt": "a", "frobnicate": 1})).headers[header] == "frobnicate"
