"""One controller always answers: ours as a child, or one that was found and is watched until it answers no longer.

Whoever starts a second one does no harm: the controller's own lock lets one lead, and the other one ends at once. So two
gateways may both take over from a controller that died, and one that is merely slow is not replaced.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from narrowgauge.serving.sockets import async_admin_client, listens

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LIVED_WELL_S = 30.0  # a child that lived this long has its pauses start anew
_STOP_S = 15.0
_WATCH_S = 1.0
_MISSES = 3  # one that is being restarted by somebody else is back by then

_log = logging.getLogger(__name__)


class ControllerChild:
    """Keeps `command` running, its output in `log`. The two speak only over the admin API, so each may die alone."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        admin_url: str,
        log: Path,
        first_pause_s: float = _FIRST_PAUSE_S,
        watch_s: float = _WATCH_S,
    ) -> None:
        self._command = command
        self._admin_url = admin_url
        self._log_path = log
        self._first_pause_s = first_pause_s
        self._watch_s = watch_s

    async def run(self) -> None:
        """Runs until cancelled, then stops the child; a controller that it did not start is left alone.

        Call in the main thread: the child's tie to its parent is one to the thread that spawned it.
        """
        pause_s = self._first_pause_s
        while True:
            if await self._answered():
                await self._watch_another()
                pause_s = self._first_pause_s
            started = time.monotonic()
            end = await self._one_life()
            if time.monotonic() - started > _LIVED_WELL_S:
                pause_s = self._first_pause_s
            _log.warning(
                "the controller ended (%s); starting it again in %.1f s; its log: %s", end, pause_s, self._log_path
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _watch_another(self) -> None:
        """Returns when the controller that answers has stopped doing so."""
        _log.info("a controller answers at %s; it is watched, and none is started here", self._admin_url)
        misses = 0
        while misses < _MISSES:
            await asyncio.sleep(self._watch_s)
            misses = 0 if await self._answered() else misses + 1
        _log.warning(
            "the controller at %s, which was not started here, answers no longer; starting one: its log: %s",
            self._admin_url,
            self._log_path,
        )

    async def _one_life(self) -> str:
        try:
            child = await self._start()
        except OSError as error:
            return str(error)
        try:
            return f"exit code {await child.wait()}"
        finally:
            if child.returncode is None:
                await _stop(child)

    async def _start(self) -> asyncio.subprocess.Process:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches it through us, once
            )

    async def _answered(self) -> bool:
        if not listens(self._admin_url):
            return False
        with contextlib.suppress(httpx.HTTPError, OSError):
            async with async_admin_client(self._admin_url, timeout_s=2.0) as client:
                await client.get("/live")
                return True
        return False


async def _stop(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), _STOP_S)
    except TimeoutError:
        _log.warning("the controller did not end within %.0f s of SIGTERM; it is killed", _STOP_S)
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
