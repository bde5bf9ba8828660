"""The controller as a child: started once, started again, left alone where another one answers."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from narrowgauge.serving.gateway.supervise import ControllerChild
from narrowgauge.serving.sockets import bind_unix

# Writes its pid to the file it is given and lives until a signal.
CONTROLLER = """
import os, signal, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("controller speaking", flush=True)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
signal.pause()
"""


@pytest.fixture
def pids(tmp_path):
    def read():
        path = tmp_path / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    return read


@pytest.fixture
def child(tmp_path):
    def make(*extra, command=None):
        command = command or (sys.executable, "-c", CONTROLLER, str(tmp_path / "pids"), *extra)
        admin = f"unix:{tmp_path}/controller.sock"
        return ControllerChild(
            command, admin_url=admin, log=tmp_path / "logs" / "controller.log", first_pause_s=0.01, watch_s=0.01
        )

    return make


@contextlib.asynccontextmanager
async def running(controller):
    task = asyncio.create_task(controller.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


def is_running(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_a_child_is_started_with_its_output_in_a_log_and_stopped_at_the_end(child, pids, tmp_path, until):
    log = tmp_path / "logs" / "controller.log"
    async with running(child()):
        await until(lambda: pids() and "controller speaking" in log.read_text())
        (pid,) = pids()
        assert is_running(pid)
    assert not is_running(pid)


async def test_a_child_that_dies_is_started_again_and_it_is_said(child, pids, until, caplog):
    async with running(child()):
        for life in (1, 2, 3):
            await until(lambda life=life: len(pids()) == life)
            os.kill(pids()[-1], signal.SIGKILL)
        await until(lambda: len(pids()) == 4)
    assert "the controller ended (exit code -9); starting it again in" in caplog.text
    assert not any(is_running(pid) for pid in pids())


async def test_a_command_that_cannot_be_started_does_not_take_the_gateway_along(child, until, caplog):
    async with running(child(command=("/nonexistent/controller",))) as task:
        await until(lambda: caplog.text.count("No such file or directory") >= 2)
        assert not task.done()


@contextlib.asynccontextmanager
async def another_controller(path):
    """Answers like a controller that somebody else started; counts what it was asked."""
    asked = []

    async def answer(reader, writer):
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError:  # whoever asked has been cancelled
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, sock=bind_unix(path)):
        yield asked
    path.unlink(missing_ok=True)


async def test_where_a_controller_answers_none_is_started_until_it_dies_and_then_one_is(
    child, pids, tmp_path, until, caplog
):
    path = tmp_path / "controller.sock"
    async with contextlib.AsyncExitStack() as stack:
        asked = await stack.enter_async_context(another_controller(path))
        task = await stack.enter_async_context(running(child()))
        await until(lambda: len(asked) >= 5)
        assert pids() == []
        path.unlink()  # as if it had been killed
        await until(pids)
        assert not task.done()
        assert "answers no longer; starting one" in caplog.text
        os.kill(pids()[0], signal.SIGKILL)  # and from then on it is a child like any other
        await until(lambda: len(pids()) == 2)
    assert not any(is_running(pid) for pid in pids())


async def test_a_controller_that_was_found_is_left_running_at_the_end(child, pids, tmp_path, until):
    async with another_controller(tmp_path / "controller.sock") as asked:
        async with running(child()):
            await until(lambda: len(asked) >= 2)
        count = len(asked)
        async with running(child()):  # the next gateway finds it again
            await until(lambda: len(asked) > count)
    assert pids() == []


async def test_a_child_that_loses_to_another_controller_gives_way_to_it(child, pids, tmp_path, until):
    """Two gateways take over at once: one child finds the lock taken and ends; its gateway watches the winner."""
    async with running(child(command=("false",))) as task:
        await asyncio.sleep(0)
        async with another_controller(tmp_path / "controller.sock") as asked:
            await until(lambda: len(asked) >= 4)
        assert not task.done()
    assert pids() == []


async def test_a_child_that_ignores_sigterm_is_killed(child, pids, until, monkeypatch):
    monkeypatch.setattr("narrowgauge.serving.gateway.supervise._STOP_S", 0.2)
    async with running(child("stubborn")):
        await until(pids)
    assert not is_running(pids()[0])
