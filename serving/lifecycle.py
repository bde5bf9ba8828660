"""How our processes are born and die: tied to a parent when asked to be, announced on one line, drained on SIGTERM."""

import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class ParentGone(RuntimeError):
    """The process that this one was to die with has ended already."""


def die_with(parent_pid: int) -> None:
    """Has the kernel send us SIGTERM when the parent ends. Call first thing in the child, from its main thread.

    The signal is tied to the parent *thread* that spawned us, so parents spawn from their main thread. The parent may
    have died before this call: then nobody would ever signal us, hence the check after it. Raises ParentGone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ParentGone(f"parent process {parent_pid} has ended; not starting")


def announce(name: str, sock: socket.socket) -> str:
    """Prints `NAME listening on URL` (flushed) for whoever started us with --port 0; returns the URL."""
    url = socket_url(sock)
    print(f"{name} listening on {url}", flush=True, file=sys.stdout)
    return url


def socket_url(sock: socket.socket) -> str:
    """`http://HOST:PORT` or `unix:PATH` of a bound socket."""
    address = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{address}"
    host = f"[{address[0]}]" if sock.family == socket.AF_INET6 else address[0]
    return f"http://{host}:{address[1]}"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Which process this is, so that a recycled pid is never mistaken for it: pid, start time in clock ticks, boot id."""

    pid: int
    start_ticks: int
    boot_id: str


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a running process, or None where there is none (or only a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before ')' may hold blanks and brackets
    if fields[0] in ("Z", "X"):
        return None
    return ProcessIdentity(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id())


def boot_id() -> str:
    """Changes at every boot: pids and ticks of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
