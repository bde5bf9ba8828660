"""Our Prefect server answers, and ends with the command however that ends."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlparse

import httpx
import psutil
import pytest

from narrowgauge.flows.prefect_server import PrefectServerError, prefect_server, prefect_session
from narrowgauge.flows.settings import FlowSettings, read_flow_settings


@pytest.fixture
def settings(tmp_path: Path) -> FlowSettings:
    return read_flow_settings({"NG_HOME": str(tmp_path / "ng")})


def listeners(url: str) -> list[psutil.Process]:
    """The processes of this machine that listen on the URL's port."""
    port = urlparse(url).port
    connections = psutil.net_connections("tcp")
    return [
        psutil.Process(c.pid)
        for c in connections
        if c.pid is not None and c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]


def test_it_answers_while_the_block_runs_and_leaves_no_process_and_no_port(settings: FlowSettings) -> None:
    with prefect_server(settings) as url:
        assert httpx.get(f"{url}/health").json() is True
        (server,) = listeners(url)
    assert not server.is_running()
    assert listeners(url) == []
    assert (settings.prefect_home / "prefect.db").exists()


def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import signal
        from narrowgauge.flows.prefect_server import prefect_server
        from narrowgauge.flows.settings import read_flow_settings
        with prefect_server(read_flow_settings()) as url:
            print(url, flush=True)
            signal.pause()
    """)
    environment = os.environ | {"NG_HOME": str(tmp_path / "ng")}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        (server,) = listeners(url)
        parent.send_signal(signal.SIGKILL)
        server.wait(10)
    assert listeners(url) == []


def test_a_server_that_cannot_start_is_named_with_its_log(settings: FlowSettings) -> None:
    settings.prefect_home.mkdir(parents=True)
    (settings.prefect_home / "prefect.db").write_bytes(b"not a database" * 100)
    with pytest.raises(PrefectServerError, match=r"prefect-server\.log"), prefect_server(settings):
        pass


def test_a_named_api_is_used_and_none_is_started(tmp_path: Path) -> None:
    settings = read_flow_settings({"NG_HOME": str(tmp_path), "PREFECT_API_URL": "http://127.0.0.1:1/api"})
    with prefect_session(settings) as url:
        assert url == "http://127.0.0.1:1/api"
    assert list(tmp_path.iterdir()) == []
