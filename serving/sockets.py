"""Listening sockets that are ours from the first moment: no port is raced for, no Unix socket is open to other users."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx

_LONGEST_PATH = 100  # sun_path holds 108 bytes; beyond this we go through a directory descriptor


class AddressInUse(OSError):
    """A port or socket that another process listens on; the message says which, and what to do."""


def bind_tcp(host: str, port: int, *, listening: bool = True) -> socket.socket:
    """A bound TCP socket (port 0 picks a free one). Raises AddressInUse.

    With `listening=False` the port is held but refuses connections: hand it to a child, then close this copy.
    SO_REUSEADDR is left off there: Linux lets two sockets that both have it bind one port until one of them listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if listening:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        if listening:
            sock.listen(2048)
    except OSError as error:
        sock.close()
        raise AddressInUse(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0 picks a free one)"
        ) from None
    return sock


def adopt(descriptor: int) -> socket.socket:
    """A socket handed down by the parent process (`--fd`). Listens on it if the parent did not."""
    sock = socket.socket(fileno=descriptor)
    sock.listen(2048)
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix socket of mode 600. A stale file is removed under a lock; a live one raises AddressInUse."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(path.with_name(f".{path.name}.lock")), short_path(path) as address:
        if path.exists():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(address) == 0:
                    raise AddressInUse(
                        f"{path}: another process listens on this socket; stop it or use another NG_HOME"
                    )
            path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            sock.bind(address)
            sock.listen(256)
        finally:
            os.umask(old)
    return sock


def admin_transport(url: str) -> tuple[str, str | None]:
    """Splits an admin URL into (base URL, Unix socket path or None): `unix:PATH` or `http://HOST:PORT`."""
    if url.startswith("unix:"):
        return "http://narrowgauge", url.removeprefix("unix:")
    return url.rstrip("/"), None


@contextlib.contextmanager
def admin_client(url: str, *, timeout_s: float = 10.0) -> Iterator[httpx.Client]:
    """A client for an admin API on a Unix socket or TCP. Proxies from the environment are not used."""
    base, path = admin_transport(url)
    if path is None:
        with httpx.Client(base_url=base, timeout=timeout_s, trust_env=False) as client:
            yield client
        return
    with short_path(Path(path)) as address:
        transport = httpx.HTTPTransport(uds=address)
        with httpx.Client(base_url=base, timeout=timeout_s, transport=transport, trust_env=False) as client:
            yield client


def listens(url: str) -> bool:
    """Whether somebody listens at an admin URL on a Unix socket (True for TCP, where only a request can tell).

    Ask before a request that may find nobody: httpcore leaves the socket of a failed attempt open.
    """
    _, path = admin_transport(url)
    if path is None:
        return True
    try:
        with short_path(Path(path)) as address, socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(address) == 0
    except OSError:
        return False


@contextlib.asynccontextmanager
async def async_admin_client(url: str, *, timeout_s: float = 10.0):  # type: ignore[no-untyped-def]
    """The same for asyncio: an `httpx.AsyncClient`."""
    base, path = admin_transport(url)
    with contextlib.ExitStack() as stack:
        transport = httpx.AsyncHTTPTransport(uds=stack.enter_context(short_path(Path(path)))) if path else None
        async with httpx.AsyncClient(base_url=base, timeout=timeout_s, transport=transport, trust_env=False) as client:
            yield client


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The path, or a short alias of it through a directory descriptor that lives as long as the block."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock that leaves no file behind: whoever gets the lock of a file that is gone by now takes a new one."""
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                current = False
            if not current:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
