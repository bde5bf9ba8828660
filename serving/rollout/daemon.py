"""The controller's process: one lock, one socket, one loop."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

import narrowgauge
from narrowgauge.serving.lifecycle import announce, die_with
from narrowgauge.serving.metrics import RolloutMetrics, build_info
from narrowgauge.serving.rollout.admin import create_admin_app
from narrowgauge.serving.rollout.connection import Connection
from narrowgauge.serving.rollout.controller import Controller
from narrowgauge.serving.rollout.observe import RecordReader
from narrowgauge.serving.rollout.platforms.local import SERVE, LocalPlatform
from narrowgauge.serving.rollout.probes import ReplicaProber
from narrowgauge.serving.rollout.registration import RegistryRegistrar
from narrowgauge.serving.rollout.store import Store
from narrowgauge.serving.rollout.traffic.in_process import InProcessRouter
from narrowgauge.serving.settings import Settings, SettingsError
from narrowgauge.serving.sockets import bind_tcp, bind_unix

TICK_S = 0.5
_STOP_S = 30.0

_log = logging.getLogger(__name__)


class ControllerRuns(RuntimeError):
    """Another controller leads over this NG_HOME; two would fight over the same traffic."""


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """`once`: one pass, then exit (cron). `ephemeral`: replicas end with this process. `die_with`: our parent's pid.

    `command` starts a replica; `tick_s` is the time between passes.
    """

    once: bool = False
    ephemeral: bool = False
    die_with: int | None = None
    command: Sequence[str] = SERVE
    tick_s: float = TICK_S


def run_controller(settings: Settings, options: ControllerOptions) -> None:
    """Runs until SIGTERM or SIGINT (or once). Raises ControllerRuns, AddressInUse, StoreError, LeadershipLost."""
    if options.die_with is not None:
        die_with(options.die_with)
    logging.getLogger("narrowgauge").setLevel(logging.INFO)
    for folder in (settings.home, settings.run, settings.locks):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with leading(settings):
        asyncio.run(_main(settings, options))


async def _main(settings: Settings, options: ControllerOptions) -> None:
    metrics = CollectorRegistry()
    build_info(metrics, process="controller", version=narrowgauge.__version__)
    store = Store(settings.store_url)
    platform = LocalPlatform(settings, command=options.command, die_with=os.getpid() if options.ephemeral else None)
    registrar = RegistryRegistrar(settings)
    controller = Controller(
        store=store,
        platform=platform,
        router=InProcessRouter(Connection("gateway", settings.gateway_admin_url)),
        prober=ReplicaProber(platform),
        records=RecordReader(Connection("gateway", settings.gateway_admin_url)),
        registrar=registrar,
        metrics=RolloutMetrics(metrics),
    )
    try:
        await controller.open()
        if options.once:
            await _once(controller)
        else:
            app = create_admin_app(controller, registrar=registrar, metrics=metrics)
            await _serve(controller, app, settings, tick_s=options.tick_s)
    finally:
        await controller.close()
        if options.ephemeral:
            await _end_replicas(platform)
        store.close()


async def _once(controller: Controller) -> None:
    """One look at the world, what it takes in the background, and one decision on what that brought."""
    await controller.tick()
    await controller.settle()
    await controller.tick()


async def _serve(controller: Controller, app: object, settings: Settings, *, tick_s: float) -> None:
    sock = _bind(settings.admin_url)
    announce("controller", sock)
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))  # type: ignore[arg-type]
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not stopped.is_set():
            began = time.monotonic()
            await controller.tick()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), max(0.01, tick_s - (time.monotonic() - began)))
    finally:
        server.should_exit = True
        await serving
        sock.close()
        _unbind(settings.admin_url)


async def _end_replicas(platform: LocalPlatform) -> None:
    """Ephemeral replicas drain; the kernel would signal them anyway when we end."""
    for replica in platform.replicas():
        platform.stop(replica.id, grace_s=_STOP_S)
    while platform.replicas() or platform.stopping():
        platform.poll()
        await asyncio.sleep(0.05)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would raise the signal again after its end, and exit with −15."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the loop."""
        yield


def _bind(url: str):  # type: ignore[no-untyped-def]
    if url.startswith("unix:"):
        return bind_unix(Path(url.removeprefix("unix:")))
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"NG_ADMIN_URL={url}: write unix:PATH or http://HOST:PORT")
    return bind_tcp(host.strip("[]"), int(port))


def _unbind(url: str) -> None:
    if url.startswith("unix:"):
        Path(url.removeprefix("unix:")).unlink(missing_ok=True)


@contextlib.contextmanager
def leading(settings: Settings) -> Iterator[None]:
    """Holds the lock that a controller over this NG_HOME holds. Raises ControllerRuns."""
    path = settings.locks / "controller.lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ControllerRuns(f"another controller holds {path}; stop it, or use another NG_HOME") from None
        yield
