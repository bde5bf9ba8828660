"""The decision as a whole: properties that hold whatever happens, and the public failures it must not repeat."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.serving.rollout.decide import Observation, RevisionHealth, allowed_actions, decide
from narrowgauge.serving.rollout.gates.base import Verdict
from narrowgauge.serving.rollout.spec import Revision, read_spec
from narrowgauge.serving.rollout.state import (
    TERMINAL,
    Asked,
    Moved,
    Registered,
    Rollout,
    TrafficSet,
    apply,
    begin,
    event_from_json,
    event_to_json,
    replay,
)

OLD = Revision(model="m", uri="file:///old", digest="0" * 64)
NEW = Revision(model="m", uri="file:///new", digest="1" * 64)
ALIVE, READY, GONE = RevisionHealth(alive=1), RevisionHealth(alive=1, ready=1), RevisionHealth()
STEPS = [
    {"shadow": 1.0, "until": {"requests": 5}},
    {"traffic": 0.1, "until": {"requests": 5}},
    {"traffic": 0.5, "until": {"requests": 5, "seconds": 2.0}},
]
GATES = [{"name": "readiness"}, {"name": "errors"}]


def rollout(*, first=False, **changes):
    spec = {"version": 1, "model": "m", "steps": STEPS, "gates": GATES, "deadline_s": 30.0, "bake_s": 5.0, **changes}
    return Rollout(
        id="r1",
        revision=NEW,
        spec=read_spec(spec),
        stable=None if first else OLD,
        override=None,
        created_at=0.0,
    )


def verdicts(*results):
    return tuple(Verdict(gate=f"gate{i}", result=result, reason=result) for i, result in enumerate(results))


PASS, FAIL = verdicts("pass", "pass"), verdicts("pass", "fail")
WAIT = verdicts("pass", "inconclusive")


class Run:
    """A rollout driven tick by tick in a world that does what it is told."""

    def __init__(self, **changes):
        self.state = begin(rollout(**changes))
        self.now, self.events = 0.0, []
        self.decision = None

    def tick(self, seconds=1.0, *, obey=True, **seen):
        self.now += seconds
        traffic = self.state.traffic.shares if self.state.traffic and obey else None
        self.seen = Observation(**{"canary": READY, "stable": READY, "traffic": traffic, "verdicts": PASS, **seen})
        self.decision = decide(self.state, self.seen, self.now)
        self.state = self.decision.state
        self.events += self.decision.events
        return self.state

    def ask(self, action):
        event = Asked(at=self.now, action=action)
        self.state = apply(self.state, event)
        self.events.append(event)

    def until(self, phase, **seen):
        for _ in range(20):
            if self.tick(**{"canary_requests": 5, **seen}).phase == phase:
                return self
        raise AssertionError(f"{phase} was not reached: {self.state.phase}")

    @property
    def shares(self):
        return self.state.traffic and self.state.traffic.shares


def registered(run):
    event = Registered(at=run.now, detail="done")
    run.state = apply(run.state, event)
    run.events.append(event)


def test_a_good_rollout_goes_through_its_phases_and_ends_promoted():
    run = Run()
    seen = []
    for _ in range(30):
        state = run.tick(canary_requests=5)
        seen.append((state.phase, state.step, run.shares[2:] if run.shares else None))
        if run.decision.intent.registry:
            registered(run)
        if state.baked and state.registered:
            break
    assert list(dict.fromkeys(seen)) == [
        ("Starting", -1, (0, 0)),
        ("Shadow", 0, (0, 10_000)),
        ("Canary", 1, (1000, 0)),
        ("Canary", 2, (5000, 0)),
        ("Promoting", 2, (0, 0)),
        ("Baking", 2, (0, 0)),
    ]
    assert run.tick(canary_requests=5).phase == "Baking", "the old replica still drains"
    assert run.decision.intent.run == {NEW.id}
    assert run.decision.intent.keep == frozenset()
    assert run.tick(stable=GONE).phase == "Completed"
    assert run.shares == (NEW.id, None, 0, 0)


def test_the_first_revision_skips_steps_and_comparisons():
    run = Run(first=True)
    run.tick(canary=ALIVE, verdicts=PASS[:1])
    assert run.decision.intent.traffic is None
    assert run.tick(verdicts=PASS[:1]).phase == "Promoting"
    assert run.shares == (NEW.id, None, 0, 0)
    assert [gate.name for gate in run.state.gates] == ["readiness"]
    run.until("Baking", verdicts=PASS[:1])


def test_inconclusive_through_a_whole_step_ends_at_the_deadline_and_never_promotes():  # argo-rollouts#3850
    run = Run().until("Shadow", verdicts=WAIT, canary_requests=0)
    while run.state.phase == "Shadow":
        run.tick(verdicts=WAIT, canary_requests=500)
    assert run.state.phase == "Aborting"
    assert run.state.gate == "gate1"
    assert run.state.since == pytest.approx(30.0, abs=3)
    assert not any(isinstance(event, Moved) and event.phase == "Promoting" for event in run.events)


def test_no_requests_is_no_verdict_and_counts_as_soon_as_they_come():  # argo-rollouts#1905
    run = Run().until("Shadow", canary_requests=0)
    for _ in range(10):
        assert run.tick(verdicts=WAIT, canary_requests=0).phase == "Shadow"
    assert run.tick(canary_requests=5).phase == "Canary"


def test_a_gate_that_fails_wins_at_once_over_one_that_is_not_done():  # argo-rollouts#1411
    run = Run().until("Canary")
    state = run.tick(0.1, verdicts=verdicts("inconclusive", "fail"), canary_requests=0)
    assert (state.phase, state.gate) == ("Aborting", "gate1")
    assert run.shares == (OLD.id, None, 0, 0), "the share is gone in the same tick"


def test_every_required_gate_must_have_said_pass():
    run = Run().until("Shadow", canary_requests=0)
    assert run.tick(verdicts=PASS[:1], canary_requests=99).phase == "Shadow"


def test_a_gate_fails_a_rollout_that_is_on_hold_too():  # flagger#1801
    run = Run().until("Canary")
    run.ask("pause")
    assert run.tick().phase == "Holding"
    assert run.shares[2] == 1000
    assert run.tick(verdicts=FAIL).phase == "Aborting"


def test_a_canary_that_is_not_ready_gets_no_share_until_it_is():  # kserve#5983
    run = Run().until("Canary")
    run.tick(canary=ALIVE)
    assert run.shares == (OLD.id, None, 0, 0)
    run.tick()
    assert run.shares == (OLD.id, NEW.id, 1000, 0)


def test_an_abort_takes_the_share_away_whatever_becomes_of_the_replicas():  # argo-rollouts#4898
    run = Run().until("Canary")
    run.ask("abort")
    assert run.tick().phase == "Aborting"
    assert run.shares[2] == 0
    for _ in range(300):
        run.tick(canary=READY)
        assert run.shares == (OLD.id, None, 0, 0)
    assert run.state.phase == "Stuck"
    registered(run)
    assert run.tick(canary=GONE).phase == "Aborted"


def test_an_abort_does_not_send_everybody_to_a_stable_that_cannot_answer():  # argo-rollouts#3372
    run = Run().until("Canary").until("Canary", canary_requests=5)
    before = run.shares
    run.ask("abort")
    run.tick(stable=ALIVE)
    assert run.shares == (*before[:3], 0)
    assert NEW.id in run.decision.intent.keep
    assert NEW.id not in run.decision.intent.run, "an aborted revision is never started again"
    run.tick(stable=READY)
    assert run.shares == (OLD.id, None, 0, 0)


def test_an_aborted_revision_is_never_wanted_again():  # argo-rollouts#4973
    run = Run().until("Canary")
    run.ask("abort")
    run.tick()
    registered(run)
    while not run.state.terminal:
        run.tick(canary=GONE)
    for _ in range(5):
        run.tick(canary=READY, canary_requests=1000)
        assert run.state.phase == "Aborted"
        assert run.decision.events == ()
        assert run.decision.intent.run == {OLD.id}


def test_a_promotion_that_the_router_does_not_take_has_a_deadline():  # flagger#1591
    run = Run(steps=[]).until("Promoting")
    while run.state.phase == "Promoting":
        run.tick(traffic=(OLD.id, None, 0, 0))
    assert (run.state.phase, run.state.gate) == ("Aborting", "deadline")
    assert run.shares == (OLD.id, None, 0, 0)


def test_a_promotion_waits_for_a_ready_revision_and_is_one_write():
    run = Run(steps=[])
    run.tick()
    run.tick()
    assert run.state.phase == "Promoting"
    assert [event.shares for event in run.events if isinstance(event, TrafficSet)][-1] == (NEW.id, None, 0, 0)
    lost = Run(steps=[])
    lost.tick()
    lost.state = apply(lost.state, Moved(at=1.0, phase="Promoting", step=-1, reason="", deadline_at=99.0))
    lost.tick(canary=ALIVE)
    assert lost.shares == (OLD.id, None, 0, 0)


def test_a_promoted_revision_that_dies_while_baking_is_rolled_back():
    run = Run().until("Baking")
    assert run.decision.intent.run == {OLD.id, NEW.id}, "the old revision is kept ready meanwhile"
    state = run.tick(canary=GONE, lost=(("n1", "signal 9"),))
    assert (state.phase, state.gate, state.lost) == ("Aborting", "readiness", ("n1",))
    assert run.shares == (OLD.id, None, 0, 0)


def test_a_hold_at_the_deadline_keeps_the_share_and_is_resolved_by_an_operator():  # argo-rollouts#3015
    run = Run(on_deadline="hold").until("Canary")
    window = run.state.window_at
    while run.state.phase == "Canary":
        run.tick(verdicts=WAIT, canary_requests=0)
    assert run.state.phase == "Holding"
    assert run.shares[2] == 1000
    run.ask("resume")
    state = run.tick(verdicts=WAIT)
    assert (state.phase, state.step, state.window_at) == ("Canary", 1, window), "the evidence is kept"
    assert state.deadline_at == pytest.approx(run.now + 30.0)
    run.ask("promote")
    assert run.tick(verdicts=WAIT).step == 2


def test_a_pause_stops_the_steps_clock():
    run = Run().until("Shadow", canary_requests=0)
    left = run.state.deadline_at - run.now - 1.0
    run.ask("pause")
    run.tick(1.0, canary_requests=0)
    run.tick(10_000.0, canary_requests=0)
    run.ask("resume")
    run.tick(1.0, canary_requests=0)
    assert run.state.phase == "Shadow"
    assert run.state.deadline_at - run.now == pytest.approx(left)


def test_a_hold_that_nobody_resolves_ends_in_an_abort():
    run = Run(hold_deadline_s=100.0).until("Canary")
    run.ask("pause")
    run.tick()
    assert run.tick(99.0).phase == "Holding"
    assert run.tick(2.0).phase == "Aborting"


def test_until_seconds_and_requests_must_both_be_met():
    run = Run().until("Canary")
    run.tick(canary_requests=5)
    assert run.state.step == 2
    assert run.tick(0.5, canary_requests=500).step == 2
    assert run.tick(0.5, canary_requests=500).phase == "Canary"
    assert run.tick(1.5, canary_requests=500).phase == "Promoting"


healths = st.sampled_from([GONE, ALIVE, READY])
looks = st.fixed_dictionaries(
    {
        "seconds": st.sampled_from([0.1, 1.0, 5.0, 40.0, 500.0]),
        "canary": healths,
        "stable": healths,
        "obey": st.booleans(),
        "canary_requests": st.sampled_from([0, 3, 5, 50]),
        "verdicts": st.lists(st.sampled_from(["pass", "pass", "pass", "inconclusive", "fail"]), max_size=2).map(
            lambda results: verdicts(*results)
        ),
        "lost": st.sampled_from([(), (("n1", "died"),)]),
        "ask": st.sampled_from([None, None, None, "promote", "pause", "resume", "abort"]),
        "register": st.booleans(),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    looks=st.lists(looks, max_size=40),
    first=st.booleans(),
    hold=st.sampled_from(["abort", "hold"]),
    steps=st.sampled_from([STEPS, STEPS[1:], []]),
)
def test_whatever_happens_the_rules_hold(looks, first, hold, steps):
    run = Run(first=first, on_deadline=hold, steps=steps)
    for look in looks:
        look = dict(look)
        ask, register = look.pop("ask"), look.pop("register")
        if ask in allowed_actions(run.state):
            run.ask(ask)
        if register and run.decision and run.decision.intent.registry:
            registered(run)
        before = run.state
        run.tick(**look)
        _check_step(before, run, look)
    assert replay(run.state.rollout, run.events) == run.state
    restored = [event_from_json(event_to_json(event)) for event in run.events]
    assert replay(run.state.rollout, restored) == run.state


def _check_step(before, run, look):
    after, decision = run.state, run.decision
    if before.terminal:
        assert after == before, "terminal states absorb"
        assert decision.events == ()
    traffic = after.traffic
    if traffic is not None:
        assert 0 <= traffic.canary_bp <= 10_000
        if traffic.canary is not None:
            assert look["canary"].ready, "no share for what is not ready"
            assert traffic.canary == NEW.id
    switched = traffic is not None and traffic.stable == NEW.id
    was_switched = before.traffic is not None and before.traffic.stable == NEW.id
    if switched and not was_switched:
        assert after.phase in ("Promoting", "Aborting")
        assert look["canary"].ready, "everybody is sent only to what is ready"
    if after.acting_phase in ("Aborting", "Aborted") and before.traffic is not None:
        assert traffic.canary_bp <= before.traffic.canary_bp, "the share never rises while aborting"
        assert not (switched and not was_switched)
        assert NEW.id not in decision.intent.run
    judged = before.phase in ("Shadow", "Canary", "Holding", "Promoting", "Baking") and not before.baked
    if judged and any(verdict.result == "fail" for verdict in look["verdicts"]):
        assert after.phase == "Aborting", "a failed gate wins at once"
    moves = [event for event in decision.events if isinstance(event, Moved)]
    assert len(moves) <= 1
    if moves and moves[0].phase == "Promoting" and before.phase in ("Shadow", "Canary") and before.asked != "promote":
        results = [verdict.result for verdict in look["verdicts"]]
        assert results == ["pass"] * len(before.gates), "inconclusive never promotes"
    if after.phase not in TERMINAL and after.phase != "Stuck":
        assert after.deadline_at > 0, "every phase has a deadline"
    again = decide(before, run.seen, run.now)
    assert again.events == decision.events, "the same question gets the same answer"
    assert again.state == after
