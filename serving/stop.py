"""Ends what runs over one NG_HOME: the gateway, then the controller, then the replicas, so that nobody starts one anew.

The gateway drains first, while replicas still answer, and ends its own controller; one that it only found is ended next.
A process is found by who listens on its socket (the kernel says so: SO_PEERCRED), a replica by its record, and each is
signalled through a descriptor that was compared with what was found, so that no other process can be meant.
"""

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from narrowgauge.serving.lifecycle import identify
from narrowgauge.serving.rollout.daemon import leading
from narrowgauge.serving.rollout.platforms.local import LocalPlatform
from narrowgauge.serving.settings import Settings
from narrowgauge.serving.sockets import admin_transport, short_path

_POLL_S = 0.05


class StopFailed(RuntimeError):
    """Something did not end, or cannot be found from here; the message says what to do."""


def stop(settings: Settings, *, timeout_s: float, told: Callable[[str], None]) -> int:
    """Ends all of it and returns how many processes that were; `told` gets a line for each that has ended.

    Each process gets `timeout_s` to finish its requests; then replicas are killed, and the others are left, with
    StopFailed. Raises ControllerRuns where another controller has started meanwhile.
    """
    count = 0
    for name, url in (("gateway", settings.gateway_admin_url), ("controller", settings.admin_url)):
        count += _stop_listener(name, url, timeout_s=timeout_s, told=told)
    if not (settings.run / "replicas").is_dir():
        return count
    settings.locks.mkdir(parents=True, exist_ok=True, mode=0o700)
    with leading(settings):
        return count + _stop_replicas(LocalPlatform(settings), timeout_s=timeout_s, told=told)


def _stop_listener(name: str, url: str, *, timeout_s: float, told: Callable[[str], None]) -> int:
    _, path = admin_transport(url)
    if path is None:
        raise StopFailed(f"the {name}'s admin API is at {url}, not at a socket of this machine: stop it where it runs")
    pid = _listener(Path(path))
    if pid is None:
        return 0
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        if _listener(Path(path)) != pid:  # it ended in between, and the descriptor may name another process
            return 0
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], timeout_s)[0]:
            raise StopFailed(
                f"the {name} (pid {pid}) has not ended within {timeout_s:g} s; give it more --timeout, or end it with "
                f"`kill -9 {pid}` and call this again"
            )
    finally:
        os.close(pidfd)
    told(f"{name} stopped (pid {pid})")
    return 1


def _listener(path: Path) -> int | None:
    """The pid of whoever listens on a Unix socket, None for nobody."""
    try:
        with short_path(path) as address, socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    pid: int = struct.unpack("3i", credentials)[0]
    return pid if pid and identify(pid) is not None else None


def _stop_replicas(platform: LocalPlatform, *, timeout_s: float, told: Callable[[str], None]) -> int:
    platform.adopt()
    for replica in platform.replicas():
        platform.stop(replica.id, grace_s=timeout_s)
    count = 0
    while platform.stopping():
        for ended in platform.poll():
            count += 1
            told(f"replica {ended.replica.id} stopped (pid {ended.replica.pid})")
        time.sleep(_POLL_S)
    return count
