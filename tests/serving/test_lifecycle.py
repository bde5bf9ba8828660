"""Processes: nothing outlives its parent, and a recycled pid is never mistaken for the process that had it."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from narrowgauge.serving.lifecycle import ParentGone, announce, die_with, identify

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal, sys
from narrowgauge.serving.lifecycle import die_with
die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
signal.pause()
''', str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    descriptor = os.pidfd_open(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    os.set_blocking(descriptor, False)
    import select

    readable, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    parent.stdin.close()
    parent.stdout.close()
    assert readable, "the child outlived its parent"


def test_a_parent_that_has_ended_already_is_noticed():
    code = "from narrowgauge.serving.lifecycle import die_with; die_with(1 << 22)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ParentGone: parent process 4194304 has ended" in result.stderr
    assert issubclass(ParentGone, RuntimeError)
    assert callable(die_with)


def test_identity_names_the_start_and_ends_with_the_process():
    process = subprocess.Popen(["sleep", "60"])
    identity = identify(process.pid)
    assert identity == identify(process.pid)
    assert identity.start_ticks > identify(os.getpid()).start_ticks
    process.kill()
    process.wait()
    assert identify(process.pid) is None


def test_a_zombie_is_not_a_running_process():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None
    process.wait()


@pytest.mark.parametrize(
    ("family", "host", "shown"),
    [(socket.AF_INET, "127.0.0.1", "http://127.0.0.1:"), (socket.AF_INET6, "::1", "http://[::1]:")],
)
def test_the_listening_line_holds_a_url_that_can_be_used(capsys, family, host, shown):
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        url = announce("replica", sock)
    assert capsys.readouterr().out == f"replica listening on {url}\n"
    assert url.startswith(shown)
