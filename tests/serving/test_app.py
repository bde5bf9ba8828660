"""A real replica of the real model, asked as users ask: by OpenAI's own client, by plain HTTP, and by clients who leave."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlparse

import httpx
import openai
import pytest

CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ESSAY = [{"role": "user", "content": "Write a long essay about the sea."}]
LONG = {"messages": ESSAY, "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def client(replica):
    with openai.OpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(replica):
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        yield client


def samples(http):
    lines = http.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def until(http, condition):
    """The metrics as soon as they meet the condition."""
    deadline = time.monotonic() + 20
    while not condition(found := samples(http)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


RUNNING = 'vllm:num_requests_running{engine="0",model_name="smollm2"}'
USAGE = 'vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"}'
ABORTED = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="smollm2"}'


def test_the_model_answers_a_question(client):
    answer = client.chat.completions.create(model="smollm2", messages=CHAT, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint == "rev-1"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_it_streams_what_it_answers(client):
    whole = client.chat.completions.create(model="smollm2", messages=CHAT, temperature=0)
    stream = client.chat.completions.create(
        model="smollm2", messages=CHAT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 4


def test_models_are_listed_with_their_context(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").max_model_len == 2048


def test_mistakes_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=CHAT)
    assert unknown.value.body["param"] == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="smollm2", messages=CHAT, temperature=-1)
    assert wrong.value.body["param"] == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        client.completions.create(model="smollm2", prompt="word " * 3000)


def test_logprobs_come_through_the_official_client(client):
    answer = client.chat.completions.create(
        model="smollm2", messages=CHAT, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert bytes(entry.bytes).decode() == entry.token


def test_a_stop_text_ends_the_answer_before_itself(client):
    answer = client.completions.create(
        model="smollm2", prompt="1, 2, 3, 4, 5, 6,", temperature=0, max_tokens=30, stop=[" 9"]
    )
    assert answer.choices[0].text == " 7, 8,"
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", " 9")


def test_every_answer_names_the_revision_and_the_request(http):
    answer = http.get("/version", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-narrowgauge-revision"] == "rev-1"
    assert answer.headers["x-request-id"] == "mine-1"
    assert len(answer.json()["digest"]) == 64


def test_a_client_who_leaves_a_stream_frees_its_place(http):
    before = samples(http)[ABORTED]
    with http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data:"))
        assert samples(http)[RUNNING] == 1
    after = until(http, lambda found: found[RUNNING] == 0 and found[ABORTED] == before + 1)
    assert after[USAGE] == 0


def test_a_client_who_leaves_before_a_whole_answer_frees_its_place(replica, http):
    before = samples(http)[ABORTED]
    body = json.dumps(LONG).encode()
    address = urlparse(replica.url)
    with socket.create_connection((address.hostname, address.port)) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(http, lambda found: found[RUNNING] == 1)
    after = until(http, lambda found: found[RUNNING] == 0 and found[ABORTED] == before + 1)
    assert after[USAGE] == 0


def test_two_requests_of_one_id_do_not_touch_each_other(http):
    headers = {"x-request-id": "same"}
    with http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}, headers=headers) as first:
        lines = first.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}, headers=headers) as second:
            next(line for line in second.iter_lines() if line.startswith("data:"))
        until(http, lambda found: found[RUNNING] == 1)
        assert next(line for line in lines if line.startswith("data:"))
    until(http, lambda found: found[RUNNING] == 0)


def test_shadow_copies_are_counted_apart(http):
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    before = samples(http)
    http.post("/v1/completions", json=body, headers={"x-narrowgauge-shadow": "1"}).raise_for_status()
    http.post("/v1/completions", json=body, headers={"x-narrowgauge-role": "canary"}).raise_for_status()
    after = samples(http)

    def grown(name):
        return after.get(name, 0) - before.get(name, 0)

    assert grown('narrowgauge_generation_tokens_total{model="smollm2",role="shadow"}') == 2
    assert grown('narrowgauge_generation_tokens_total{model="smollm2",role="canary"}') == 2
    assert grown('vllm:generation_tokens_total{engine="0",model_name="smollm2"}') == 2
    assert grown('narrowgauge_requests_finished_total{finished_reason="length",model="smollm2",role="shadow"}') == 1


def test_probes_are_answered_while_a_huge_prompt_is_refused(http):
    with ThreadPoolExecutor(1) as pool:
        huge = pool.submit(http.post, "/v1/completions", json={"prompt": "word " * 1_000_000})
        probes = []
        while not probes or not huge.done():
            probes.append(http.get("/live").status_code)
    assert set(probes) == {200}
    assert huge.result().status_code == 400
    assert "maximum context length" in huge.result().json()["error"]["message"]
