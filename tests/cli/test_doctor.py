"""`narrowgauge doctor` as a user runs it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge.cli.main import make_app


def test_json_lists_every_check_and_the_exit_code_is_zero_on_a_sound_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NG_HOME", str(tmp_path / "home"))
    answer = CliRunner().invoke(make_app(), ["doctor", "--json"])
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["ok"] is True
    assert {"name", "status", "detail"} == set(found["checks"][0])


def test_a_failed_check_exits_one_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NG_HOME", str(tmp_path / "file" / "home"))
    answer = CliRunner().invoke(make_app(), ["doctor"])
    assert answer.exit_code == 1
    assert "fail" in answer.stdout
