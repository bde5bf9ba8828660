"""CheckpointReader: plain and sharded folders, and every way in which a folder is not a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.quant.formats.base import FormatError
from narrowgauge.quant.formats.checkpoint import CheckpointReader


def _model(**options: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **options))


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_every_tensor_of_a_saved_model_is_read_back_from_one_file_or_several(tmp_path, shard):
    model = _model()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    reader = CheckpointReader(tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    assert reader.layout is None
    assert set(reader.names()) == set(model.state_dict())
    for name, expected in model.state_dict().items():
        assert torch.equal(reader.tensor(name), expected)
        assert reader.shape(name) == tuple(expected.shape)
        assert reader.size_of(name) == expected.numel() * 4
    assert reader.size_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_a_linear_comes_with_its_bias_and_in_the_dtype_asked_for(tmp_path):
    model = _model(attention_bias=True)
    model.save_pretrained(tmp_path)
    reader, name = CheckpointReader(tmp_path), "model.layers.1.self_attn.q_proj"
    linear = reader.linear(name)
    assert linear.scheme is None
    assert torch.equal(linear.bias, model.get_submodule(name).bias)
    assert torch.equal(reader.weight(name, torch.bfloat16), model.get_submodule(name).weight.to(torch.bfloat16))


def test_a_name_that_is_not_stored_is_named(tmp_path):
    _model().save_pretrained(tmp_path)
    reader = CheckpointReader(tmp_path)
    with pytest.raises(FormatError, match=r"model\.layers\.9\.x is not stored"):
        reader.tensor("model.layers.9.x")
    with pytest.raises(FormatError, match=r"no tensor of a module model\.layers\.9"):
        reader.linear("model.layers.9")


def test_folders_that_are_no_models_are_refused_in_one_line(tmp_path):
    with pytest.raises(FormatError, match="there is no such folder"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(FormatError, match=r"has no config\.json: not a model folder"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="cannot be read as JSON"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="only safetensors weights are read"):
        CheckpointReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(FormatError, match="cannot be read as safetensors"):
        CheckpointReader(tmp_path)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path):
    _model().save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FormatError, match=f"{lost.name} is named in"):
        CheckpointReader(tmp_path)


def test_an_unknown_quantization_and_a_claim_without_weights_are_refused(tmp_path):
    plain = {"a.weight": torch.zeros(4, 4)}
    with pytest.raises(FormatError, match="unknown checkpoint format 'bitsandbytes'; known: awq, compressed-tensors, fp8"):
        CheckpointReader(_write(tmp_path, {"quantization_config": {"quant_method": "bitsandbytes"}}, plain))
    with pytest.raises(FormatError, match="no quantized weight is stored"):
        CheckpointReader(_write(tmp_path, {"quantization_config": {"quant_method": "compressed-tensors"}}, plain))
