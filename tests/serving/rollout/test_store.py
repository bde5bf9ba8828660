"""The store: replay, one leader, an epoch that only grows."""

import pytest

from narrowgauge.serving.rollout.gates.base import Verdict
from narrowgauge.serving.rollout.spec import Revision, read_spec
from narrowgauge.serving.rollout.state import Judged, Moved, Rollout, TrafficSet, apply, begin
from narrowgauge.serving.rollout.store import LeadershipLost, Store, StoreError


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/rollouts.db"


@pytest.fixture
def open_store(url):
    stores = []

    def make():
        stores.append(Store(url))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def rollout(name="r1", digest="1" * 64):
    spec = read_spec({"version": 1, "model": "m", "steps": [], "gates": [{"name": "readiness"}]})
    revision = Revision(model="m", uri="file:///x", digest=digest, engine_args={"threads": 1})
    return Rollout(id=name, revision=revision, spec=spec, stable=None, override="because", created_at=5.0)


EVENTS = (
    Moved(at=6.0, phase="Starting", step=-1, reason="go", deadline_at=60.0),
    Judged(at=7.0, verdicts=(Verdict(gate="readiness", result="pass", reason="ready", figures={"ready": 1.0}),)),
    TrafficSet(at=8.0, stable="abc", canary=None, canary_bp=0, shadow_bp=0),
    Moved(at=9.0, phase="Completed", step=-1, reason="done", deadline_at=9.0),
)


def run(store, events=EVENTS, name="r1"):
    state = begin(rollout(name))
    store.create(state.rollout)
    for event in events:
        state = apply(state, event)
        store.append(state, [event])
    return state


def test_a_new_process_replays_the_same_state(open_store):
    store = open_store()
    store.lead()
    state = run(store)
    again = open_store()
    assert again.state("r1") == state
    assert again.events("r1") == EVENTS
    assert again.states() == (state,)
    assert again.states(unfinished=True) == ()
    assert again.stable() == {"m": (state.rollout.revision, "r1")}
    assert again.state("r2") is None


def test_only_a_completed_rollout_changes_what_is_stable(open_store):
    store = open_store()
    store.lead()
    state = run(store, EVENTS[:3])
    assert store.states(unfinished=True) == (state,)
    assert store.stable() == {}


def test_a_leader_that_was_replaced_can_write_nothing_more(open_store):
    old, new = open_store(), open_store()
    old.lead()
    state = run(old, EVENTS[:2])
    new.lead()
    with pytest.raises(LeadershipLost, match="term 2, ours was 1"):
        old.append(apply(state, EVENTS[2]), [EVENTS[2]])
    with pytest.raises(LeadershipLost):
        old.next_traffic_epoch()
    with pytest.raises(LeadershipLost):
        old.create(rollout("r2", "2" * 64))
    assert new.events("r1") == EVENTS[:2]


def test_the_traffic_epoch_only_grows_over_leaders_and_above_the_routers(open_store):
    one = open_store()
    one.lead(at_least=40)
    assert [one.next_traffic_epoch(), one.next_traffic_epoch()] == [41, 42]
    two = open_store()
    two.lead(at_least=7)
    assert two.next_traffic_epoch() == 43
    two.lift_traffic_epoch(10)
    assert two.next_traffic_epoch() == 44
    two.lift_traffic_epoch(100)
    assert two.next_traffic_epoch() == 101


def test_a_store_that_cannot_be_opened_is_one_line(tmp_path):
    with pytest.raises(StoreError, match="unable to open database file; see NG_STORE_URL"):
        Store(f"sqlite:///{tmp_path}/no/such/folder.db")
    with pytest.raises(StoreError, match="NG_STORE_URL"):
        Store("nonsense")
    (tmp_path / "text.db").write_text("this is no database, and it is long enough to be told from an empty one" * 20)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(f"sqlite:///{tmp_path}/text.db")
