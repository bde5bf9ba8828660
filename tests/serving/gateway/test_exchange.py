"""One request through the gateway: relayed as it comes, recorded, given up when its client leaves."""

import asyncio
import json
import time

import openai
import pytest

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def events(text):
    """The events of a stream as JSON values ("[DONE]" stays text)."""
    data = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def words(text):
    """What a stream said."""
    found = [event for event in events(text) if event != "[DONE]" and "choices" in event]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in found if event["choices"])


async def test_a_whole_answer_is_passed_on_with_who_gave_it(world, replica):
    async with world() as w:
        await w.set(stable=[replica("r1")])
        response = await w.chat(headers={"x-request-id": "abc"})
        assert response.json()["choices"][0]["message"]["content"] == "The quick brown fox."
        assert response.headers["x-request-id"] == "abc"
        assert (response.headers["x-narrowgauge-revision"], response.headers["x-narrowgauge-role"]) == ("r1", "stable")
        assert len(response.headers.get_list("date")) == 1
        (record,) = await w.records(1)
    expected = {"model": "m", "revision": "r1", "role": "stable", "shadow": False, "status": 200, "fault": None}
    assert expected.items() <= record.items()
    assert (record["finish_reason"], record["prompt_tokens"], record["output_tokens"]) == ("stop", 7, 5)
    assert 0 < record["ttft_s"] <= record["e2e_s"] < 5
    assert record["itl_p50_s"] is None
    assert abs(record["t_end"] - time.time()) < 10


async def test_a_stream_is_passed_on_without_the_replicas_comments_and_recorded(world, replica):
    stable = replica("r1")
    stable.gap_s = 0.02
    async with world() as w:
        await w.set(stable=[stable])
        response = await w.chat(stream=True)
        (record,) = await w.records(1)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert (
        response.headers["x-narrowgauge-ignored-fields"] == "frobnicate"
    )  # of our own headers, the one it alone knows
    assert response.headers["x-narrowgauge-role"] == "stable"
    assert ": queued" not in response.text
    assert events(response.text)[-1] == "[DONE]"
    assert all(event["choices"] for event in events(response.text)[:-1]), "the client did not ask for usage"
    assert words(response.text) == "The quick brown fox."
    assert stable.requests[0][2]["stream_options"] == {"include_usage": True}
    assert (record["finish_reason"], record["prompt_tokens"], record["output_tokens"]) == ("stop", 7, 5)
    assert 0.01 < record["itl_p50_s"] < 1
    assert record["ttft_s"] + 3 * record["itl_p50_s"] < record["e2e_s"]


async def test_a_client_who_asks_for_usage_gets_it(world, replica):
    async with world() as w:
        await w.set(stable=[replica("r1")])
        response = await w.chat(stream=True, stream_options={"include_usage": True})
    assert events(response.text)[-2]["usage"]["completion_tokens"] == 5


async def test_the_official_client_streams_through_it(world, replica):
    async with world() as w:
        await w.set(stable=[replica("r1")])
        async with openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(**BODY)
            chunks = [chunk async for chunk in stream]
            assert [model.id async for model in client.models.list()] == ["m"]
            assert (await client.models.retrieve("m")).id == "m"
            with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
                await client.chat.completions.create(**{**BODY, "model": "other"})
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "The quick brown fox."
    assert {chunk.system_fingerprint for chunk in chunks} == {"r1"}


async def test_each_event_arrives_as_it_is_made(world, replica, raw):
    stable = replica("r1")
    stable.gate.clear()
    async with world() as w:
        await w.set(stable=[stable])
        async with raw.post(w.url + CHAT, json=BODY) as response:
            first = await response.content.readany()  # the replica is held back after this event
            assert words(first.decode()) == "The"
            stable.gate.set()
            rest = await response.read()
    assert words(rest.decode()) == " quick brown fox."


