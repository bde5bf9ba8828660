"""`narrowgauge rollout …` and `controller`, where nothing can be done: one line that says what to do."""

import fcntl

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
