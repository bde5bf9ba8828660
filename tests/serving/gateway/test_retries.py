"""What a failing replica costs its client: nothing before the first byte, and a repeat never lands on the canary."""

import json

import pytest

from narrowgauge.serving.gateway.replicas import ProbeRules, ReplicaPool
from narrowgauge.serving.gateway.retries import Failed, Tries, fault_of, is_failure, next_try
from narrowgauge.serving.gateway.routing import NoReadyReplica, Route, Router
from narrowgauge.serving.gateway.traffic import TrafficState

LATER = ProbeRules(interval_s=30.0)  # probes do not interfere
NOT_SENT = Failed(status=502, sent=False, lost=False)
LOST = Failed(status=502, sent=True, lost=True)
REFUSAL = Failed(status=503, sent=True, lost=False)


class Case:
    """A pool of ready replicas: stable `a` with two of them, canary `b` with two, and what has been tried so far."""

    def __init__(self, stable=2):
        urls = {
            "a": tuple(f"http://127.0.0.1:{n}" for n in range(1, 1 + stable)),
            "b": ("http://127.0.0.1:8", "http://127.0.0.1:9"),
        }
        self.state = TrafficState(epoch=1, stable="a", canary="b", canary_bp=5_000, replicas=urls)
        self.pool = ReplicaPool(ProbeRules())
        self.replicas = {replica.url[-1]: replica for replica in self.pool.follow("m", self.state)}
        for replica in self.replicas.values():
            replica.health.observe("ready")
        self.tries = Tries()

    def fail(self, where, how):
        role = "canary" if where in "89" else "stable"
        route = Route(model="m", role=role, replica=self.replicas[where])
        self.tries.add(route, how)
        following = next_try(self.tries, route, how, state=self.state, router=Router(self.pool))
        return None if isinstance(following, NoReadyReplica) else (following.role, following.replica.url[-1])


@pytest.mark.parametrize("how", [NOT_SENT, LOST, REFUSAL])
def test_a_request_that_stable_failed_goes_to_another_stable_replica(how):
    assert Case().fail("1", how) == ("stable", "2")


@pytest.mark.parametrize("how", [NOT_SENT, LOST, REFUSAL])
def test_a_request_that_the_canary_failed_goes_to_stable_not_to_the_other_canary(how):
    assert Case().fail("8", how) in {("stable", "1"), ("stable", "2")}


def test_a_sent_request_is_repeated_once():
    case = Case()
    assert case.fail("8", REFUSAL) is not None
    assert case.fail("1", REFUSAL) is None


def test_one_that_never_reached_a_replica_is_tried_on_each():
    case = Case()
    assert case.fail("8", NOT_SENT)[0] == "stable"
    assert case.fail("1", NOT_SENT) == ("stable", "2")
    assert case.fail("2", NOT_SENT) is None


def test_the_only_stable_replica_gets_a_broken_connection_again_but_not_a_refusal():
    assert Case(stable=1).fail("1", LOST) == ("stable", "1")
    assert Case(stable=1).fail("1", REFUSAL) is None
    assert Case(stable=1).fail("1", NOT_SENT) is None
    case = Case(stable=1)
    case.replicas["1"].health.observe("refused")
    assert case.fail("1", LOST) is None, "it is dead, not merely closing an old connection"


@pytest.mark.parametrize(
    ("status", "failure", "fault"),
    [
        *((200, False, None), (302, False, None), (400, False, "client"), (413, False, "client")),
        *((404, True, "replica"), (429, False, "replica"), (500, True, "replica"), (501, False, "replica")),
        *((502, True, "replica"), (503, True, "replica"), (504, True, "replica")),
    ],
)
def test_whose_fault_an_answer_is_and_whether_another_replica_may_do_better(status, failure, fault):
    assert (is_failure(status), fault_of(status)) == (failure, fault)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_was_killed_costs_no_request(world, replica, stream):
    first, second = replica("r1"), replica("r1")
    async with world(probes=LATER) as w:
        await w.set(stable=[first, second])
        for _ in range(4):  # the pool holds connections to both
            await w.chat()
        first.kill()
        answers = [await w.chat(stream=stream) for _ in range(10)]
        records = await w.records(14)
    assert [answer.status_code for answer in answers] == [200] * 10
    assert all("fox" in answer.text for answer in answers)
    failed = [record for record in records if record["fault"] == "replica"]
    assert 1 <= len(failed) <= 2, "a refused connection takes the replica out at once"


