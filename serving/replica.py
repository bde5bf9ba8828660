"""The replica process: binds its socket, loads one checkpoint, serves it, drains on SIGTERM and exits 0.

The socket is bound before anything heavy is imported, so that whoever started us knows the port at once and /live can
answer while the model loads. Exit code 0 after an asked-for end, 1 where the load failed, the engine died or a second
signal cut the drain short.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from narrowgauge.engine.config import EngineConfig
from narrowgauge.serving.lifecycle import die_with
from narrowgauge.serving.settings import Settings
from narrowgauge.serving.sockets import adopt, bind_tcp, bind_unix

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from narrowgauge.engine.async_engine import AsyncEngine

KEEP_ALIVE_S = 75  # longer than the pools of our clients keep a connection, so that none is reused as we close it
_FAREWELL_S = 5.0  # for streams to carry their error out after the engine has ended
_POLL_S = 0.2

_Value = TypeVar("_Value")


class ReplicaFailed(RuntimeError):
    """The replica could not go on; the message says why."""


class WrongCheckpoint(ReplicaFailed):
    """The bytes fetched are not those of --digest."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """What one replica serves, and where.

    `checkpoint` is any URI that artifacts.fetch takes. `descriptor` is an inherited socket in place of host and port.
    `digest` refuses other bytes; `revision` defaults to the digest's first 12 digits. `engine_args` are EngineConfig's.
    """

    checkpoint: str
    host: str = "127.0.0.1"
    port: int = 8000
    descriptor: int | None = None
    served_model_name: str | None = None
    revision: str | None = None
    digest: str | None = None
    admin_socket: Path | None = None
    die_with: int | None = None
    drain_timeout_s: float = 30.0
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def default_model_name(uri: str) -> str:
    """The name served when none is given: models:/NAME@… → NAME, hf:ORG/NAME@… → ORG/NAME, a folder → its name."""
    scheme, separator, rest = uri.partition(":")
    if separator and scheme == "models":
        return rest.lstrip("/").partition("@")[0].partition("/")[0]
    if separator and scheme == "hf":
        return rest.partition("@")[0]
    if separator and scheme == "pypi":
        return rest.partition("==")[0]
    return Path(uri.removeprefix("file://")).absolute().name


def run_replica(
    options: ReplicaOptions, settings: Settings, *, on_event: Callable[[str, Mapping[str, Any]], None]
) -> int:
    """Serves until a signal, POST /drain or a failure ends it; returns the exit code.

    `on_event` is told ("listening", {"socket"}), ("ready", {"model", "digest", "revision", "seconds"}) and
    ("draining", {"in_flight"}). Raises AddressInUse, ParentGone, the errors of fetching and loading, ReplicaFailed.
    """
    signal.signal(signal.SIGTERM, _leave)  # until the loop's own handler: the imports take a while
    if options.die_with is not None:
        die_with(options.die_with)
    config = EngineConfig(model=Path(), **options.engine_args)  # a wrong flag is told before anything is bound
    public = bind_tcp(options.host, options.port) if options.descriptor is None else adopt(options.descriptor)
    with contextlib.closing(public), _admin_socket(options.admin_socket) as admin:
        on_event("listening", {"socket": public})
        code = _run(_Replica(options, settings, config, on_event=on_event).run(public, admin))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are leaving already; the exit code is settled
        return code


class _Replica:
    def __init__(
        self,
        options: ReplicaOptions,
        settings: Settings,
        config: EngineConfig,
        *,
        on_event: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        from narrowgauge.serving.health import ReplicaIdentity, ReplicaState

        self._options, self._settings, self._config, self._on_event = options, settings, config, on_event
        self._model = options.served_model_name or default_model_name(options.checkpoint)
        identity = ReplicaIdentity(model=self._model, revision=options.revision or "", digest=options.digest or "")
        self._state: ReplicaState = ReplicaState(identity=identity)
        self._engine: AsyncEngine | None = None
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._signalled = False

    async def run(self, public: socket.socket, admin: socket.socket | None) -> int:
        from narrowgauge.serving.app import create_replica_app
        from narrowgauge.serving.health import create_admin_app

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        apps = [(create_replica_app(self._state), public)]
        if admin is not None:
            apps.append((create_admin_app(self._state, drain=self._stop.set), admin))
        try:
            async with _serving(apps) as servers:
                loading = asyncio.create_task(self._load())
                stopping = asyncio.create_task(self._stop.wait())
                ended = await _first(loading, stopping, *servers)
                if ended is loading:
                    watch = asyncio.create_task(self._watch_engine())
                    ended = await _first(watch, stopping, *servers)
                    watch.cancel()
                if ended is not stopping:
                    raise ReplicaFailed("the HTTP server has ended by itself")
                loading.cancel()
                return await self._drain()
        finally:
            if self._engine is not None:
                await self._engine.shutdown()

    def _on_signal(self) -> None:
        # Where the parent died there is nobody to drain for. A signal after POST /drain is no second one: that is how
        # a container's stop hook and its runtime follow each other.
        orphaned = self._options.die_with is not None and os.getppid() != self._options.die_with
        if self._signalled or orphaned:
            self._hurry.set()
        self._signalled = True
        self._stop.set()

    async def _load(self) -> None:
        from narrowgauge.engine.async_engine import AsyncEngine
        from narrowgauge.serving.artifacts import fetch
        from narrowgauge.serving.health import ReplicaIdentity
        from narrowgauge.serving.openai.protocol import sampling_defaults

        started_s, options = time.monotonic(), self._options
        self._state.progress = f"fetching {options.checkpoint}"
        checkpoint = await _in_daemon_thread(lambda: fetch(options.checkpoint, settings=self._settings))
        if options.digest is not None and checkpoint.digest != options.digest:
            raise WrongCheckpoint(f"{options.checkpoint} has digest {checkpoint.digest}, not {options.digest}")
        self._state.progress = "loading the model"
        defaults = sampling_defaults(checkpoint.path)
        self._engine = AsyncEngine(replace(self._config, model=checkpoint.path))
        await self._engine.ready()
        identity = ReplicaIdentity(
            model=self._model, revision=options.revision or checkpoint.digest[:12], digest=checkpoint.digest
        )
        self._state.identity = identity
        self._state.attach(self._engine, sampling_defaults=defaults)
        seconds = time.monotonic() - started_s
        self._on_event(
            "ready",
            {"model": identity.model, "digest": identity.digest, "revision": identity.revision, "seconds": seconds},
        )

    async def _watch_engine(self) -> None:
        """Ends with ReplicaFailed once the engine has died and its streams have been told so."""
        while (reason := self._state.why_dead()) is None:  # noqa: ASYNC110 - a dying thread sets no event
            await asyncio.sleep(_POLL_S)
        await self._until_idle(_FAREWELL_S, patient=True)
        raise ReplicaFailed(reason)

    async def _drain(self) -> int:
        """Lets what runs finish, at most --drain-timeout; what is left is failed in-band. Returns the exit code."""
        self._state.draining = True
        self._on_event("draining", {"in_flight": self._state.in_flight})
        await self._until_idle(self._options.drain_timeout_s)
        if (reason := self._state.why_dead()) is not None:
            raise ReplicaFailed(reason)
        if self._state.in_flight and self._engine is not None:
            await self._engine.shutdown()
            await self._until_idle(_FAREWELL_S, patient=True)
        return 1 if self._hurry.is_set() else 0

    async def _until_idle(self, timeout_s: float, *, patient: bool = False) -> None:
        """Returns when nothing is in flight, after `timeout_s`, or (unless patient) when a second signal hurries us."""
        waits = [asyncio.create_task(self._state.idle.wait())]
        if not patient:
            waits.append(asyncio.create_task(self._hurry.wait()))
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


@contextlib.asynccontextmanager
async def _serving(apps: list[tuple["FastAPI", socket.socket]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Runs one uvicorn server for each application; on leaving they stop and are waited for."""
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
            return contextlib.nullcontext()  # signals are the replica's: uvicorn's handler would not drain

    servers = [Server(_config(app)) for app, _ in apps]
    tasks = [asyncio.create_task(server.serve(sockets=[sock])) for server, (_, sock) in zip(servers, apps, strict=True)]
    try:
        yield tasks
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


def _config(app: "FastAPI") -> "uvicorn.Config":
    import uvicorn

    return uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_FAREWELL_S),
    )


@contextlib.contextmanager
def _admin_socket(path: Path | None) -> Iterator[socket.socket | None]:
    if path is None:
        yield None
        return
    with contextlib.closing(bind_unix(path)) as sock:
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def _run(main: Coroutine[Any, Any, int]) -> int:
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


async def _first(*tasks: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """The first of the tasks to end; raises its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task in done:
            task.result()
            return task
    raise AssertionError("asyncio.wait returned nothing")


async def _in_daemon_thread(work: Callable[[], _Value]) -> _Value:
    """Awaits `work` in a thread that the end of the process need not wait for, as a download would make it."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], object] = future.set_result, work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    value: _Value = await future
    return value
