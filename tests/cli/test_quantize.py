"""`narrowgauge quantize` as a user runs it: a process, its exit code, its streams."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from narrowgauge.cli.main import make_app

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


BUDGET = """
version: 1
model: {{source: "{source}", name: tiny}}
methods: [{{name: rtn}}]
calibration: {{samples: 4, length: 32}}
target_bits: 5.5
candidates: [{{weights: {{bits: 4, group: 32}}}}, {{weights: {{bits: 8}}}}]
rules: [{{match: 're:.*v_proj$', keep: true}}]
"""


@pytest.fixture
def budget(recipe: Path, tmp_path: Path) -> Path:
    """A recipe with a budget for the same model, which now has a tokenizer of one token a letter."""
    letters = {chr(32 + index): index for index in range(64)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ").save_pretrained(tmp_path / "base")
    recipe.write_text(BUDGET.format(source=tmp_path / "base"))
    return recipe


def _invoke(home: Path, *arguments: object) -> Result:
    result = CliRunner(env={"NG_HOME": str(home), "COLUMNS": "200"}).invoke(make_app(), list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result


def test_a_dry_run_tells_schemes_bytes_memory_time_and_what_engines_will_not_like(budget, tmp_path):
    told = _invoke(tmp_path / "home", "quantize", budget, "--dry-run").stdout
    for words in (
        "6 layers in 1 blocks by rtn",
        "to be allotted by measured sensitivity: mixed 5.5 bits",
        "model.layers.*.self_attn.{q_proj,k_proj,v_proj} differ",
        "-> at most",
        "disk while it runs:",
        "time: about",
    ):
        assert words in told
    parsed = json.loads(_invoke(tmp_path / "home", "quantize", budget, "--dry-run", "--json").stdout)
    assert parsed["estimate"]["size_bytes"] == parsed["plan"]["size_bytes"]
    assert parsed["estimate"]["shortages"] == []
    assert parsed["estimate"]["seconds"] > 0
    assert not (tmp_path / "home" / "work").exists()


def test_a_budget_is_shown_with_the_predicted_and_the_measured_divergence(budget, tmp_path):
    told = _invoke(tmp_path / "home", "quantize", budget, "--output", tmp_path / "one").stdout
    report = json.loads((tmp_path / "one" / "quantization.json").read_bytes())["allocation"]
    assert f"allocation: {report['bits']:.3f} bits a weight" in told
    assert f"predicted {report['predicted_kl']:.4g}, measured {report['measured_kl']:.4g}" in told
    assert 4.5 <= report["bits"] <= 5.5


def test_where_and_with_how_much_memory_it_runs_does_not_change_the_bytes(budget, tmp_path):
    options = ["--device", "cpu", "--activation-memory", "0", "--fresh", "--json"]
    first = json.loads(_invoke(tmp_path / "home", "quantize", budget, "--output", tmp_path / "one", "--json").stdout)
    second = json.loads(_invoke(tmp_path / "home", "quantize", budget, "--output", tmp_path / "two", *options).stdout)
    assert first["digest"] == second["digest"]
    assert first["allocation"]["units"] == second["allocation"]["units"]
