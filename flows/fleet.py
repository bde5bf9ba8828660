"""A gateway with its controller and replicas, started for the length of a command and gone with it."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from narrowgauge.serving.rollout.client import RolloutClient
from narrowgauge.serving.settings import Settings

START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 30.0


class FleetError(RuntimeError):
    """The gateway or its controller did not come up, or crashed; the message names the log."""


@dataclass
class Fleet:
    """A running gateway: its public `url`; `leftovers` are what had to be killed, or had ended, when it was stopped."""

    url: str
    leftovers: list[str] = field(default_factory=list)


@contextlib.contextmanager
def fleet(settings: Settings) -> Iterator[Fleet]:
    """Starts `narrowgauge gateway --ephemeral` on a free port and waits for its controller. Call from the main thread.

    All of it ends with the block, and if this process is killed too. Raises FleetError.
    """
    settings.logs.mkdir(parents=True, exist_ok=True)
    log = settings.logs / "gateway.log"
    command = ["gateway", "--port", "0", "--ephemeral", "--die-with", str(os.getpid())]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "narrowgauge", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal is for the command, which then stops the gateway
        )
    try:
        running = Fleet(url=_wait_until_up(child, log, settings))
        try:
            yield running
        except Exception as error:
            if child.poll() is not None:  # whatever failed, failed because of that
                raise FleetError(_crashed(child, log)) from error
            raise
        finally:
            if child.poll() is not None:
                running.leftovers.append(_crashed(child, log))
            running.leftovers += _stop(child)
    finally:
        _stop(child)


def _wait_until_up(child: subprocess.Popen[bytes], log: Path, settings: Settings) -> str:
    client = RolloutClient(settings.admin_url, timeout_s=5.0)
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise FleetError(_crashed(child, log))
        found = re.search(r"gateway listening on (http://\S+)", log.read_text(errors="replace"))
        if found and client.answers():
            return found[1]
        time.sleep(0.1)
    raise FleetError(f"the gateway and its controller were not up within {START_DEADLINE_S:.0f} s; see {log}")


def _crashed(child: subprocess.Popen[bytes], log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()}" if lines else ""
    return f"the gateway ended by itself with {child.returncode}{said}; see {log}"


def _stop(child: subprocess.Popen[bytes]) -> list[str]:
    """Ends the gateway and waits for all that it started; what does not go is killed and named."""
    if child.poll() is not None:
        return []
    process = psutil.Process(child.pid)
    family = process.children(recursive=True)
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_DEADLINE_S)
    _, alive = psutil.wait_procs([process, *family], timeout=STOP_DEADLINE_S)
    leftovers = []
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            leftovers.append(f"process {left.pid} ({' '.join(left.cmdline()[1:4])}) had to be killed")
            left.kill()
    child.wait()
    return leftovers
