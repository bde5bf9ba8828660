"""Results files say where, when and by what they were measured."""

import json
import subprocess
from pathlib import Path

from narrowgauge.cli.results import make_result, write_result

ROOT = Path(__file__).resolve().parents[2]


def test_a_results_file_names_machine_versions_and_commit(tmp_path):
    rows = [{"name": "bf16/b1", "unit": "tok/s", "ours": 1.0}]
    result = make_result("engine", rows, "narrowgauge bench engine", packages=("torch", "not-installed"))
    write_result(tmp_path / "results" / "engine.json", result)
    stored = json.loads((tmp_path / "results" / "engine.json").read_bytes())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert stored["rows"] == rows
    assert stored["commit"] == head.stdout.strip()
    assert stored["machine"]["class"].startswith("cpu-")
    assert list(stored["versions"]) == ["torch"]


def test_a_peers_versions_are_told_apart_from_ours():
    result = make_result("quant", [], "c", packages=("torch",), peer_versions={"torch": "2.11.0"})
    assert result["versions"]["peer torch"] == "2.11.0"
    assert result["versions"]["torch"] != "2.11.0"
