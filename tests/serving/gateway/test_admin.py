"""The admin API, as the controller uses it: whole states, epochs, records, counts; and streams that outlive changes."""

import asyncio
import json

import pytest
import xxhash

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_state_is_set_and_read_back_whole(world, replica):
    async with world() as w:
        assert (await w.admin.get("/admin/v1/traffic/m")).status_code == 404
        state = await w.set(stable=[replica("r1")], canary=[replica("r2")], canary_bp=123, shadow_bp=4)
        assert (await w.admin.get("/admin/v1/traffic/m")).json() == state
        assert (await w.admin.get("/admin/v1/traffic")).json() == {"m": state}
        assert (await w.http.get("/v1/models")).json()["data"][0]["id"] == "m"


async def test_an_older_epoch_gets_409_with_the_state_in_force(world, replica):
    stable = replica("r1")
    async with world() as w:
        state = await w.set(stable=[stable], epoch=5)
        for sent, words in (
            ({**state, "epoch": 4}, "older"),
            ({**state, "shadow_bp": 0, "replicas": {"r1": ["http://h:1"]}}, "equal"),
        ):
            response = await w.admin.put("/admin/v1/traffic/m", json=sent)
            assert response.status_code == 409
            assert response.json()["state"] == state
            assert words in response.json()["error"]
        assert (await w.admin.put("/admin/v1/traffic/m", json=state)).json() == state, "the same once more is no change"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the body is not valid JSON"),
        (b"[]", "must be a mapping with the keys of TrafficState"),
        (b'{"epoch": 1, "stable": "a"}', "replicas: revision a is named but has no replica"),
        (b'{"epoch": 1, "stable": "a", "canary_bp": 5, "replicas": {"a": ["http://h:1"]}}', "but there is no canary"),
    ],
)
async def test_a_state_that_cannot_be_served_is_a_400_and_changes_nothing(world, replica, content, message):
    async with world() as w:
        state = await w.set(stable=[replica("r1")])
        response = await w.admin.put("/admin/v1/traffic/m", content=content)
        assert response.status_code == 400
        assert message in response.json()["error"]
        assert (await w.admin.get("/admin/v1/traffic/m")).json() == state


async def test_names_with_slashes_are_names(world, replica):
    async with world() as w:
        await w.set(model="org%2Fmodel", stable=[replica("r1")])
        assert list((await w.admin.get("/admin/v1/traffic")).json()) == ["org/model"]
        assert (await w.http.post("/v1/chat/completions", json={**BODY, "model": "org/model"})).status_code == 200


async def test_records_are_read_in_pages_and_once(world, replica):
    async with world() as w:
        await w.set(stable=[replica("r1")])
        empty = (await w.admin.get("/admin/v1/records")).json()
        assert empty["records"] == []
        for _ in range(5):
            await w.chat()
        await w.records(5)
        first = (await w.admin.get(f"/admin/v1/records?after={empty['next']}&limit=3")).json()
        second = (await w.admin.get(f"/admin/v1/records?after={first['next']}&limit=3")).json()
        third = (await w.admin.get(f"/admin/v1/records?after={second['next']}&limit=3")).json()
        assert [len(page["records"]) for page in (first, second, third)] == [3, 2, 0]
        assert third["next"] == second["next"] == second["records"][-1]["seq"] == empty["next"] + 5
        for query in ("after=-1", "after=x", "limit=1.5", "after=" + "9" * 30):
            response = await w.admin.get(f"/admin/v1/records?{query}")
            assert response.status_code == 400
            assert "must be a whole number" in response.json()["error"]


