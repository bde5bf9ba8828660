"""Roles and replicas: the split, pins, and the canary that is not there."""

import random

import pytest
import xxhash

from narrowgauge.serving.gateway.replicas import ProbeRules, ReplicaPool
from narrowgauge.serving.gateway.routing import NoReadyReplica, Route, Router
from narrowgauge.serving.gateway.traffic import TrafficState

STABLE, CANARY = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


def split(canary_bp=0, shadow_bp=0, canary="b"):
    replicas = {"a": (STABLE,), "b": (CANARY,)}
    shares = {"canary_bp": canary_bp, "shadow_bp": shadow_bp}
    return TrafficState(epoch=1, stable="a", canary=canary, replicas=replicas, **shares)


@pytest.fixture
def pool():
    made = ReplicaPool(ProbeRules())
    for replica in made.follow("m", split()):
        replica.health.observe("ready")
    return made


@pytest.fixture
def router(pool):
    return Router(pool, rng=random.Random(5))


def canary_of(pool):
    return next(replica for replica in pool.named() if replica.url == CANARY)


def role(router, state, *, key=None, track=None):
    return router.route("m", state, key=key, track=track).role


def test_a_session_goes_where_its_bucket_says(router):
    for number in range(2_000):
        key = f"s{number}"
        expected = "canary" if xxhash.xxh32(key.encode(), seed=7).intdigest() % 10_000 < 2_500 else "stable"
        assert role(router, split(2_500), key=key) == expected
        assert role(router, split(2_500), key=key) == expected, "the same again"


def test_requests_without_a_key_are_split_at_random(router):
    hits = sum(role(router, split(2_500)) == "canary" for _ in range(4_000))
    assert abs(hits - 1_000) < 4 * 27.4  # √(4000 · ¼ · ¾)


def test_a_pin_beats_the_split_but_not_the_end_of_the_canary(router):
    assert role(router, split(0), track="canary") == "canary"
    assert role(router, split(10_000), track="stable") == "stable"
    assert role(router, split(canary=None), track="canary") == "stable"
    assert role(router, split(canary=None), key="sticky") == "stable"


@pytest.mark.parametrize("seen", ["refused", "missed"])
def test_a_canary_that_is_not_ready_gets_nothing(pool, router, seen):
    for _ in range(3):
        canary_of(pool).health.observe(seen)
    assert role(router, split(10_000), key="x") == "stable"
    assert role(router, split(10_000), track="canary") == "stable"
    assert router.shadow("m", split(0, 10_000)) is None


def test_a_canary_that_was_never_probed_gets_nothing():
    pool = ReplicaPool(ProbeRules())
    pool.follow("m", split())
    route = Router(pool).route("m", split(10_000), key=None, track=None)
    assert isinstance(route, Route)
    assert route.role == "stable"


def test_without_a_stable_replica_nobody_answers(pool, router):
    for replica in pool.follow("m2", TrafficState(epoch=1, stable="z", replicas={"z": ("http://127.0.0.1:1",)})):
        replica.health.observe("refused")
    state = TrafficState(epoch=1, stable="z", replicas={"z": ("http://127.0.0.1:1",)})
    assert router.route("m2", state, key=None, track=None) == NoReadyReplica(model="m2", revision="z")


def test_a_route_keeps_its_replica_when_the_state_changes(pool, router):
    route = router.route("m", split(10_000), key="x", track=None)
    pool.follow("m", TrafficState(epoch=2, stable="b", replicas={"b": (CANARY,)}))
    assert (route.revision, route.replica.url, route.replica.ready) == ("b", CANARY, True)


def test_copies_are_as_many_as_asked_for(router):
    copies = sum(router.shadow("m", split(0, 2_500)) is not None for _ in range(4_000))
    assert abs(copies - 1_000) < 4 * 27.4
    assert all(router.shadow("m", split(0, 10_000)) for _ in range(100))
    assert not any(router.shadow("m", split(0, 0)) for _ in range(100))
