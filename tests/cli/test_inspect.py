"""`narrowgauge inspect` on plain folders, damaged checkpoints and things that are neither."""

import json

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from narrowgauge.cli.inspect import inspect
from narrowgauge.quant.formats.base import FormatError
from narrowgauge.quant.formats.manifest import Base, CheckpointDamaged, write_manifest


@pytest.fixture
def app():
    made = typer.Typer()
    made.command()(inspect)
    return made


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_plain_model_folder_is_described(app, folder):
    facts = json.loads(CliRunner().invoke(app, [str(folder), "--json"]).stdout)
    assert facts["format"] == "full precision"
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["tensors"] == 1
    assert facts["weight_bytes"] == (folder / "model.safetensors").stat().st_size
    assert facts["manifest"] == "none"


def test_files_are_checked_against_the_manifest(app, folder):
    manifest = write_manifest(folder, base=Base(source="somewhere"), recipe_digest="r")
    shown = CliRunner().invoke(app, [str(folder)])
    assert "2 files, all as listed" in shown.stdout
    assert manifest.digest in shown.stdout
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLX"]}))
    damaged = CliRunner().invoke(app, [str(folder)])
    assert isinstance(damaged.exception, CheckpointDamaged)


def test_a_folder_that_is_no_model_is_refused(app, tmp_path):
    assert isinstance(CliRunner().invoke(app, [str(tmp_path)]).exception, FormatError)
