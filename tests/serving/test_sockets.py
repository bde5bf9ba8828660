"""Sockets: modes, stale files, long paths, ports that are taken."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading

import pytest

from narrowgauge.serving.sockets import AddressInUse, admin_client, async_admin_client, bind_tcp, bind_unix


@contextlib.contextmanager
def answering(sock):
    """One HTTP answer for each connection, until the socket is closed."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = sock.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        thread.join()


def test_a_unix_socket_is_ours_alone_and_answers(tmp_path):
    path = tmp_path / "run" / "x.sock"
    sock = bind_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with answering(sock), admin_client(f"unix:{path}") as client:
        assert client.get("/version").text == "ok"


async def test_a_path_longer_than_the_kernel_takes_works_all_the_same(tmp_path):
    path = tmp_path / ("d" * 90) / ("e" * 60) / "x.sock"
    sock = bind_unix(path)
    with answering(sock):
        with admin_client(f"unix:{path}") as client:
            assert client.get("/").text == "ok"
        async with async_admin_client(f"unix:{path}") as client:
            assert (await client.get("/")).text == "ok"


def test_a_stale_socket_is_replaced_and_a_live_one_refused(tmp_path):
    path = tmp_path / "x.sock"
    bind_unix(path).close()
    assert path.exists()
    live = bind_unix(path)
    with pytest.raises(AddressInUse, match="another process listens on this socket"):
        bind_unix(path)
    live.close()


def test_a_port_in_use_is_one_clear_line():
    with bind_tcp("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            AddressInUse, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
        ):
            bind_tcp("127.0.0.1", port)


def test_a_socket_that_does_not_listen_holds_the_port_and_refuses():
    with bind_tcp("127.0.0.1", 0, listening=False) as held:
        port = held.getsockname()[1]
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        with pytest.raises(AddressInUse):
            bind_tcp("127.0.0.1", port)
    assert os.name == "posix"


def test_no_lock_is_left_beside_a_socket_and_one_process_at_a_time_may_bind_it(tmp_path):
    path = tmp_path / "replica.sock"
    code = """if True:
        import pathlib, sys
        from narrowgauge.serving.sockets import AddressInUse, bind_unix
        try:
            sock = bind_unix(pathlib.Path(sys.argv[1]))
        except AddressInUse:
            print("taken", flush=True)
        else:
            print("bound", flush=True)
            sys.stdin.readline()
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    try:
        said = [child.stdout.readline().strip() for child in children]
        assert sorted(said) == ["bound", *["taken"] * 5]
        assert [found.name for found in tmp_path.iterdir()] == ["replica.sock"]
    finally:
        for child in children:
            child.communicate("\n", timeout=20)
