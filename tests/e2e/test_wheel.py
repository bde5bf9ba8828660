"""The wheel holds what the checkout holds, and works where no checkout is."""

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from narrowgauge.cli.main import COMMANDS, GROUPS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("flows", "quant", "engine", "kernels", "serving")

pytestmark = pytest.mark.slow


def run(command: Path, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NG_HOME": str(home / "state")}
    return subprocess.run(
        [str(command), *arguments], cwd=home, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_every_module_and_every_specification(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"narrowgauge/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for pattern in ("*.py", "*.yaml", "*.jsonl")
        for path in (ROOT / room).rglob(pattern)
    }
    wanted |= {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").glob("narrowgauge/cli/*.py")}
    assert wanted <= held, sorted(wanted - held)
    assert "narrowgauge/py.typed" in held
    assert not [name for name in held if name.startswith(ROOMS) or "/tests/" in name]


def test_the_command_of_the_wheel_is_the_whole_command_line(installed, tmp_path):
    result = run(installed, "--help", home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(f"  {name} " in result.stdout for name in (*COMMANDS, *GROUPS))


def test_the_wheel_finds_its_own_recipes(installed, tmp_path):
    python = installed.with_name("python")
    code = "from importlib.resources import files; print(files('narrowgauge.flows') / 'recipes' / 'smollm2-w4a16-gptq.yaml')"
    found = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert not Path(found).is_relative_to(ROOT)
    result = run(installed, "quantize", found, "--dry-run", "--json", home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)
    assert not [path.name for path in tmp_path.iterdir() if path.name not in ("state", ".cache")]
