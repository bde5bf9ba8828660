import asyncio

import pytest

from narrowgauge.engine.async_engine import EngineBusy, EngineDead
from narrowgauge.serving.openai import protocol


def error_of(response, status):
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert response.headers["x-narrowgauge-revision"] == "rev1"
    return error


async def test_an_unknown_model_is_not_found(api):
    error = error_of(await api.chat(model="other"), 404)
    assert error == {
        "message": "The model `other` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert error_of(await api.complete(model="other"), 404)["param"] == "model"
    assert error_of(await api.http.get("/v1/models/a/b"), 404)["param"] == "model"
    assert error_of(await api.http.post("/tokenize", json={"model": "x", "prompt": ""}), 404)["param"] == "model"


async def test_paths_and_methods_that_do_not_exist_are_errors_of_the_same_shape(api):
    assert "/v1/nothing" in error_of(await api.http.get("/v1/nothing"), 404)["message"]
    assert "GET" in error_of(await api.http.get("/v1/completions"), 405)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"{", b"", b"[1, 2", b'{"a": nan}', b"\x00\xff"])
async def test_invalid_json_is_a_400(api, path, body):
    error = error_of(await api.http.post(path, content=body), 400)
    assert error["type"] == "BadRequestError"
    assert "JSON" in error["message"]


async def test_a_body_needs_no_content_type(api):
    body = b'{"prompt": "hi"}'
    answer = await api.http.post("/v1/completions", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 200


async def test_a_body_too_big_is_refused_without_reading_on(api, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_BODY_BYTES", 1000)
    assert "1000 bytes" in error_of(await api.complete(prompt="x" * 2000), 413)["message"]


async def test_a_prompt_too_long_says_how_long_in_the_usual_words(api):
    error = error_of(await api.complete(prompt="x" * 95, max_tokens=20), 400)
    assert error["message"].startswith("This model's maximum context length is 100 tokens. However, you requested 20 ")
    assert error["param"] == "max_tokens"
    assert error_of(await api.complete(prompt="x" * 120), 400)["param"] == "prompt"
    assert error_of(await api.chat(messages=[{"role": "user", "content": "x" * 120}]), 400)["type"] == "BadRequestError"


async def test_a_prompt_far_too_long_is_refused_without_tokenizing_it(api, monkeypatch):
    monkeypatch.setattr(api.engine.tokenizer, "encode", None)
    error = error_of(await api.complete(prompt="x" * 5_000_000), 400)
    assert "at least 1250000 input tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"999999": -100}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stream": None, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_is_a_400_that_names_its_field_even_for_streams(api, fields, param, stream):
    error = error_of(await api.chat(**{"stream": stream, **fields}), 400)
    assert error["param"] == param
    assert error["type"] == "BadRequestError"
    assert not api.engine.requests


async def test_a_full_queue_is_a_503_that_says_when_to_come_back(api):
    api.engine.refusal = (0, EngineBusy("the queue is full"))
    answer = await api.chat(stream=True)
    assert error_of(answer, 503)["type"] == "ServiceUnavailableError"
    assert int(answer.headers["retry-after"]) >= 1
    assert await api.metric('narrowgauge_requests_rejected_total{model="m",reason="busy",role="stable"}') == 1


async def test_a_queue_that_fills_up_half_way_runs_none_of_the_choices(api):
    api.engine.refusal = (2, EngineBusy("the queue is full"))
    assert (await api.chat(n=3)).status_code == 503
    assert api.engine.aborted == [request.request_id for request in api.engine.requests]
    assert len(api.engine.aborted) == 2


async def test_an_engine_that_dies_before_the_answer_is_a_503(api, script):
    api.engine.script = [script.says("a"), EngineDead("out of memory")]
    assert "out of memory" in error_of(await api.chat(), 503)["message"]
    assert await api.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 1


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (EngineDead("out of memory"), 503),
        ({"finish_reason": "error", "error": "bad step"}, 500),
        ({"finish_reason": "abort"}, 503),
    ],
)
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_an_error_in_a_stream_goes_in_band_and_the_stream_still_ends(api, script, path, last, status):
    api.engine.script = [script.says("a"), last]
    answer = await getattr(api, path)(stream=True)
    assert answer.status_code == 200
    found = script.events(answer)
    assert found[-1]["error"]["code"] == status
    assert all("error" not in event for event in found[:-1])
    assert len(api.engine.closed) == 1


async def test_a_failed_choice_fails_the_whole_answer_and_stops_the_others(api, script):
    api.engine.script = [script.ends("error", error="bad step")]
    assert error_of(await api.complete(n=3), 500)["message"] == "m: bad step"
    assert len(set(api.engine.closed)) == 3


async def test_what_nobody_foresaw_is_a_500_without_its_details(api, monkeypatch):
    async def crash(*arguments, **options):
        raise KeyError("secret")

    monkeypatch.setattr(asyncio, "to_thread", crash)
    api.engine.max_model_len = 10**6
    answer = await api.complete(prompt="x" * 30_000)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in answer.text