async def test_a_promotion_and_a_drain_cut_no_stream(world, replica, raw):
    old, new = replica("r1"), replica("r2")
    async with world() as w:
        await w.set(stable=[old], canary=[new], canary_bp=5_000)
        old.gate.clear()
        new.gate.clear()
        streams = []
        for track in ("stable", "canary"):
            headers = {"x-narrowgauge-track": track}
            streams.append(
                await raw.post(f"{w.url}/v1/chat/completions", json={**BODY, "stream": True}, headers=headers)
            )
            await streams[-1].content.readany()
        await w.set(epoch=2, stable=[new])
        in_flight = (await w.admin.get("/admin/v1/inflight")).json()["revisions"]
        assert in_flight["r1"]["replicas"] == {old.url: {"in_flight": 1, "ready": True}}
        assert in_flight["r2"]["in_flight"] == 1
        old.gate.set()
        new.gate.set()
        ends = [(await stream.read()).decode() for stream in streams]
        assert all(end.endswith("data: [DONE]\n\n") and "error" not in end for end in ends)
        assert [stream.headers["x-narrowgauge-role"] for stream in streams] == ["stable", "canary"]
        assert (await w.chat(headers={"x-narrowgauge-track": "canary"})).headers["x-narrowgauge-revision"] == "r2"
        await w.records(3)
        assert set((await w.admin.get("/admin/v1/inflight")).json()["revisions"]) == {"r2"}, "drained"


async def test_a_sticky_session_returns_from_a_canary_that_was_aborted(world, replica):
    key = next(f"s{n}" for n in range(100) if xxhash.xxh32(f"s{n}".encode(), seed=7).intdigest() % 10_000 < 1_000)
    stable, canary = replica("r1"), replica("r2")
    async with world() as w:
        await w.set(stable=[stable], canary=[canary], canary_bp=1_000)
        assert (await w.chat(headers={"x-session-id": key})).headers["x-narrowgauge-role"] == "canary"
        assert (await w.chat(user=key)).headers["x-narrowgauge-role"] == "canary"
        await w.set(epoch=2, stable=[stable])
        for headers in ({"x-session-id": key}, {"x-session-id": key, "x-narrowgauge-track": "canary"}):
            assert (await w.chat(headers=headers)).headers["x-narrowgauge-role"] == "stable"


async def test_a_canary_gets_traffic_from_the_moment_it_is_ready(world, replica, until):
    stable, canary = replica("r1"), replica("r2")
    canary.ready = False
    async with world() as w:
        await w.set(stable=[stable], canary=[canary], canary_bp=10_000)
        assert (await w.chat()).headers["x-narrowgauge-role"] == "stable"
        canary.ready = True
        await until(lambda: w.gateway.pool.ready("r2", [canary.url]))
        assert (await w.chat()).headers["x-narrowgauge-role"] == "canary"
        canary.ready = False
        await until(lambda: not w.gateway.pool.ready("r2", [canary.url]))
        assert (await w.chat()).headers["x-narrowgauge-role"] == "stable"


async def test_a_restarted_gateway_serves_the_kept_state_at_once(world, replica, tmp_path):
    stable, canary = replica("r1"), replica("r2")
    async with world() as w:
        state = await w.set(epoch=7, stable=[stable], canary=[canary], canary_bp=500)
        await w.chat()
        (before,) = await w.records(1)
    assert json.loads((tmp_path / "traffic" / "m.json").read_bytes()) == state
    async with world() as w:
        assert (await w.chat(headers={"x-narrowgauge-track": "stable"})).status_code == 200
        assert (await w.admin.get("/admin/v1/traffic/m")).json() == state
        (after,) = await w.records(1)
    assert after["seq"] > before["seq"]


async def test_two_models_are_served_apart(world, replica):
    async with world() as w:
        await w.set(stable=[replica("r1")])
        await w.set(model="n", stable=[replica("r2")])
        answers = await asyncio.gather(*(w.chat(model=model) for model in ("m", "n")))
        models = (await w.http.get("/v1/models")).json()["data"]
    assert [answer.headers["x-narrowgauge-revision"] for answer in answers] == ["r1", "r2"]
    assert [model["id"] for model in models] == ["m", "n"]


async def test_both_faces_say_how_the_gateway_is(world, replica):
    stable = replica("r1")
    async with world() as w:
        await w.set(stable=[stable])
        for face in (w.http, w.admin):
            assert (await face.get("/live")).json() == {"status": "live"}
            assert (await face.get("/ready")).json() == {"status": "ready", "models": {"m": {"stable_ready": 1}}}
            assert (await face.get("/health")).status_code == 200
            assert (await face.get("/version")).json()["process"] == "gateway"
        w.gateway.draining = True
        assert (await w.http.get("/ready")).status_code == 503
        assert (await w.http.get("/live")).status_code == 200
        assert (await w.admin.get("/admin/v1/nothing")).json() == {"error": "GET /admin/v1/nothing: Not Found"}
