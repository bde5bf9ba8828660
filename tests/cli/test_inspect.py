"""`narrowgauge inspect` on plain folders, damaged checkpoints and things that are neither."""

import json

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from narrowgauge.cli.inspect import inspect
from narrowgauge.quant.formats.base import FormatError, KVScales, QuantizedWeight, get_format
from narrowgauge.quant.formats.manifest import Base, CheckpointDamaged, write_manifest
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme


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


@pytest.fixture
def quantized(tmp_path):
    """A checkpoint of one W4A16 Linear that calls itself GPTQ, with KV scales that its config does not mention."""
    scheme = Scheme(weights=WeightScheme(bits=4, group=32))
    checkpoint_format = get_format("compressed-tensors")
    codes = torch.zeros(16, 64, dtype=torch.int8)
    weight = QuantizedWeight(codes=codes, scales=torch.ones(16, 2, dtype=torch.bfloat16))
    tensors = {f"m.a.{local}": tensor for local, tensor in checkpoint_format.pack(weight, scheme).items()}
    tensors |= checkpoint_format.kv_tensors("m.self_attn", KVScales(key=torch.tensor([0.5]), value=torch.tensor([2.0])))
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**checkpoint_format.config({"m.a": scheme}, ()), "quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return tmp_path


def test_layers_kv_scales_and_warnings_of_a_quantized_checkpoint_are_shown(app, quantized):
    facts = json.loads(CliRunner().invoke(app, [str(quantized), "--json"]).stdout)
    assert (facts["format"], facts["schemes"]) == ("compressed-tensors", {"W4A16 g32": 1})
    assert facts["kv_cache"] == "full precision"
    assert facts["kv_scales"] == "1 layers, 0.5 to 2"
    assert facts["layers"] == [
        {
            "name": "m.a",
            "scheme": "W4A16 g32",
            "tensors": {
                "weight_packed": "I32 [16, 8]",
                "weight_scale": "BF16 [16, 2]",
                "weight_shape": "I64 [2]",
            },
            "bytes": 16 * 8 * 4 + 16 * 2 * 2 + 16,
        }
    ]
    assert any("config.json says quant_method 'gptq'" in warning for warning in facts["warnings"])
    short = CliRunner().invoke(app, [str(quantized)]).stdout
    assert "warning            config.json says quant_method 'gptq'" in short
    assert "weight_packed" not in short
    assert "m.a" in CliRunner().invoke(app, [str(quantized), "--layers"]).stdout


def test_a_folder_that_is_no_model_is_refused(app, tmp_path):
    assert isinstance(CliRunner().invoke(app, [str(tmp_path)]).exception, FormatError)
