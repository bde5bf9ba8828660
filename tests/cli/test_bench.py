"""`narrowgauge bench engine` as a user runs it, on the real model for a few tokens."""

import json
from pathlib import Path

from typer.testing import CliRunner

from narrowgauge.cli.main import make_app


def test_a_results_file_is_written_where_asked(smollm2: Path, tmp_path: Path) -> None:
    output = tmp_path / "results" / "engine.json"
    arguments = [
        "bench",
        "engine",
        "--model",
        str(smollm2),
        "--threads",
        "1",
        "--tokens",
        "4",
        "--rounds",
        "1",
        "--against",
        "none",
    ]
    answer = CliRunner().invoke(make_app(), [*arguments, "--output", str(output), "--json"])
    assert answer.exit_code == 0, answer.output
    result = json.loads(output.read_text())
    assert result == json.loads(answer.stdout)
    assert result["topic"] == "engine"
    assert [row["name"].rpartition("/")[2] for row in result["rows"]] == ["b1", "b8"]
    assert all(row["ours"] > 0 for row in result["rows"])


def test_an_unknown_suite_is_a_usage_error() -> None:
    assert CliRunner().invoke(make_app(), ["bench", "engine", "--suite", "moon"]).exit_code == 2
