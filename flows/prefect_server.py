"""One Prefect server for each command, unless PREFECT_API_URL names one that runs already.

Prefect's own ephemeral server is not used: it picks its port by chance and outlives a killed parent. Ours gets a port
that the kernel chose, already bound, and ends with the command however that ends.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from narrowgauge.flows.settings import FlowSettings
from narrowgauge.serving.lifecycle import die_with
from narrowgauge.serving.sockets import adopt, bind_tcp

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 5.0
DRAIN_DEADLINE_S = 10.0
_PROGRAM = "from narrowgauge.flows.prefect_server import serve; import sys; serve(int(sys.argv[1]), int(sys.argv[2]))"


class PrefectServerError(RuntimeError):
    """Our Prefect server did not come up; the message names its log. `--no-prefect` runs the same steps without it."""


@contextlib.contextmanager
def prefect_session(settings: FlowSettings) -> Iterator[str]:
    """Prefect's client set up for the block, with a server behind it; yields the API's URL.

    Import prefect (and flows/tasks) only inside: what it does at import depends on the environment that is set here.
    """
    with contextlib.ExitStack() as stack:
        variables = dict(_CLIENT_VARIABLES)
        if settings.prefect_api_url is not None:
            url = settings.prefect_api_url
        else:
            url = stack.enter_context(prefect_server(settings))
            variables["PREFECT_HOME"] = str(settings.prefect_home)
        stack.enter_context(_environment(variables))
        from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

        # A module that was imported earlier keeps the settings it was imported with, hence not by variables alone.
        # The logs would still be on their way to our server when it is stopped.
        updates = {PREFECT_API_URL: url, PREFECT_LOGGING_TO_API_ENABLED: settings.prefect_api_url is not None}
        stack.enter_context(temporary_settings(updates=updates))
        stack.callback(_drain_events)
        yield url


@contextlib.contextmanager
def prefect_server(settings: FlowSettings) -> Iterator[str]:
    """Starts a server on a free port, waits until it answers, yields its API's URL and stops it. Raises PrefectServerError."""
    settings.prefect_home.mkdir(parents=True, exist_ok=True)
    settings.shared.logs.mkdir(parents=True, exist_ok=True)
    log = settings.shared.logs / "prefect-server.log"
    sock = bind_tcp("127.0.0.1", 0, listening=False)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/api"
    child = _spawn(sock, settings.prefect_home, log)
    try:
        _wait_until_healthy(child, url, log)
        yield url
    finally:
        _stop(child)


def serve(descriptor: int, parent_pid: int) -> None:
    """The server process: Prefect's API on an inherited socket, ended by the kernel when the parent ends."""
    die_with(parent_pid)
    import uvicorn

    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        lifespan="on",
        log_level="error",
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[adopt(descriptor)])


_CLIENT_VARIABLES = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # What a step raises reaches the command line; Prefect would print it twice before, as traces.
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
}
_SERVER_VARIABLES = _CLIENT_VARIABLES | {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT_LOGGING_LEVEL": "ERROR",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
    # Without the services for schedules and late runs; names of Prefect 3.8 and 3.9, whose own test server uses them.
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}


def _drain_events() -> None:
    """Sends the events that wait in Prefect's thread: later it would retry against a stopped server, and hold up our exit."""
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=DRAIN_DEADLINE_S, at_exit=False)


def _spawn(sock: socket.socket, prefect_home: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | _SERVER_VARIABLES | {"PREFECT_HOME": str(prefect_home)}
    environment.pop("PREFECT_API_DATABASE_CONNECTION_URL", None)
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(sock.fileno()), str(os.getpid())],
            env=environment,
            pass_fds=(sock.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal is for the command, which then stops the server
        )
    sock.close()  # so that a dead server refuses at once instead of leaving its clients hanging
    return child


def _wait_until_healthy(child: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            if child.poll() is not None:
                raise PrefectServerError(
                    f"the Prefect server ended with {child.returncode}; see {log}, or use --no-prefect"
                )
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").status_code == httpx.codes.OK:
                    return
            time.sleep(0.1)
    raise PrefectServerError(
        f"the Prefect server did not answer within {START_DEADLINE_S:.0f} s; see {log}, or use --no-prefect"
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
