from types import SimpleNamespace

import httpx
import pytest

from narrowgauge.engine.async_engine import EngineDead
from narrowgauge.serving.app import create_replica_app
from narrowgauge.serving.health import HANG_S, ReplicaIdentity, ReplicaState, create_admin_app


class Engine:
    """Only what health looks at."""

    def __init__(self):
        self.death = None
        self.age_s = 0.1
        self.max_model_len = 64

    def stats(self):
        return SimpleNamespace(
            running=0,
            waiting=0,
            kv_blocks_total=0,
            kv_blocks_used=0,
            preemptions=0,
            steps=0,
            heartbeat_age_s=self.age_s,
            fragmentation=0.0,
        )


@pytest.fixture
def state():
    return ReplicaState(identity=ReplicaIdentity(model="m", revision="r1", digest="abc"))


@pytest.fixture
async def client(state):
    transport = httpx.ASGITransport(create_replica_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
        yield client


async def codes(client):
    return {path: (await client.get(path)).status_code for path in ("/live", "/ready", "/health")}


async def test_a_loading_replica_lives_but_takes_nothing(state, client):
    state.progress = "fetching models:/m@champion"
    assert await codes(client) == {"/live": 200, "/ready": 503, "/health": 503}
    assert (await client.get("/ready")).json()["reason"] == "fetching models:/m@champion"
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = await client.post(path, json={"prompt": "a", "messages": [{"role": "user"}], "tokens": [1]})
        assert answer.status_code == 503, path
        assert int(answer.headers["retry-after"]) >= 1
        assert "fetching" in answer.json()["error"]["message"]
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
    metrics = (await client.get("/metrics")).text
    assert 'narrowgauge_requests_rejected_total{model="m",reason="unavailable",role="stable"} 2.0' in metrics
    assert "_created" not in metrics


async def test_a_loaded_replica_is_ready(state, client):
    state.attach(Engine(), sampling_defaults={})
    assert await codes(client) == {"/live": 200, "/ready": 200, "/health": 200}
    assert (await client.get("/health")).content == b""


async def test_a_draining_replica_lives_and_sends_clients_away(state, client):
    state.attach(Engine(), sampling_defaults={})
    state.draining = True
    assert await codes(client) == {"/live": 200, "/ready": 503, "/health": 200}
    answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert answer.headers["connection"] == "close"
    assert "retry-after" in answer.headers


async def test_a_dead_engine_asks_for_a_restart(state, client):
    engine = Engine()
    state.attach(engine, sampling_defaults={})
    engine.death = EngineDead("out of memory")
    assert await codes(client) == {"/live": 503, "/ready": 503, "/health": 503}
    assert "out of memory" in (await client.get("/live")).json()["reason"]


async def test_a_silent_loop_counts_as_dead(state, client):
    engine = Engine()
    state.attach(engine, sampling_defaults={})
    engine.age_s = HANG_S + 1
    assert await codes(client) == {"/live": 503, "/ready": 503, "/health": 503}


async def test_version_says_what_is_served(client):
    body = (await client.get("/version")).json()
    assert set(body) == {"model", "revision", "digest", "pid", "version"}
    assert (body["model"], body["revision"], body["digest"]) == ("m", "r1", "abc")


async def test_drain_is_only_on_the_admin_application(state, client):
    assert (await client.post("/drain")).status_code == 404
    calls = []
    transport = httpx.ASGITransport(create_admin_app(state, drain=lambda: calls.append(1)))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
        answer = await admin.post("/drain")
        assert (answer.status_code, answer.json()) == (202, {"draining": True, "in_flight": 0})
        assert calls == [1]
        assert (await admin.get("/version")).json()["revision"] == "r1"
        assert (await admin.get("/ready")).status_code == 503


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_a_request_id_is_echoed(client, given):
    assert (await client.get("/live", headers={"x-request-id": given})).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
async def test_a_request_id_that_could_harm_a_log_is_replaced(client, given):
    headers = [(b"x-request-id", given.encode())]
    fresh = (await client.get("/live", headers=headers)).headers["x-request-id"]
    assert fresh not in ("", given)
