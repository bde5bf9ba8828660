"""`narrowgauge stop` on real processes: the order, what is found, what is left alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from narrowgauge.serving.lifecycle import identify
from narrowgauge.serving.rollout.client import RolloutClient
from narrowgauge.serving.rollout.daemon import ControllerRuns, leading
from narrowgauge.serving.rollout.platforms.local import LocalPlatform
from narrowgauge.serving.rollout.spec import Revision
from narrowgauge.serving.settings import read_settings
from narrowgauge.serving.sockets import bind_unix
from narrowgauge.serving.stop import StopFailed, stop

RUN = (sys.executable, "-m", "narrowgauge")
REPLICA = (
    *(sys.executable, "-c"),
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()",
)


def wait_for(condition, *, deadline_s=60):
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return found


@pytest.fixture
def settings(tmp_path):
    return read_settings({"NG_HOME": str(tmp_path / "home")})


@pytest.fixture
def spawn(settings):
    """Runs `narrowgauge ...` over the home; kills what is left at the end, the controllers too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NG_")}
    environment["NG_HOME"] = str(settings.home)
    children = []

    def start(*arguments):
        child = subprocess.Popen([*RUN, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()
    with contextlib.suppress(Exception):
        stop(settings, timeout_s=10.0, told=lambda _: None)


def start_gateway(spawn):
    gateway = spawn("gateway", "--port", "0")
    assert "listening" in gateway.stdout.readline()
    return gateway


def start_replica(settings):
    platform = LocalPlatform(settings, command=REPLICA)
    replica = platform.start(Revision(model="m", uri="u", digest="d" * 64))
    wait_for(lambda: "up" in (settings.logs / f"replica-{replica.id}.log").read_text())
    return platform, replica


def test_all_that_runs_ends_in_order_also_a_controller_that_the_gateway_only_found(spawn, settings):
    first = start_gateway(spawn)
    client = RolloutClient(settings.admin_url)
    wait_for(client.answers)
    first.kill()
    first.wait()
    second = start_gateway(spawn)  # finds the controller that the first one left
    platform, replica = start_replica(settings)
    done = spawn("stop", "--json")
    lines = json.loads(done.stdout.read())
    assert done.wait(60) == 0
    assert [line.split()[0] for line in lines] == ["gateway", "controller", "replica"]
    assert second.wait(10) == 0
    assert not client.answers()
    assert identify(replica.pid) is None
    assert len(platform.poll()) == 1
    assert list((settings.run / "replicas").iterdir()) == []
    again = spawn("stop", "--json")
    assert (json.loads(again.stdout.read()), again.wait(60)) == ([], 0)


def test_a_gateway_that_does_not_end_is_named_and_left(settings):
    path = settings.run / "gateway.sock"
    code = "import pathlib, signal, sys, time; from narrowgauge.serving.sockets import bind_unix; " \
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); s = bind_unix(pathlib.Path(sys.argv[1])); " \
        "print('up', flush=True); time.sleep(600)"  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as stubborn:
        assert "up" in stubborn.stdout.readline()
        platform, replica = start_replica(settings)
        with pytest.raises(StopFailed, match=f"gateway .pid {stubborn.pid}. has not ended within 0.2 s"):
            stop(settings, timeout_s=0.2, told=print)
        assert identify(stubborn.pid) is not None
        assert identify(replica.pid) is not None  # whom a living gateway still sends users to
        stubborn.kill()
    stop(settings, timeout_s=10.0, told=print)
    assert identify(replica.pid) is None
    assert len(platform.poll()) == 1


def test_a_replicas_record_that_names_another_process_signals_nobody(settings):
    platform, replica = start_replica(settings)
    path = settings.run / "replicas" / f"{replica.id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start_ticks": 1}))
    assert stop(settings, timeout_s=5.0, told=print) == 0
    assert identify(replica.pid) is not None
    os.kill(replica.pid, signal.SIGKILL)
    wait_for(platform.poll)


def test_replicas_are_left_to_a_controller_that_leads(settings):
    platform, replica = start_replica(settings)
    settings.locks.mkdir(parents=True)
    with leading(settings), pytest.raises(ControllerRuns):
        stop(settings, timeout_s=1.0, told=print)
    assert identify(replica.pid) is not None
    platform.stop(replica.id, grace_s=5.0)
    wait_for(platform.poll)


def test_where_nothing_runs_nothing_is_made(settings):
    assert stop(settings, timeout_s=1.0, told=print) == 0
    assert not settings.home.exists()


def test_a_socket_file_that_nobody_listens_on_is_nobody(settings):
    bind_unix(settings.run / "gateway.sock").close()
    assert stop(settings, timeout_s=1.0, told=print) == 0


def test_an_admin_api_on_another_machine_is_not_stopped_from_here(tmp_path):
    settings = read_settings({"NG_HOME": str(tmp_path), "NG_ADMIN_URL": "http://elsewhere:1"})
    with pytest.raises(StopFailed, match="stop it where it runs"):
        stop(settings, timeout_s=1.0, told=print)