async def test_silence_is_answered_with_headers_then_with_comments(world, replica, raw):
    stable = replica("r1")
    stable.first_delay_s = 1.0
    async with world(early_headers_s=0.1, comment_s=0.1) as w:
        await w.set(stable=[stable])
        async with raw.post(w.url + CHAT, json=BODY) as response:
            assert (response.status, response.headers["x-narrowgauge-revision"]) == (200, "r1")
            text = (await response.read()).decode()
    assert text.index(": waiting") < text.index("data: ")
    assert text.count(": waiting") >= 2
    assert words(text) == "The quick brown fox."


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_who_leaves_before_the_first_byte_stops_the_work(world, replica, raw, until, stream):
    stable = replica("r1")
    stable.mode = "silent"
    async with world() as w:
        await w.set(stable=[stable])
        request = asyncio.ensure_future(raw.post(w.url + CHAT, json={**BODY, "stream": stream}))
        await until(lambda: stable.requests)
        request.cancel()
        await until(lambda: stable.cut_off == 1)
        (record,) = await w.records(1)
    assert (record["status"], record["fault"], record["ttft_s"]) == (499, "client", None)


async def test_a_client_who_leaves_within_a_stream_stops_the_work(world, replica, raw, until):
    stable = replica("r1")
    stable.gate.clear()
    async with world() as w:
        await w.set(stable=[stable])
        response = await raw.post(w.url + CHAT, json=BODY)
        await response.content.readany()
        response.close()
        (record,) = await w.records(1)
        in_flight = (await w.admin.get("/admin/v1/inflight")).json()["revisions"]["r1"]["in_flight"]
        await until(lambda: stable.cut_off == 1)
    assert (record["status"], record["fault"], record["finish_reason"]) == (499, "client", None)
    assert record["ttft_s"] > 0
    assert in_flight == 0


async def test_a_client_who_closes_after_the_end_has_left_nothing_behind(world, replica, raw):
    async with world() as w:
        await w.set(stable=[replica("r1")])
        for _ in range(5):
            async with raw.post(w.url + CHAT, json=BODY) as response:
                while b"[DONE]" not in await response.content.readany():
                    pass
                response.close()
        records = await w.records(5)
    assert [(record["status"], record["fault"]) for record in records] == [(200, None)] * 5


@pytest.mark.parametrize("mode", ["one_word", "no_end"])
async def test_a_stream_that_is_cut_ends_with_an_error_in_band(world, replica, mode):
    stable = replica("r1")
    stable.mode = mode
    async with world() as w:
        await w.set(stable=[stable])
        response = await w.chat(stream=True)
        (record,) = await w.records(1)
        async with openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="what came so far is not the whole answer"):
                _ = [chunk async for chunk in await client.chat.completions.create(**BODY)]
    assert events(response.text)[-2]["error"]["code"] == 502
    assert events(response.text)[-1] == "[DONE]"
    assert words(response.text) == ("The" if mode == "one_word" else "The quick brown fox.")
    assert (record["status"], record["fault"]) == (502, "replica")
    assert len(stable.requests) == 2, "what a client has seen a part of is not repeated"


async def test_an_error_that_the_replica_tells_in_band_is_told_once(world, replica):
    stable = replica("r1")
    stable.mode = "error_later"
    async with world() as w:
        await w.set(stable=[stable])
        response = await w.chat(stream=True)
        (record,) = await w.records(1)
    assert [event["error"]["message"] for event in events(response.text)[:-1] if "error" in event] == [
        "the engine died"
    ]
    assert events(response.text)[-1] == "[DONE]"
    assert (record["status"], record["fault"]) == (500, "replica")


async def test_a_replica_that_falls_silent_within_a_stream_is_given_up(world, replica):
    stable = replica("r1")
    stable.gate.clear()
    async with world(idle_s=0.3) as w:
        await w.set(stable=[stable])
        response = await w.chat(stream=True)
        (record,) = await w.records(1)
    assert events(response.text)[-2]["error"]["code"] == 504
    assert (record["status"], record["fault"]) == (504, "replica")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_of_the_replica_is_the_clients_fault_and_passed_on(world, replica, stream):
    stable = replica("r1")
    stable.mode, stable.status = "status", 400
    async with world() as w:
        await w.set(stable=[stable])
        response = await w.chat(stream=stream)
        (record,) = await w.records(1)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "not now")
    assert (record["status"], record["fault"], record["ttft_s"]) == (400, "client", None)
    assert len(stable.requests) == 1


async def test_an_error_after_early_headers_goes_in_band(world, replica):
    stable = replica("r1")
    stable.mode = "silent"
    async with world(early_headers_s=0.05, idle_s=0.3) as w:
        await w.set(stable=[stable])
        response = await w.chat(stream=True)
    assert response.status_code == 200
    assert response.text.startswith(": waiting\n\n")
    assert events(response.text)[0]["error"]["code"] == 504
    assert events(response.text)[1:] == ["[DONE]"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}"])
