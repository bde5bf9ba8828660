"""Writing: bounded files with an index, and folders that appear whole or not at all."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.export import CheckpointWriter, ExportError, existing, staged
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import Base, write_manifest


def test_many_small_files_with_an_index_load_like_one(tiny_llama, tmp_path):
    source = CheckpointReader(tiny_llama())
    folder = tmp_path / "sharded"
    folder.mkdir()
    writer = CheckpointWriter(folder, shard_bytes=40_000)
    for name in source.names():
        writer.add(name, source.tensor(name))
    writer.finish()
    (folder / "config.json").write_bytes((source.folder / "config.json").read_bytes())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert CheckpointReader(folder).names() == source.names()
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
    assert not report["missing_keys"]
    for name in source.names():
        assert torch.equal(model.state_dict()[name], source.tensor(name))


def test_a_stage_becomes_the_output_or_vanishes(tmp_path):
    output = tmp_path / "deep" / "out"
    with staged(output) as folder:
        (folder / "a").write_text("1")
        assert not output.exists()
    assert [path.name for path in output.iterdir()] == ["a"]
    with pytest.raises(FileNotFoundError), staged(tmp_path / "deep" / "other") as folder:
        (folder / "no such folder" / "a").write_text("1")
    with pytest.raises(ExportError, match="cannot be put in place"), staged(output) as folder:
        (folder / "b").write_text("2")
    assert sorted(path.name for path in output.parent.iterdir()) == ["out"]
    assert [path.name for path in output.iterdir()] == ["a"]


def test_a_damaged_checkpoint_at_the_output_is_not_taken_for_finished(tmp_path):
    (tmp_path / "weights").write_bytes(b"1234")
    assert existing(tmp_path / "nothing", recipe_digest="r", base_digest="b") is None
    write_manifest(tmp_path, base=Base(source="s", digest="b"), recipe_digest="r")
    assert existing(tmp_path, recipe_digest="r", base_digest="b") is not None
    (tmp_path / "weights").write_bytes(b"1235")
    with pytest.raises(ExportError, match=r"SHA-256 differs.*choose another output"):
        existing(tmp_path, recipe_digest="r", base_digest="b")
