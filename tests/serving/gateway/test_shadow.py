"""Shadow copies: measured, thrown away, first to be dropped."""

import asyncio

import pytest


@pytest.mark.parametrize("stream", [True, False])
async def test_a_copy_goes_to_the_canary_and_its_record_is_marked(world, replica, stream):
    stable, canary = replica("r1"), replica("r2")
    async with world() as w:
        await w.set(stable=[stable], canary=[canary], shadow_bp=10_000)
        answer = await w.chat(stream=stream, max_tokens=40)
        records = {record["revision"]: record for record in await w.records(2)}
    assert answer.headers["x-narrowgauge-revision"] == "r1"
    assert "r2" not in answer.text
    (path, headers, body), (_, original_headers, original) = canary.requests[0], stable.requests[0]
    assert (path, body) == ("/v1/chat/completions", original)
    assert headers["x-narrowgauge-shadow"] == "1"
    assert "x-narrowgauge-shadow" not in original_headers
    assert (records["r1"]["role"], records["r1"]["shadow"]) == ("stable", False)
    shadow = records["r2"]
    assert (shadow["role"], shadow["shadow"], shadow["status"], shadow["fault"]) == ("canary", True, 200, None)
    assert (shadow["output_tokens"], shadow["finish_reason"]) == (5, "stop")
    assert shadow["ttft_s"] > 0


async def test_a_client_waits_for_no_copy_and_none_is_repeated(world, replica):
    stable, canary = replica("r1"), replica("r2")
    async with world(early_headers_s=20) as w:
        await w.set(stable=[stable], canary=[canary], shadow_bp=10_000)
        canary.gate.clear()
        answer = await w.chat(stream=True)
        assert answer.text.endswith("data: [DONE]\n\n")
        canary.mode = "one_word"
        canary.gate.set()
        canary.mode = "status"
        await w.chat(stream=True)
        shadows = [record for record in await w.records(4) if record["shadow"]]
    assert sorted(record["status"] for record in shadows)[-1] == 503
    assert len(stable.requests) == len(canary.requests) == 2


async def test_copies_above_the_limit_are_dropped(world, replica, until):
    stable, canary = replica("r1"), replica("r2")
    canary.gate.clear()
    async with world(shadow_in_flight=2) as w:
        await w.set(stable=[stable], canary=[canary], shadow_bp=10_000)
        await asyncio.gather(*(w.chat() for _ in range(5)))
        await until(lambda: len(canary.requests) == 2)
        metrics = (await w.http.get("/metrics")).text
        in_flight = (await w.admin.get("/admin/v1/inflight")).json()["revisions"]["r2"]["in_flight"]
        canary.gate.set()
        await w.records(7)
    assert 'shadow_copies_total{model="m",result="dropped"} 3.0' in metrics
    assert 'shadow_copies_total{model="m",result="sent"} 2.0' in metrics
    assert in_flight == 2


async def test_nothing_is_copied_that_names_tools_or_that_the_canary_answers(world, replica):
    stable, canary = replica("r1"), replica("r2")
    async with world() as w:
        await w.set(stable=[stable], canary=[canary], shadow_bp=10_000)
        await w.chat(tools=[{"type": "function", "function": {"name": "f"}}])
        await w.chat(headers={"x-narrowgauge-track": "canary"})
        await w.http.post("/tokenize", json={"model": "m", "prompt": "a"})
        records = await w.records(2)
    assert [record["shadow"] for record in records] == [False, False]
    assert len(canary.requests) == 1


@pytest.mark.parametrize("mode", ["status", "no_headers", "one_word", "no_end", "error_first", "dead"])
async def test_a_canary_that_fails_its_copies_is_recorded_and_nobody_notices(world, replica, mode):
    stable, canary = replica("r1"), replica("r2")
    async with world() as w:
        await w.set(stable=[stable], canary=[canary], shadow_bp=10_000)
        canary.kill() if mode == "dead" else setattr(canary, "mode", mode)
        answer = await w.chat(stream=True)
        (shadow,) = [record for record in await w.records(2) if record["shadow"]]
    assert answer.status_code == 200
    assert "error" not in answer.text
    assert shadow["fault"] == "replica"
    assert shadow["status"] >= 500
