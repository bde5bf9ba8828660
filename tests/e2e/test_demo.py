"""The whole demo as a user runs it: from the checkout, then from the wheel in the same NG_HOME, and nothing left running."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

DEADLINE_S = 1500
PEOPLE = ("COLUMNS", "NG_", "PREFECT_", "MLFLOW_")


def run_demo(command: list[str], home: Path, user_home: Path) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(PEOPLE)}
    environment |= {"NG_HOME": str(home), "HOME": str(user_home)}
    done = subprocess.run(
        [*command, "demo", "--json"],
        env=environment,
        cwd=user_home,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def processes_of(home: Path) -> list[str]:
    """Command lines of the processes that have this NG_HOME, as far as we may look."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("NG_HOME", "").startswith(str(home)):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.slow
def test_the_demo_ends_as_it_must_twice_in_a_row_and_leaves_nothing_running(tmp_path: Path, installed: Path) -> None:
    home, user_home = tmp_path / "ng", tmp_path / "home"
    user_home.mkdir()
    checkout, wheel = [sys.executable, "-m", "narrowgauge"], [str(installed)]
    summaries = [run_demo(command, home, user_home) for command in (checkout, wheel)]
    for summary in summaries:
        assert summary["ok"]
        assert summary["failures"] == 0
        assert summary["bad_answers"] > 0
        acts = summary["acts"]
        assert [(act["exit_code"], act["verdict"]) for act in acts] == [(0, "passed"), (3, "rejected"), (3, "rejected")]
        assert [phase["phase"].split()[0] for phase in acts[0]["rollout"]["phases"]] == [
            *("Starting", "Shadow", "Canary", "Canary", "Promoting", "Baking")
        ]
        assert acts[1]["rollout"] is None
        assert (acts[2]["rollout"]["phase"], acts[2]["rollout"]["gate"]) == ("Aborted", "golden")
        assert acts[0]["figures"]["perplexity"] < acts[1]["figures"]["perplexity"]
        assert acts[0]["size_bytes"] < acts[0]["base_size_bytes"]
    assert [Path(summary["home"]).name for summary in summaries] == ["1", "2"]
    assert processes_of(home) == []
    caches = {path.name for path in user_home.iterdir()}  # compiled kernels of ours, and other libraries' caches
    assert caches <= {".cache", ".triton"}
