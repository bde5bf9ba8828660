"""The gateway as a process: sockets first, then states, servers, the controller; SIGTERM drains it and it exits 0."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from narrowgauge.serving.gateway.admin import admin_app
from narrowgauge.serving.gateway.app import Gateway, public_app
from narrowgauge.serving.gateway.config import GatewayConfig, GatewayConfigError
from narrowgauge.serving.gateway.supervise import ControllerChild
from narrowgauge.serving.lifecycle import die_with
from narrowgauge.serving.settings import Settings
from narrowgauge.serving.sockets import admin_transport, bind_tcp, bind_unix

_KEEP_ALIVE_S = 75  # longer than our clients' pools keep a connection, so that none is reused as we close it
_FAREWELL_S = 5.0  # after the drain's end: for the errors that end what is left to go out


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the process is started. `controller`: keep one as a child. `ephemeral`: the child dies with this process, as this
    one does with `die_with`, the pid of its parent."""

    host: str = "127.0.0.1"
    port: int = 8080
    controller: bool = True
    controller_args: tuple[str, ...] = ()
    ephemeral: bool = False
    die_with: int | None = None


def run_gateway(
    config: GatewayConfig, launch: Launch, settings: Settings, *, on_event: Callable[[str, Mapping[str, Any]], None]
) -> None:
    """Runs until SIGTERM or SIGINT has drained it (a second signal ends it at once). Call in the main thread.

    `on_event` is told ("listening", {"socket"}) and ("draining", {"in_flight"}). Raises GatewayConfigError, AddressInUse,
    ParentGone.
    """
    if launch.die_with is not None:
        die_with(launch.die_with)
    _, path = admin_transport(settings.gateway_admin_url)
    if path is None:
        raise GatewayConfigError(
            f"NG_GATEWAY_ADMIN_URL={settings.gateway_admin_url}: the gateway's admin API needs a Unix socket: unix:PATH"
        )
    with contextlib.closing(bind_tcp(launch.host, launch.port)) as public, _admin_socket(Path(path)) as admin:
        process = _Process(config, launch, settings, on_event=on_event)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(process.run(public, admin))


class _Process:
    def __init__(
        self,
        config: GatewayConfig,
        launch: Launch,
        settings: Settings,
        *,
        on_event: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._config, self._launch, self._settings, self._on_event = config, launch, settings, on_event
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()

    async def run(self, public: socket.socket, admin: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._on_event("listening", {"socket": public})  # whoever reads this may signal us from now on
        async with Gateway.opened(self._config, folder=self._settings.run / "traffic") as gateway:
            front, back = Server(public_app(gateway)), Server(admin_app(gateway))
            async with asyncio.TaskGroup() as tasks:
                governing = tasks.create_task(back.serve(sockets=[admin]))
                answering = tasks.create_task(front.serve(sockets=[public]))
                controller = tasks.create_task(self._controller().run()) if self._launch.controller else None
                stopped = tasks.create_task(self._stop.wait())
                needed = [stopped, answering, governing, *([gateway.probing] if gateway.probing else [])]
                await asyncio.wait(needed, return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                await self._drain(gateway, front, answering)
                if controller is not None:
                    controller.cancel()
                    await asyncio.wait((controller,))
                back.should_exit = True
        if not self._stop.is_set():
            raise RuntimeError("a part of the gateway ended by itself")

    async def _drain(self, gateway: Gateway, front: uvicorn.Server, answering: asyncio.Task[None]) -> None:
        """Takes no more connections and lets requests finish, until the time is over; then they end with an error.

        The admin API answers on meanwhile, so that the controller sees what is in flight.
        """
        self._on_event("draining", {"in_flight": gateway.running})
        gateway.draining = True
        front.should_exit = True
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((answering, hurry), timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        gateway.expire()
        await asyncio.wait((answering,), timeout=_FAREWELL_S)
        front.force_exit = True
        await answering

    def _on_signal(self) -> None:
        # Where the parent died there is nobody to drain for.
        orphaned = self._launch.die_with is not None and os.getppid() != self._launch.die_with
        if self._stop.is_set() or orphaned:
            self._hurry.set()
        self._stop.set()

    def _controller(self) -> ControllerChild:
        tie = ("--ephemeral", "--die-with", str(os.getpid())) if self._launch.ephemeral else ()
        command = (sys.executable, "-m", "narrowgauge", "controller", *tie, *self._launch.controller_args)
        log = self._settings.logs / "controller.log"
        return ControllerChild(command, admin_url=self._settings.admin_url, log=log)


@contextlib.contextmanager
def _admin_socket(path: Path) -> Iterator[socket.socket]:
    with contextlib.closing(bind_unix(path)) as sock:
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal instead of with 0."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves the handlers as they are."""
        yield
