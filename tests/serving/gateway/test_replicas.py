"""Readiness of replicas and their requests in flight."""

import pytest

from narrowgauge.serving.gateway.replicas import Health, ProbeRules, ReplicaPool, least_busy
from narrowgauge.serving.gateway.traffic import TrafficState

RULES = ProbeRules(misses=3, returns=2)


def state(**replicas):
    return TrafficState(epoch=1, stable="a", replicas={name: tuple(urls) for name, urls in replicas.items()})


def url(number):
    return f"http://127.0.0.1:{8000 + number}"


@pytest.mark.parametrize(
    ("seen", "ready"),
    [
        ([], None),
        (["ready"], True),
        (["missed"], None),
        (["refused"], False),
        (["ready", "missed", "missed"], True),
        (["ready", "missed", "missed", "missed"], False),
        (["ready", "missed", "missed", "ready", "missed", "missed"], True),
        (["ready", "refused"], False),
        (["ready", "refused", "ready"], False),
        (["ready", "refused", "ready", "ready"], True),
        (["ready", "refused", "ready", "missed", "ready"], False),
        (["ready", "refused", "ready", "refused", "ready"], False),
        (["refused", "ready", "ready"], True),
    ],
)
def test_a_replica_is_out_after_three_misses_or_a_refusal_and_back_after_two_answers(seen, ready):
    health = Health(RULES)
    for one in seen:
        health.observe(one)
    assert health.ready is ready


def test_the_last_good_replica_of_stable_is_kept_when_all_are_out():
    pool = ReplicaPool(RULES)
    first, second = pool.follow("m", state(a=[url(0), url(1)]))
    first.health.observe("ready")
    second.health.observe("ready")
    second.health.observe("refused")
    assert pool.ready_or_last_good("m", "a", (url(0), url(1))) == [first]
    first.health.observe("refused")
    assert pool.ready("a", (url(0), url(1))) == []
    assert pool.ready_or_last_good("m", "a", (url(0), url(1))) == [first]


def test_replicas_not_probed_yet_are_tried_where_none_was_ever_good():
    pool = ReplicaPool(RULES)
    new, dead = pool.follow("m", state(a=[url(0), url(1)]))
    dead.health.observe("refused")
    assert pool.ready_or_last_good("m", "a", (url(0), url(1))) == [new]
    assert pool.ready("a", (url(0), url(1))) == []


def test_a_known_replica_keeps_its_health_when_the_state_changes():
    pool = ReplicaPool(RULES)
    (first,) = pool.follow("m", state(a=[url(0)]))
    first.health.observe("ready")
    new = pool.follow("m", state(a=[url(0), url(1)]))
    assert [replica.url for replica in new] == [url(1)]
    assert pool.ready("a", (url(0), url(1))) == [first]


def test_a_replica_that_left_the_state_is_counted_until_its_last_request_ends():
    pool = ReplicaPool(RULES)
    old = pool.follow("m", state(a=[url(0)], b=[url(1)]))[1]
    with old.flight():
        pool.follow("m", state(a=[url(0)]))
        assert {revision: [r.in_flight for r in replicas] for revision, replicas in pool.in_flight().items()} == {
            "a": [0],
            "b": [1],
        }
        assert [replica.url for replica in pool.named()] == [url(0)], "it is probed no more"
    assert set(pool.in_flight()) == {"a"}


def test_the_least_busy_replica_is_taken_and_equals_take_turns():
    pool = ReplicaPool(RULES)
    replicas = pool.follow("m", state(a=[url(0), url(1), url(2)]))
    turns = []
    for _ in range(6):
        chosen = least_busy(replicas)
        with chosen.flight():
            turns.append(chosen.url)
    assert turns == [url(0), url(1), url(2)] * 2
    with replicas[0].flight(), replicas[1].flight(), replicas[1].flight():
        assert least_busy(replicas) is replicas[2]
        with replicas[2].flight(), replicas[2].flight():
            assert least_busy(replicas) is replicas[0]
    assert least_busy([]) is None
