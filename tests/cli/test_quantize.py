"""`narrowgauge quantize` as a user runs it: a process, its exit code, its streams."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = """
version: 1
model: {{source: "{source}", name: tiny}}
methods: [{{name: rtn}}]
scheme: {{weights: {{bits: 4, group: 32}}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(source=tmp_path / "base"))
    return path


def _run(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = "from narrowgauge.cli.main import run; run()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "NG_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_a_recipe_becomes_a_checkpoint_below_ng_home_and_is_found_again(recipe, tmp_path):
    plan = json.loads(_run(tmp_path / "home", "quantize", recipe, "--dry-run", "--json").stdout)
    assert len(plan["plan"]["layers"]) == 7
    assert not (tmp_path / "home" / "work").exists()
    first = json.loads(_run(tmp_path / "home", "quantize", recipe, "--json").stdout)
    name = f"{plan['recipe_digest'][:16]}-{plan['base']['digest'][:8]}"
    assert first["path"] == str(tmp_path / "home" / "work" / name / "checkpoint")
    again = _run(tmp_path / "home", "quantize", recipe)
    assert again.returncode == 0, again.stderr
    assert "found finished" in again.stdout
    shown = json.loads(_run(tmp_path / "home", "inspect", first["path"], "--json").stdout)
    assert shown["schemes"] == {"W4A16 g32": 7}
    assert shown["digest"] == first["digest"]


def test_a_mistake_in_the_recipe_is_one_line_and_exit_code_2(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("group: 32", "group: 48"))
    done = _run(tmp_path / "home", "quantize", recipe, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        "error: model.layers.0.self_attn.q_proj: in_features 64 is not a multiple of group 48"
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_model_is_one_line_and_exit_code_1(recipe, tmp_path):
    recipe.write_text(RECIPE.format(source="no/such/folder"))
    done = _run(tmp_path / "home", "quantize", recipe)
    assert (done.returncode, done.stderr) == (1, "error: no/such/folder: no such folder\n")
