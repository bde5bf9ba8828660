"""The gateway as a process: light, announced, drained on SIGTERM, tied to its parent when asked to be."""

import contextlib
import errno
import http.client
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys

import pytest

from narrowgauge.serving.sockets import admin_client, bind_tcp

GATEWAY = (sys.executable, "-m", "narrowgauge", "gateway")
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True})


class Running:
    """A gateway process and its address."""

    def __init__(self, process, home):
        self.process, self.home = process, home
        self.url = process.stdout.readline().split()[-1].strip()
        self.admin_url = f"unix:{home}/run/gateway.sock"

    def put(self, stable):
        state = {"epoch": 1, "stable": stable.revision, "replicas": {stable.revision: [stable.url]}}
        with admin_client(self.admin_url) as admin:
            assert admin.put("/admin/v1/traffic/m", json=state).status_code == 200

    def connect(self):
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=20)

    def refuses(self):
        """Whether nobody listens at its port any more."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == errno.ECONNREFUSED

    def stream(self):
        """Begins a chat; returns connection and response after the first event."""
        connection = self.connect()
        connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
        response = connection.getresponse()
        assert b"The" in response.readline() + response.readline()
        return connection, response


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def environment(home):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NG_")}
    return {**kept, "NG_HOME": str(home)}


@pytest.fixture
def start(home, environment):
    """Starts a gateway: `start("--no-controller")`."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments):
            command = [*GATEWAY, "--port", "0", *arguments]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return Running(process, home)

        yield begin


def wait_for_end(pid_descriptor):
    readable, _, _ = select.select([pid_descriptor], [], [], 20)
    os.close(pid_descriptor)
    return bool(readable)


def test_the_gateway_needs_no_heavy_library():
    code = "import narrowgauge.serving.gateway.process, narrowgauge.cli.main, sys; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"torch", "mlflow", "transformers", "prefect", "numpy", "fastapi", "pydantic", "sqlalchemy"}


def test_it_announces_its_address_serves_and_exits_0_on_sigterm(start, home, replica):
    gateway = start("--no-controller")
    assert stat.S_IMODE((home / "run" / "gateway.sock").stat().st_mode) == 0o600
    gateway.put(replica("r1"))
    connection, response = gateway.stream()
    assert response.read().endswith(b"data: [DONE]\n\n")
    with open(f"/proc/{gateway.process.pid}/maps") as maps:
        assert "libtorch" not in maps.read()
    connection.close()
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(20) == 0
    assert not (home / "run" / "gateway.sock").exists()


def test_a_restarted_one_serves_what_the_earlier_one_was_told(start, replica):
    first = start("--no-controller")
    first.put(replica("r1"))
    first.process.kill()
    first.process.wait(20)
    second = start("--no-controller")  # over the stale socket of the killed one
    connection, response = second.stream()
    assert response.getheader("x-narrowgauge-revision") == "r1"
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_sigterm_lets_streams_finish_and_takes_no_new_connection(start, replica):
    stable = replica("r1")
    stable.gate.clear()
    gateway = start("--no-controller")
    gateway.put(stable)
    connection, response = gateway.stream()
    gateway.process.send_signal(signal.SIGTERM)
    with admin_client(gateway.admin_url) as admin:
        while admin.get("/ready").status_code != 503:
            pass
        assert admin.get("/admin/v1/inflight").json()["revisions"]["r1"]["in_flight"] == 1
    while not gateway.refuses():
        pass
    stable.gate.set()
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    assert gateway.process.wait(20) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stream_that_outlasts_the_drain_ends_with_an_error(start, replica, signals):
    stable = replica("r1")
    stable.gate.clear()
    gateway = start("--no-controller", "--drain-timeout", "0.3" if signals == 1 else "600")
    gateway.put(stable)
    connection, response = gateway.stream()
    gateway.process.send_signal(signal.SIGTERM)
    if signals == 2:
        with admin_client(gateway.admin_url) as admin:
            while admin.get("/ready").status_code != 503:
                pass
        gateway.process.send_signal(signal.SIGTERM)
    rest = response.read()
    assert b"the gateway is shutting down" in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    connection.close()
    assert gateway.process.wait(20) == 0


def test_it_ends_with_its_parent(home, environment):
    code = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:], "--die-with", str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, *GATEWAY, "--port", "0", "--no-controller"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline().split()[0])
        descriptor = os.pidfd_open(pid)
        parent.kill()
        parent.wait()
        assert wait_for_end(descriptor)
    assert not (home / "run" / "gateway.sock").exists(), "it ended in good order"


def test_an_ephemeral_controller_ends_with_a_gateway_that_is_killed(start):
    gateway = start("--ephemeral")
    children = _children_of(gateway.process.pid)
    descriptor = os.pidfd_open(children[0])
    gateway.process.kill()
    assert wait_for_end(descriptor)


def _children_of(pid):
    """The pids of its children, once there are some."""
    while True:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            if found := [int(word) for word in file.read().split()]:
                return found


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        (("--probe-interval", "0"), {}, 2, "error: --probe-interval: must be above 0, not 0.0"),
        (("--shadow-in-flight", "-1"), {}, 2, "error: --shadow-in-flight: must be 0 or more, not -1"),
        ((), {"NG_GATEWAY_ADMIN_URL": "http://127.0.0.1:1"}, 2, "the gateway's admin API needs a Unix socket"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(environment, arguments, variables, code, message):
    command = [*GATEWAY, "--no-controller", "--port", "0", *arguments]
    result = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_address_in_use_is_one_line_and_exit_code_1(start, environment):
    with bind_tcp("127.0.0.1", 0) as taken:
        command = [*GATEWAY, "--no-controller", "--port", str(taken.getsockname()[1])]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "Address already in use; choose another --port" in result.stderr
    start("--no-controller")
    command = [*GATEWAY, "--no-controller", "--port", "0"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "another process listens on this socket" in result.stderr
