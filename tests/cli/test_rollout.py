"""`narrowgauge rollout …` and `controller`, where nothing can be done: one line that says what to do."""

import fcntl
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from narrowgauge.cli.controller import controller
from narrowgauge.cli.rollout import app
from narrowgauge.serving.rollout.client import ControllerUnreachable
from narrowgauge.serving.rollout.daemon import ControllerRuns
from narrowgauge.serving.rollout.spec import SpecError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("NG_ADMIN_URL", "NG_STORE_URL", "NG_GATEWAY_ADMIN_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NG_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("arguments", [["status"], ["history"], ["abort", "x"], ["promote", "x", "--epoch", "3"]])
def test_without_a_controller_each_command_says_how_to_start_one(arguments):
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ControllerUnreachable)
    assert "start one with `narrowgauge gateway`" in str(result.exception)


def test_a_spec_that_is_not_there_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(app, ["start", str(tmp_path / "no.yaml"), str(tmp_path)])
    assert isinstance(result.exception, SpecError)
    assert result.exception.exit_code == 2


def test_json_of_a_controller_that_goes_on_is_a_usage_error():
    import typer

    outer = typer.Typer()
    outer.command()(controller)
    result = CliRunner().invoke(outer, ["--json"])
    assert result.exit_code == 2


def test_a_second_controller_is_refused_while_the_first_leads(home):
    import typer

    (home / "locks").mkdir(parents=True)
    outer = typer.Typer()
    outer.command()(controller)
    with (home / "locks" / "controller.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = CliRunner().invoke(outer, ["--once"])
    assert isinstance(result.exception, ControllerRuns)
    assert "stop it, or use another NG_HOME" in str(result.exception)


REASON = "replicas died 2 times, 1 allowed; the last that died: exit code 2: error: --threads must be at least 1"
EVENTS = [
    {"kind": "Moved", "at": 1.0, "phase": "Canary", "step": 0, "reason": "all gates passed", "gate": None},
    {"kind": "TrafficSet", "at": 2.0, "stable": "a" * 12, "canary": "b" * 12, "canary_bp": 1000, "shadow_bp": 0},
    {"kind": "ReplicaLost", "at": 3.0, "replica": "b" * 12 + "-012345", "reason": "signal 9: (it said nothing)"},
    {"kind": "Judged", "at": 4.0, "verdicts": [{"gate": "readiness", "result": "fail", "reason": REASON}]},
    {"kind": "Moved", "at": 5.0, "phase": "Aborting", "step": 0, "reason": REASON, "gate": "readiness"},
    {"kind": "Baked", "at": 6.0, "deadline_at": 9.0},
    {"kind": "Asked", "at": 7.0, "action": "abort"},
]


@pytest.fixture
def told(monkeypatch):
    """A controller that knows one rollout; the terminal has 80 columns."""
    rollout = {"id": "0123456789", "model": "smollm2", "revision_id": "b" * 12, "phase": "Aborted", "reason": REASON}
    client = SimpleNamespace(rollouts=lambda _: [{**rollout, "created_at": 0.0}], events=lambda _: EVENTS)
    monkeypatch.setattr("narrowgauge.cli.rollout._client", lambda: client)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("told")
def test_history_fits_80_columns_and_keeps_what_identifies_a_rollout_on_one_line():
    result = CliRunner().invoke(app, ["history"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split()[2:] == ["0123456789", "Aborted"]
    assert f"smollm2, revision {'b' * 12}" in lines[1]
    assert max(map(len, lines)) <= 80
    assert " ".join(result.output.split()).endswith(REASON)


@pytest.mark.usefixtures("told")
def test_the_events_of_a_rollout_fit_80_columns_and_are_words():
    result = CliRunner().invoke(app, ["history", "0123456789"])
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    text = " ".join(result.output.split())
    assert "to Canary, step 1: all gates passed" in text
    assert "canary 10 %, shadow 0 %" in text
    assert f"to Aborting, step 1 (gate readiness): {REASON}" in text
    assert "readiness: fail: " in text
    assert "action abort" in text
    assert "{" not in text
