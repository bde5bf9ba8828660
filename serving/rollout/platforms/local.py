"""Replicas as processes on this machine, known by pid, start time and boot, so that a recycled pid is never signalled.

A replica's socket is bound here without listening, handed down, and our copy closed: its port is never raced for, and
while it loads, or when it is dead, connections are refused instead of hanging. Records in `run/replicas/` outlive the
controller, and so do the replicas unless `die_with` ties them to it.
"""

import dataclasses
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.serving.lifecycle import ProcessIdentity, boot_id, identify
from narrowgauge.serving.rollout.platforms.base import Ended, PlatformError, Replica
from narrowgauge.serving.rollout.spec import EngineArgument, Revision
from narrowgauge.serving.settings import Settings
from narrowgauge.serving.sockets import bind_tcp

_TAIL_BYTES, _LONGEST_LINE = 4096, 300

SERVE = (sys.executable, "-m", "narrowgauge", "serve")


@dataclass(kw_only=True)
class _Process:
    """A live replica: `pidfd` names the process for good, `child` is ours to reap, None for an adopted one."""

    replica: Replica
    identity: ProcessIdentity
    pidfd: int
    child: subprocess.Popen[bytes] | None
    kill_at: float | None = None


class LocalPlatform:
    """Starts `command URI --fd N …`. Call from the main thread: a child's death signal is tied to the thread it came from."""

    def __init__(self, settings: Settings, *, command: Sequence[str] = SERVE, die_with: int | None = None) -> None:
        self._settings = settings
        self._command = tuple(command)
        self._die_with = die_with
        self._folder = settings.run / "replicas"
        self._processes: dict[str, _Process] = {}
        for folder in (self._folder, settings.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def adopt(self) -> tuple[Ended, ...]:
        """Takes over recorded replicas whose pid, start ticks and boot id agree; other records are deleted.

        Where those disagree the process is gone or somebody else's, and nothing is signalled.
        """
        gone = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = json.loads(path.read_bytes())
                replica = Replica(**{field.name: record[field.name] for field in dataclasses.fields(Replica)})
                identity = _recorded_identity(record)
            except (OSError, ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)  # half a record of a crash long ago names nothing that could be adopted
                continue
            process = _open(replica, identity) if identity is not None else None
            if process is None:
                path.unlink(missing_ok=True)
                gone.append(Ended(replica=replica, expected=bool(record.get("stopping")), reason="found gone"))
                continue
            self._processes[replica.id] = process
            if record.get("stopping"):
                process.kill_at = time.monotonic() + float(record["stopping"])
        return tuple(gone)

    def replicas(self) -> tuple[Replica, ...]:
        """Those that live and were not told to stop."""
        live = (process.replica for process in self._processes.values() if process.kill_at is None)
        return tuple(sorted(live, key=lambda replica: replica.started_at))

    def stopping(self) -> tuple[Replica, ...]:
        """Those that were told to stop and still live."""
        return tuple(process.replica for process in self._processes.values() if process.kill_at is not None)

    def start(self, revision: Revision) -> Replica:
        """Binds a port, spawns a replica, records it before and after: a crash in between leaves it findable."""
        replica_id = f"{revision.id}-{secrets.token_hex(3)}"
        sock = bind_tcp("127.0.0.1", 0, listening=False)
        with sock, (self._settings.logs / f"replica-{replica_id}.log").open("ab") as log:
            replica = Replica(
                id=replica_id,
                model=revision.model,
                revision=revision.id,
                digest=revision.digest,
                url=f"http://127.0.0.1:{sock.getsockname()[1]}",
                pid=None,
                started_at=time.time(),
            )
            arguments = self._arguments(revision, replica_id, sock.fileno())
            self._write(replica, None)
            try:
                child = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(sock.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C is for the controller, not for those it leaves running
                )
            except OSError as error:
                self._path(replica_id).unlink(missing_ok=True)
                raise PlatformError(f"a replica cannot be started: {arguments[0]}: {error.strerror}") from None
        identity = _identity_of(child)
        replica = dataclasses.replace(replica, pid=child.pid)
        pidfd = os.pidfd_open(child.pid)
        self._processes[replica_id] = _Process(replica=replica, identity=identity, pidfd=pidfd, child=child)
        self._write(replica, identity)
        return replica

    def mark_ready(self, replica_id: str) -> None:
        """Remembers it, also for the next controller; one that ended meanwhile is passed over."""
        process = self._processes.get(replica_id)
        if process is None:
            return
        process.replica = dataclasses.replace(process.replica, was_ready=True)
        if process.kill_at is None:  # the record of one that is stopping says so, and must go on saying it
            self._write(process.replica, process.identity)

    def stop(self, replica_id: str, *, grace_s: float) -> None:
        """SIGTERM, which drains; SIGKILL when `grace_s` have passed (by `poll`)."""
        process = self._processes[replica_id]
        if process.kill_at is not None:
            return
        process.kill_at = time.monotonic() + grace_s
        self._write(process.replica, process.identity, stopping_s=grace_s)
        _signal(process, signal.SIGTERM)

    def poll(self) -> tuple[Ended, ...]:
        """Reaps those that ended, and ends those whose grace is over."""
        ended = []
        for replica_id, process in list(self._processes.items()):
            if _alive(process):
                if process.kill_at is not None and time.monotonic() >= process.kill_at:
                    _signal(process, signal.SIGKILL)
                continue
            code = process.child.wait() if process.child is not None else None
            os.close(process.pidfd)
            del self._processes[replica_id]
            self._path(replica_id).unlink(missing_ok=True)
            (self._settings.run / f"replica-{replica_id}.sock").unlink(missing_ok=True)
            reason = "ended" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
            log = self._settings.logs / f"replica-{replica_id}.log"
            reason = f"{reason}: {_last_line(log)}; its log: {log}"
            ended.append(Ended(replica=process.replica, expected=process.kill_at is not None, reason=reason))
        return tuple(ended)

    def _arguments(self, revision: Revision, replica_id: str, descriptor: int) -> list[str]:
        admin = self._settings.run / f"replica-{replica_id}.sock"
        arguments = [*self._command, revision.uri, "--fd", str(descriptor)]
        arguments += ["--served-model-name", revision.model, "--revision", revision.id, "--digest", revision.digest]
        arguments += ["--admin-socket", str(admin)]
        for flag, value in revision.engine_args.items():
            arguments += flags(flag, value)
        if self._die_with is not None:
            arguments += ["--die-with", str(self._die_with)]
        return arguments

    def _path(self, replica_id: str) -> Path:
        return self._folder / f"{replica_id}.json"

    def _write(self, replica: Replica, identity: ProcessIdentity | None, *, stopping_s: float | None = None) -> None:
        record: dict[str, Any] = dataclasses.asdict(replica)
        record["port"] = int(replica.url.rpartition(":")[2])
        record["start_ticks"] = identity.start_ticks if identity else None
        record["boot_id"] = identity.boot_id if identity else boot_id()
        record["admin_socket"] = str(self._settings.run / f"replica-{replica.id}.sock")
        record["stopping"] = stopping_s
        write_atomically(self._path(replica.id), (json.dumps(record, indent=2) + "\n").encode())


def _last_line(log: Path) -> str:
    """What a replica said last: of an error that has a name it is the error, of a crash the exception."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError as error:
        return f"(its log cannot be read: {error.strerror})"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "(it said nothing)")
    return last if len(last) <= _LONGEST_LINE else last[: _LONGEST_LINE - 3] + "..."


def flags(name: str, value: EngineArgument) -> list[str]:
    """One engine argument as the command line writes it: `--name value`, or `--name` / `--no-name` for true and false."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _recorded_identity(record: dict[str, Any]) -> ProcessIdentity | None:
    """Who the record speaks of. Without a pid the recorder died while spawning: the admin socket's path finds the child."""
    if record["boot_id"] != boot_id():
        return None
    pid = record["pid"]
    if pid is None:
        return _find_by_argument(record["admin_socket"])
    return ProcessIdentity(pid=pid, start_ticks=record["start_ticks"], boot_id=record["boot_id"])


def _find_by_argument(argument: str) -> ProcessIdentity | None:
    wanted = os.fsencode(argument)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in arguments:
            return identify(int(folder.name))
    return None


def _open(replica: Replica, identity: ProcessIdentity) -> _Process | None:
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    if identify(identity.pid) != identity:  # after the descriptor is open, so that it names who was compared
        os.close(pidfd)
        return None
    replica = dataclasses.replace(replica, pid=identity.pid)
    return _Process(replica=replica, identity=identity, pidfd=pidfd, child=None)


def _identity_of(child: subprocess.Popen[bytes]) -> ProcessIdentity:
    """A child's identity, also when it has ended already (it stays a zombie until we reap it)."""
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessIdentity(pid=child.pid, start_ticks=int(stat[19]), boot_id=boot_id())


def _alive(process: _Process) -> bool:
    if process.child is not None and process.child.poll() is not None:
        return False
    poller = select.poll()
    poller.register(process.pidfd, select.POLLIN)
    return not poller.poll(0)


def _signal(process: _Process, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(process.pidfd, number)
    except ProcessLookupError:
        return  # it has just ended; poll() will say so