async def test_a_body_that_cannot_be_read_is_a_400_as_openai_words_it(world, replica, body):
    async with world() as w:
        await w.set(stable=[replica("r1")])
        response = await w.http.post(CHAT, content=body)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_above_the_limit_is_refused_with_or_without_its_length(world, replica):
    stable = replica("r1")

    async def pieces():
        for _ in range(20):
            yield b"x" * 100

    async with world(max_body_bytes=1_000) as w:
        await w.set(stable=[stable])
        for content in (b"x" * 1_001, pieces()):
            response = await w.http.post(CHAT, content=content)
            assert response.status_code == 413
            assert "larger than 1000 bytes" in response.json()["error"]["message"]
        assert (await w.chat()).status_code == 200


async def test_paths_and_methods_that_do_not_exist_are_openai_errors(world):
    async with world() as w:
        for method, path, status in (
            ("GET", CHAT, 405),
            ("POST", "/v1/images", 404),
            ("GET", "/admin/v1/traffic", 404),
        ):
            response = await w.http.request(method, path)
            assert response.status_code == status
            assert path in response.json()["error"]["message"]


async def test_every_refusal_is_an_answer_that_a_strict_client_reads(world, replica, raw):
    """aiohttp refuses an answer with two lengths; httpx passes over the second."""
    stable = replica("r1")
    stable.mode, stable.status = "status", 422
    nobody = {**BODY, "model": "other", "stream": False}
    async with world() as w:
        await w.set(stable=[stable])
        asked = {
            404: raw.post(w.url + CHAT, json=nobody),
            400: raw.post(w.url + CHAT, data="{"),
            405: raw.put(w.url + CHAT, json=BODY),
            422: raw.post(w.url + CHAT, json=BODY),
        }
        for status, request in asked.items():
            async with request as response:
                assert response.status == status
                assert (await response.json())["error"]["message"]
        stable.kill()
        for stream in (True, False):
            async with raw.post(w.url + CHAT, json={**BODY, "stream": stream}) as response:
                assert response.status == 503
                assert (await response.json())["error"]["type"] == "ServiceUnavailableError"


async def test_without_a_ready_replica_the_answer_is_503_with_retry_after(world, replica, until):
    stable = replica("r1")
    stable.kill()
    async with world() as w:
        await w.set(stable=[stable])
        response = await w.chat(stream=True)
        (record,) = await w.records(1)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "no replica of 'm' is ready" in response.json()["error"]["message"]
        assert (record["revision"], record["status"], record["fault"]) == ("r1", 503, "replica")
        stable.revive()
        await until(lambda: w.gateway.pool.ready("r1", [stable.url]))
        assert (await w.chat()).status_code == 200


async def test_other_paths_are_proxied_and_not_recorded(world, replica):
    stable = replica("r1")
    async with world() as w:
        await w.set(stable=[stable])
        assert (await w.http.post("/tokenize?x=1", json={"model": "m", "prompt": "a"})).status_code == 200
        assert (await w.http.post("/v1/completions", json={"model": "m", "prompt": "a"})).status_code == 200
        records = await w.records(1)
    assert [path for path, _, _ in stable.requests] == ["/tokenize", "/v1/completions"]
    assert len(records) == 1


async def test_metrics_count_what_clients_saw(world, replica):
    stable = replica("r1")
    async with world() as w:
        await w.set(stable=[stable])
        await w.chat()
        text = (await w.http.get("/metrics")).text
        assert 'narrowgauge_gateway_requests_total{fault="",model="m",role="stable",status="200"} 1.0' in text
        assert 'narrowgauge_gateway_output_tokens_total{model="m",role="stable"} 5.0' in text
        assert 'narrowgauge_gateway_traffic_ratio{model="m",role="stable"} 1.0' in text
        assert 'narrowgauge_gateway_requests_in_flight{model="m",role="stable"} 0.0' in text
        assert f'narrowgauge_gateway_replica_up{{model="m",replica="{stable.url}",role="stable"}} 1.0' in text
        await w.set(epoch=2, stable=[replica("r2")])
        assert "r1" not in (await w.http.get("/metrics")).text, "what is gone is shown no more"
