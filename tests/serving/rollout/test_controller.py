"""Whole rollouts: real processes and sockets, fake models."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from narrowgauge.serving.rollout.client import RolloutRefused
from narrowgauge.serving.rollout.store import Store


def _nothing_failed(consumer):
    consumer.close()
    assert consumer.failures == []
    assert set(consumer.statuses) == {200}


def test_a_good_revision_is_promoted_step_by_step_and_no_request_fails(tenant):
    first = tenant.serve_first()
    consumer = tenant.consume()
    rollout = tenant.start_rollout()
    done = tenant.finish(rollout)
    assert done["phase"] == "Completed", tenant.log()
    assert tenant.phases(rollout) == [
        "Starting",
        "Shadow",
        "Canary",
        "Canary",
        "Promoting",
        "Baking",
        "Completed",
    ]
    assert done["stable_id"] == first
    state = tenant.traffic()
    assert (state["stable"], state["canary"], state["canary_bp"]) == (done["revision_id"], None, 0)
    assert list(state["replicas"]) == [done["revision_id"]]
    assert [replica["revision"] for replica in tenant.replicas()] == [done["revision_id"]]
    assert "aliases skipped" in done["registry"]
    golden = next(verdict for verdict in done["verdicts"] if verdict["gate"] == "golden")
    assert golden["figures"]["top1"] == 1.0
    _nothing_failed(consumer)


def test_gibberish_is_stopped_by_the_golden_gate_and_traffic_goes_back(tenant):
    first = tenant.serve_first()
    consumer = tenant.consume()
    rollout = tenant.start_rollout(
        spec=tenant.spec(steps=[{"traffic": 0.1, "until": {"requests": 10_000}}]), gibberish=True
    )
    done = tenant.finish(rollout)
    assert (done["phase"], done["gate"]) == ("Aborted", "golden"), tenant.log()
    assert "top-1 agreement 0 [0, 0]" in done["reason"]
    state = tenant.traffic()
    assert (state["stable"], state["canary"], state["canary_bp"]) == (first, None, 0)
    assert [replica["revision"] for replica in tenant.replicas()] == [first]
    assert tenant.client.gate(rollout["id"]) == "fail"
    _nothing_failed(consumer)


def test_a_revision_that_answers_errors_is_stopped_and_its_clients_get_stables_answer(tenant):
    tenant.serve_first()
    consumer = tenant.consume()
    spec = tenant.spec(
        steps=[{"traffic": 0.3, "until": {"requests": 10_000}}],
        gates=[{"name": "readiness"}, {"name": "errors", "max_ratio": 0.05, "min_requests": 5}],
    )
    done = tenant.finish(tenant.start_rollout(spec=spec, error_every=3))
    assert (done["phase"], done["gate"]) == ("Aborted", "errors"), tenant.log()
    _nothing_failed(consumer)


def test_a_slow_revision_is_stopped_by_the_latency_gate(tenant):
    tenant.serve_first()
    consumer = tenant.consume()
    latency = {"name": "latency", "metric": "e2e_s", "max_ratio": 3.0, "min_samples": 12}
    spec = tenant.spec(steps=[{"traffic": 0.3, "until": {"requests": 10_000}}], gates=[latency])
    done = tenant.finish(tenant.start_rollout(spec=spec, delay_s=0.3))
    assert (done["phase"], done["gate"]) == ("Aborted", "latency"), tenant.log()
    _nothing_failed(consumer)


def test_without_enough_requests_the_deadline_aborts_and_nothing_is_promoted(tenant):
    first = tenant.serve_first()
    spec = tenant.spec(deadline_s=1.5, steps=[{"traffic": 0.5, "until": {"requests": 5}}])
    rollout = tenant.start_rollout(spec=spec)
    done = tenant.finish(rollout)
    assert (done["phase"], done["gate"]) == ("Aborted", "errors")
    assert done["reason"].startswith("deadline: 0 of at least 5 requests")
    assert "Promoting" not in tenant.phases(rollout)
    assert tenant.traffic()["stable"] == first


def test_a_revision_that_dies_while_loading_fails_readiness(tenant):
    first = tenant.serve_first()
    rollout = tenant.start_rollout(crash_at_load=True)
    done = tenant.finish(rollout)
    assert (done["phase"], done["gate"], done["restarts"]) == ("Aborted", "readiness", 2), tenant.log()
    (told,) = [verdict["reason"] for verdict in done["verdicts"] if verdict["gate"] == "readiness"]
    assert "replicas died 2 times, 1 allowed; the last that died: exit code 7" in told
    assert "its log: " in told
    assert tenant.phases(rollout) == ["Starting", "Aborting", "Aborted"]
    assert tenant.traffic()["stable"] == first


def test_a_replica_that_cannot_answer_its_warm_up_ends_the_rollout_with_what_it_said(tenant):
    tenant.serve_first()
    rollout = tenant.start_rollout(broken=True)
    done = tenant.finish(rollout)
    assert (done["phase"], done["gate"]) == ("Aborted", "readiness"), tenant.log()
    (told,) = [verdict["reason"] for verdict in done["verdicts"] if verdict["gate"] == "readiness"]
    assert "answers its warm-up with 500" in told
    assert "injected" in told


def test_a_replica_that_serves_another_digest_never_gets_traffic(tenant):
    tenant.serve_first()
    rollout = tenant.start_rollout(claims_digest="f" * 64)
    done = tenant.finish(rollout)
    assert (done["phase"], done["gate"]) == ("Aborted", "readiness"), tenant.log()
    kinds = [(event["kind"], event.get("reason", "")) for event in tenant.client.events(rollout["id"])]
    assert any(kind == "ReplicaLost" and "digest ffffffffffff" in reason for kind, reason in kinds)


def test_a_controller_killed_in_the_middle_is_continued_by_the_next_one(lone_tenant):
    tenant, world = lone_tenant, lone_tenant.world
    tenant.serve_first()
    consumer = tenant.consume()
    rollout = tenant.start_rollout()
    tenant.wait_phase(rollout, "Canary")
    before = {replica["id"]: replica["pid"] for replica in tenant.replicas()}
    epoch = tenant.traffic()["epoch"]
    world.controller.kill()
    world.controller.wait()
    world.start_controller()
    done = tenant.finish(rollout)
    assert done["phase"] == "Completed", world.log()
    assert done["restarts"] == 0
    assert tenant.traffic()["epoch"] > epoch
    after = {replica["id"]: replica["pid"] for replica in tenant.replicas()}
    assert len(after) == 1
    assert after.items() <= before.items(), "the replica was adopted, not started anew"
    _nothing_failed(consumer)


def test_replicas_outlive_a_stopped_controller_which_exits_with_0(lone_tenant):
    tenant, world = lone_tenant, lone_tenant.world
    tenant.serve_first()
    (replica,) = tenant.replicas()
    world.controller.send_signal(signal.SIGTERM)
    assert world.controller.wait(20) == 0
    os.kill(replica["pid"], 0)
    world.start_controller()
    assert [found["id"] for found in tenant.replicas()] == [replica["id"]]


def test_a_lost_store_does_not_take_down_what_the_router_sends_users_to(lone_tenant):
    tenant, world = lone_tenant, lone_tenant.world
    tenant.serve_first()
    (replica,) = tenant.replicas()
    world.controller.terminate()
    world.controller.wait(20)
    for path in world.home.glob("rollouts.db*"):
        path.unlink()
    consumer = tenant.consume()
    for _ in range(3):
        assert world.run_once().returncode == 0
    consumer.wait_for_more(10)
    os.kill(replica["pid"], 0)
    _nothing_failed(consumer)


def test_an_ephemeral_controller_takes_its_replicas_with_it(lone_tenant):
    tenant, world = lone_tenant, lone_tenant.world
    world.controller.terminate()
    world.controller.wait(20)
    world.start_controller("--ephemeral")
    tenant.serve_first()
    (replica,) = tenant.replicas()
    world.controller.terminate()
    assert world.controller.wait(20) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(replica["pid"], 0)


def test_a_dead_stable_replica_is_replaced_and_the_gateway_told(tenant):
    first = tenant.serve_first()
    (replica,) = tenant.replicas()
    os.kill(replica["pid"], signal.SIGKILL)
    from_before = tenant.traffic()["replicas"][first]
    end = time.monotonic() + 20
    while tenant.traffic()["replicas"][first] == from_before:
        assert time.monotonic() < end, tenant.log()
        time.sleep(0.05)
    assert len(tenant.traffic()["replicas"][first]) == 1


def test_starting_the_same_rollout_twice_gives_the_same_one(tenant):
    tenant.serve_first()
    spec = tenant.spec()
    uri, digest = tenant.world.checkpoint(load_s=2.0)
    revision = spec.revision(uri=uri, checkpoint_digest=digest)
    one = tenant.start(revision, spec)
    two = tenant.start(revision, spec)
    assert one["created"]
    assert not two["created"]
    assert two["id"] == one["id"]
    with pytest.raises(RolloutRefused, match=f"{one['id']} with another spec .*bake_s") as refused:
        tenant.start(revision, tenant.spec(bake_s=1.0))
    assert refused.value.status == 409
    with pytest.raises(RolloutRefused, match=rf"rollout {one['id']} of revision {revision.id} is \w+; wait"):
        tenant.start_rollout()


def test_asking_for_what_is_stable_starts_nothing(tenant):
    spec = tenant.spec()
    uri, digest = tenant.world.checkpoint()
    revision = spec.revision(uri=uri, checkpoint_digest=digest)
    done = tenant.finish(tenant.start(revision, spec))
    again = tenant.start(revision, spec)
    assert (again["id"], again["created"]) == (done["id"], False)
    assert f"stable for {tenant.model} already" in again["note"]


def test_a_wish_made_at_an_old_epoch_is_refused(tenant):
    tenant.serve_first()
    rollout = tenant.start_rollout(never_ready=True)
    tenant.wait_phase(rollout, "Starting")
    epoch = tenant.client.get(rollout["id"])["epoch"]
    with pytest.raises(RolloutRefused, match=f"is at epoch {epoch} .*made at {epoch - 1}") as refused:
        tenant.client.abort(rollout["id"], epoch - 1)
    assert refused.value.status == 409
    with pytest.raises(RolloutRefused, match="cannot promote; possible now: abort"):
        tenant.client.promote(rollout["id"], epoch)
    tenant.client.abort(rollout["id"], epoch)
    assert tenant.finish(rollout)["gate"] == "operator"


def test_an_operator_pauses_resumes_and_goes_on(tenant):
    tenant.serve_first()
    gates = [{"name": "readiness"}]
    spec = tenant.spec(steps=[{"traffic": 0.25, "until": {"requests": 10_000}}], gates=gates)
    rollout = tenant.start_rollout(spec=spec)
    for action, phase in (("pause", "Holding"), ("resume", "Canary"), ("promote", "Completed")):
        if action == "pause":
            tenant.wait_phase(rollout, "Canary")
        current = tenant.client.get(rollout["id"])
        getattr(tenant.client, action)(rollout["id"], current["epoch"])
        tenant.wait_phase(rollout, phase)
        if phase == "Holding":
            assert tenant.traffic()["canary_bp"] == 2500
    assert tenant.client.get(rollout["id"])["asked"][-1]["action"] == "promote"


def test_the_stored_events_replay_to_the_state_that_the_controller_shows(tenant):
    tenant.serve_first()
    rollout = tenant.finish(tenant.start_rollout(spec=tenant.spec(steps=[])))
    store = Store(tenant.world.settings.store_url)
    state = store.state(rollout["id"])
    store.close()
    assert (state.phase, state.epoch, state.step) == (rollout["phase"], rollout["epoch"], rollout["step"])
    assert state.registered
    assert state.baked


def test_the_command_line_shows_and_steers_and_refuses_an_old_epoch(tenant):
    world = tenant.world

    def command(*arguments):
        run = [sys.executable, "-m", "narrowgauge", "rollout", *arguments]
        return subprocess.run(run, env=world.environment, capture_output=True, text=True, check=False)

    tenant.serve_first()
    rollout = tenant.start_rollout(never_ready=True)
    tenant.wait_phase(rollout, "Starting")
    shown = json.loads(command("status", rollout["id"], "--json").stdout)
    assert (shown["id"], shown["phase"]) == (rollout["id"], "Starting")
    stale = command("abort", rollout["id"], "--epoch", "0")
    assert stale.returncode == 1
    assert stale.stderr.splitlines()[-1].startswith(f"error: rollout {rollout['id']} is at epoch")
    assert command("abort", rollout["id"], "--json").returncode == 0
    assert tenant.finish(rollout)["gate"] == "operator"
    history = command("history", rollout["id"]).stdout
    assert "Aborting" in history
    assert "an operator asked for it" in command("status", rollout["id"]).stdout


def test_one_pass_of_a_controller_without_a_loop_takes_a_rollout_further(lone_tenant):
    tenant, world = lone_tenant, lone_tenant.world
    rollout = tenant.start_rollout(load_s=1.0)
    world.controller.kill()
    world.controller.wait()
    seen = []
    for _ in range(40):
        once = world.run_once()
        assert once.returncode == 0, once.stderr
        store = Store(world.settings.store_url)
        seen.append(store.state(rollout["id"]).phase)
        store.close()
        if seen[-1] == "Completed":
            break
    assert seen[-1] == "Completed"
    assert "Promoting" in seen or "Baking" in seen
