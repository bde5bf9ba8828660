"""A run that is killed at any moment and started again makes the same checkpoint, bit for bit."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.quant.formats.manifest import verify

FP8_STATIC = {"weights": {"bits": 8, "type": "float", "per_tensor": True}}
FP8_STATIC["activations"] = {"bits": 8, "type": "float", "granularity": "tensor", "dynamic": False}
INT8 = {"weights": {"bits": 8}, "activations": {"bits": 8, "type": "int"}}
W4 = {"weights": {"bits": 4, "group": 32}}
RECIPES: dict[str, dict[str, Any]] = {
    "rtn": {"methods": [{"name": "rtn"}], "scheme": W4},
    "gptq": {"methods": [{"name": "gptq"}], "scheme": W4},
    "awq": {"methods": [{"name": "awq"}], "scheme": W4},
    "smoothquant, gptq": {"methods": [{"name": "smoothquant"}, {"name": "gptq"}], "scheme": INT8},
    "fp8 static": {"methods": [{"name": "fp8"}], "scheme": FP8_STATIC},
    "kv cache alone": {"scheme": {"weights": None, "kv_cache": {"bits": 8, "type": "float"}}},
    "awq, gptq, kv cache": {
        "methods": [{"name": "awq"}, {"name": "gptq"}],
        "scheme": {**W4, "kv_cache": {"bits": 8, "type": "float", "granularity": "head"}},
    },
}
QUICK = ("rtn", "smoothquant, gptq", "awq, gptq, kv cache")
Run = Callable[[str, Path, Path, int], dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a recipe of RECIPES in a process of its own that is killed at its `kill_at`-th step on the disk (0: never)."""
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(name: str, base: Path, output: Path, kill_at: int) -> dict[str, Any]:
            recipe = {"version": 1, "model": {"source": "unused", "name": "tiny"}, **RECIPES[name]}
            recipe["calibration"] = {"samples": 5, "length": 32, "sources": [{"text": str(base / "text.txt")}]}
            request = {"recipe": recipe, "base": str(base), "output": str(output), "kill_at": kill_at}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert answer["error"] is None, answer["error"]
            return answer

        yield ask
        process.stdin.close()


@pytest.fixture
def base(tiny_llama) -> Path:
    folder = tiny_llama(num_hidden_layers=3)
    paragraphs = [f"Paragraph {number} tells of {number * 7919 % 1000} things." for number in range(200)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    return folder


def _kill_and_finish(run: Run, name: str, base: Path, output: Path, *, kills: list[int], digest: str) -> int:
    """Runs until done, killed at each of `kills` on the way; returns how many blocks the runs found finished."""
    resumed = 0
    for kill_at in [*kills, 0]:
        answer = run(name, base, output, kill_at)
        resumed += answer["resumed"]
        if output.exists():  # never a part of a checkpoint, whenever the kill came
            assert verify(output).digest == digest, kill_at
    assert answer["digest"] == digest, kills
    assert not output.with_name(f".{output.name}.work").exists()
    return resumed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_killed_at_random_moments_it_goes_on_and_makes_the_same_bits(name, run, base, tmp_path):
    whole = run(name, base, tmp_path / "whole", 0)
    choose = random.Random(name)
    resumed = 0
    for trial in range(2):
        # First within about a block, then behind it; the last third of the steps removes what is needed no more.
        steps = whole["events"]
        kills = [choose.randint(1, steps // 3), choose.randint(2 * steps // 5, 2 * steps // 3)]
        resumed += _kill_and_finish(run, name, base, tmp_path / f"{trial}", kills=kills, digest=whole["digest"])
    assert resumed > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stride"), [("rtn", 1), ("awq, gptq, kv cache", 4)])
def test_killed_at_each_single_moment_it_makes_the_same_bits(name, stride, run, base, tmp_path):
    whole = run(name, base, tmp_path / "whole", 0)
    assert whole["events"] > 50
    for kill_at in range(1, whole["events"] + 1, stride):
        _kill_and_finish(run, name, base, tmp_path / f"{kill_at}", kills=[kill_at], digest=whole["digest"])
