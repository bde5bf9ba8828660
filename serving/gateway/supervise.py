"""The controller as the gateway's child: started unless one answers already, started again when it dies."""

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

_log = logging.getLogger(__name__)


class ControllerChild:
    """Keeps `command` running, its output in `log`. The two speak only over the admin API, so each may die alone."""

    def __init__(
        self, command: Sequence[str], *, admin_url: str, log: Path, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        self._command = command
        self._admin_url = admin_url
        self._log_path = log
        self._first_pause_s = first_pause_s

    async def run(self) -> None:
        """Returns where another controller answers; else runs until cancelled, then stops the child.

        Call in the main thread: the child's tie to its parent is one to the thread that spawned it.
        """
        pause_s = self._first_pause_s
        while not await self._answered():
            started = time.monotonic()
            end = await self._one_life()
            if time.monotonic() - started > _LIVED_WELL_S:
                pause_s = self._first_pause_s
            _log.warning(
                "the controller ended (%s); starting it again in %.1f s; its log: %s", end, pause_s, self._log_path
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        _log.info("a controller answers at %s; none is started here", self._admin_url)

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
