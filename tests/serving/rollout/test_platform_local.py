"""The local platform: processes that are adopted, told apart, drained and reaped."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest

from narrowgauge.serving.lifecycle import identify
from narrowgauge.serving.rollout.platforms.base import PlatformError
from narrowgauge.serving.rollout.platforms.local import LocalPlatform, flags
from narrowgauge.serving.rollout.spec import Revision
from narrowgauge.serving.settings import read_settings

FAKE = (sys.executable, str(Path(__file__).with_name("fake_replica.py")))


def wait_for(condition, timeout_s=15.0):
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def answers(replica):
    try:
        return httpx.get(f"{replica.url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def settings(tmp_path):
    return read_settings({"NG_HOME": str(tmp_path / "home")})


@pytest.fixture
def platform(settings):
    platform = LocalPlatform(settings, command=FAKE)
    yield platform
    for replica in platform.replicas():
        platform.stop(replica.id, grace_s=0.0)
    wait_for(lambda: (platform.poll(), not platform.stopping())[1])


@pytest.fixture
def revision(tmp_path):
    (tmp_path / "checkpoint.json").write_text("{}")
    return Revision(model="m", uri=str(tmp_path / "checkpoint.json"), digest="d" * 64, engine_args={"threads": 1})


def record_path(settings, replica):
    return settings.run / "replicas" / f"{replica.id}.json"


def test_a_replica_is_recorded_answers_at_its_port_and_is_drained_by_stop(platform, settings, revision):
    replica = platform.start(revision)
    record = json.loads(record_path(settings, replica).read_text())
    identity = identify(replica.pid)
    assert (record["pid"], record["start_ticks"], record["boot_id"]) == (
        identity.pid,
        identity.start_ticks,
        identity.boot_id,
    )
    wait_for(lambda: answers(replica))
    says = httpx.get(f"{replica.url}/version").json()
    assert says == {"revision": revision.id, "digest": revision.digest, "pid": replica.pid}
    platform.stop(replica.id, grace_s=10.0)
    assert platform.replicas() == ()
    (ended,) = wait_for(platform.poll)
    assert (ended.expected, ended.reason.partition(":")[0]) == (True, "exit code 0")
    assert not record_path(settings, replica).exists()


def test_a_port_refuses_while_its_replica_loads_and_after_it_died(platform, revision, tmp_path):
    (tmp_path / "checkpoint.json").write_text('{"load_s": 1.0, "crash_at_load": true}')
    replica = platform.start(revision)
    address = ("127.0.0.1", int(replica.url.rpartition(":")[2]))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=2)
    (ended,) = wait_for(platform.poll)
    assert (ended.expected, ended.reason.partition(":")[0]) == (False, "exit code 7")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=2)


def test_a_replica_that_died_is_quoted_and_its_log_is_named(settings, revision):
    says = (
        "import sys; print('  working', flush=True); "
        "print('error: --threads must be at least 1  ', file=sys.stderr); print(); sys.exit(2)"
    )
    platform = LocalPlatform(settings, command=(sys.executable, "-c", says))
    replica = platform.start(revision)
    (ended,) = wait_for(platform.poll)
    log = settings.logs / f"replica-{replica.id}.log"
    assert ended.reason == f"exit code 2: error: --threads must be at least 1; its log: {log}"


def test_a_replica_that_died_in_silence_is_said_to_have(settings, revision):
    platform = LocalPlatform(settings, command=(sys.executable, "-c", "raise SystemExit(3)"))
    platform.start(revision)
    (ended,) = wait_for(platform.poll)
    assert ended.reason.startswith("exit code 3: (it said nothing); its log: ")


def test_one_that_does_not_drain_is_killed_when_its_grace_is_over(platform, revision):
    replica = platform.start(revision)
    wait_for(lambda: answers(replica))
    os.kill(replica.pid, 19)  # SIGSTOP: it will not look at SIGTERM
    platform.stop(replica.id, grace_s=0.2)
    (ended,) = wait_for(platform.poll)
    assert ended.expected
    assert ended.reason.startswith("signal 9")


def test_the_next_platform_adopts_what_runs(platform, settings, revision):
    replica = platform.start(revision)
    wait_for(lambda: answers(replica))
    platform.mark_ready(replica.id)
    other = LocalPlatform(settings, command=FAKE)
    assert other.adopt() == ()
    (adopted,) = other.replicas()
    assert (adopted.id, adopted.pid, adopted.was_ready) == (replica.id, replica.pid, True)
    os.kill(replica.pid, 9)
    (ended,) = wait_for(other.poll)
    assert not ended.expected


def test_a_replica_whose_starter_died_before_it_knew_the_pid_is_found_by_its_arguments(platform, settings, revision):
    replica = platform.start(revision)
    path = record_path(settings, replica)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": None, "start_ticks": None}))
    wait_for(lambda: answers(replica))
    other = LocalPlatform(settings, command=FAKE)
    assert other.adopt() == ()
    assert [found.pid for found in other.replicas()] == [replica.pid]


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another"}, {"pid": 2**22 - 1}])
def test_a_process_that_is_somebody_elses_is_not_signalled_and_its_record_goes(platform, settings, revision, change):
    replica = platform.start(revision)
    path = record_path(settings, replica)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    other = LocalPlatform(settings, command=FAKE)
    (gone,) = other.adopt()
    assert (gone.replica.id, gone.expected) == (replica.id, False)
    assert other.replicas() == ()
    assert not path.exists()
    assert identify(replica.pid) is not None


def test_half_a_record_is_thrown_away(settings, platform):
    path = settings.run / "replicas" / "x.json"
    path.write_text('{"id": "x"')
    assert platform.adopt() == ()
    assert not path.exists()


def test_a_command_that_is_not_there_is_one_line(settings, revision):
    platform = LocalPlatform(settings, command=("/no/such/program",))
    with pytest.raises(PlatformError, match="/no/such/program: No such file"):
        platform.start(revision)
    assert list((settings.run / "replicas").glob("*.json")) == []


def test_engine_arguments_become_flags():
    assert flags("max-num-seqs", 8) == ["--max-num-seqs", "8"]
    assert (flags("x", True), flags("x", False)) == (["--x"], ["--no-x"])
