"""`narrowgauge convert` on the command line."""

import json

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from narrowgauge.cli.convert import convert
from narrowgauge.quant.convert import ConvertError
from narrowgauge.quant.formats.base import QuantizedWeight, get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme

W4 = Scheme(weights=WeightScheme(bits=4, group=32))


@pytest.fixture
def app():
    made = typer.Typer()
    made.command()(convert)
    return made


@pytest.fixture
def checkpoint(tmp_path):
    weight = QuantizedWeight(
        codes=torch.randint(-8, 8, (16, 64), dtype=torch.int8), scales=torch.full((16, 2), 0.5, dtype=torch.bfloat16)
    )
    folder = tmp_path / "source"
    folder.mkdir()
    packed = get_format("compressed-tensors").pack(weight, W4)
    save_file({f"m.a.{local}": tensor for local, tensor in packed.items()}, folder / "model.safetensors")
    config = {"dtype": "bfloat16", "quantization_config": get_format("compressed-tensors").config({"m.a": W4}, ())}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_conversion_says_what_it_wrote(app, checkpoint, tmp_path):
    result = CliRunner().invoke(app, [str(checkpoint), str(tmp_path / "out"), "--format", "awq", "--json"])
    facts = json.loads(result.stdout)
    assert (facts["source_format"], facts["format"], facts["layers"]) == ("compressed-tensors", "awq", 1)
    assert facts["path"] == str(tmp_path / "out")
    assert CheckpointReader(tmp_path / "out").layout.format == "awq"
    shown = CliRunner().invoke(app, [str(tmp_path / "out"), str(tmp_path / "full"), "--format", "none"])
    assert "1 layers from awq to none" in shown.stdout
    assert CheckpointReader(tmp_path / "full").layout is None


def test_a_refusal_is_one_named_error(app, checkpoint, tmp_path):
    result = CliRunner().invoke(app, [str(checkpoint), str(tmp_path / "out"), "--format", "fp8"])
    assert isinstance(result.exception, ConvertError)
    assert "m.a: W4A16: native fp8 files hold FP8 weights" in str(result.exception)