@pytest.mark.parametrize(
    ("mode", "stream"),
    [
        *(("status", True), ("no_headers", True), ("no_data", True), ("error_first", True), ("dead", True)),
        *(("status", False), ("no_headers", False), ("dead", False)),
    ],
)
async def test_what_the_canary_fails_before_the_first_byte_stable_answers(world, replica, mode, stream):
    stable, canary = replica("r1"), replica("r2")
    async with world(probes=LATER) as w:
        await w.set(stable=[stable], canary=[canary], canary_bp=10_000)
        canary.kill() if mode == "dead" else setattr(canary, "mode", mode)
        answer = await w.chat(stream=stream)
        failed, answered = await w.records(2)
        retries = (await w.http.get("/metrics")).text
    assert answer.status_code == 200
    assert "r1" in answer.text
    assert "error" not in answer.text
    assert (answer.headers["x-narrowgauge-revision"], answer.headers["x-narrowgauge-role"]) == ("r1", "stable")
    assert (failed["revision"], failed["role"], failed["fault"]) == ("r2", "canary", "replica")
    assert failed["status"] >= 500
    assert (answered["revision"], answered["status"], answered["fault"]) == ("r1", 200, None)
    assert 'narrowgauge_gateway_retries_total{model="m",role="canary"} 1.0' in retries


async def test_after_early_headers_the_fingerprint_names_who_answered(world, replica):
    stable, canary = replica("r1"), replica("r2")
    canary.mode, canary.first_delay_s = "error_first", 0.3
    async with world(early_headers_s=0.05) as w:
        await w.set(stable=[stable], canary=[canary], canary_bp=10_000)
        answer = await w.chat(stream=True)
        _, answered = await w.records(2)
    assert answer.headers["x-narrowgauge-revision"] == "r2"
    data = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part.startswith("data: {")]
    assert {event["system_fingerprint"] for event in data} == {"r1"}
    assert answered["e2e_s"] < 0.3, "stable is not charged for the time that the canary took"


@pytest.mark.parametrize("mode", ["status", "no_headers", "dead"])
async def test_what_stable_fails_is_never_tried_on_the_canary(world, replica, mode):
    stable, canary = replica("r1"), replica("r2")
    async with world(probes=LATER) as w:
        await w.set(stable=[stable], canary=[canary])
        stable.kill() if mode == "dead" else setattr(stable, "mode", mode)
        answer = await w.chat()
        records = await w.records(1)
    assert answer.status_code in (502, 503)
    assert answer.json()["error"]["code"] == answer.status_code
    assert canary.requests == []
    assert {record["revision"] for record in records} == {"r1"}
    assert len(stable.requests) == {"status": 1, "no_headers": 2, "dead": 0}[mode]


@pytest.mark.parametrize(("replicas", "count", "status"), [(2, 1, 200), (2, None, 503), (1, None, 503)])
async def test_a_full_replica_is_answered_for_by_another_once(world, replica, replicas, count, status):
    stable = [replica("r1") for _ in range(replicas)]
    for one in stable:
        one.mode, one.count = "status", count
    async with world(probes=LATER) as w:
        await w.set(stable=stable)
        if count == 1:
            stable[1].mode = "ok"
        answer = await w.chat()
    assert answer.status_code == status
    assert sum(len(one.requests) for one in stable) == min(replicas, 2)
    if status == 503:
        assert (answer.headers["retry-after"], answer.json()["error"]["message"]) == ("7", "not now")


async def test_a_kept_connection_that_the_replica_has_closed_costs_no_request(world, replica):
    stable = replica("r1")
    async with world(probes=LATER) as w:
        await w.set(stable=[stable])
        assert (await w.chat()).status_code == 200
        stable.mode, stable.count = "no_headers", 1  # what a connection closed under the request looks like
        assert (await w.chat()).status_code == 200
    assert len(stable.requests) == 3
