"""Writing: bounded files with an index, and folders that appear whole or not at all."""

import json
import os
import re
import resource
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import Base, write_manifest
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.pipeline.export import (
    CheckpointWriter,
    Expected,
    ExportError,
    assemble,
    check_space,
    check_written,
    existing,
    staged,
)
from narrowgauge.quant.pipeline.sequential import quantize
from narrowgauge.quant.pipeline.shards import pieces, write_tensors
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import resolve


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


def _parts(folder, sizes):
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"block-{number}.safetensors"
        write_tensors(path, {f"layers.{number}.{part}.weight": torch.randn(size) for part in ("a", "b")})
        paths.append(path)
    return paths


def test_parts_become_bounded_shards_and_large_ones_are_not_written_twice(tmp_path):
    parts = _parts(tmp_path, [100, 100, 5000, 100, 100])
    write_tensors(tmp_path / "base.safetensors", {"embed.weight": torch.randn(300), "norm.weight": torch.randn(3)})
    others = [piece for piece in pieces(tmp_path / "base.safetensors") if piece.name == "embed.weight"]
    folder = tmp_path / "out"
    folder.mkdir()
    assemble(folder, parts, others, shard_bytes=50_000, whole_bytes=40_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path for path in folder.glob("*.safetensors"))
    assert [len(load_file(file)) for file in files] == [4, 2, 5]
    assert files[1].samefile(parts[2])
    assert all(part.exists() for part in parts)
    stored = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for _, tensor in stored.values())
    for part in [*parts, tmp_path / "base.safetensors"]:
        for name, tensor in load_file(part).items():
            assert (name == "norm.weight" and name not in stored) or torch.equal(stored[name][1], tensor)


def test_no_shard_outgrows_its_bound_whatever_the_parts(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    assemble(folder, _parts(tmp_path, [1000, 2000, 300]), [], shard_bytes=9_000, whole_bytes=4_000)
    sizes = [sum(t.numel() * 4 for t in load_file(file).values()) for file in sorted(folder.glob("*.safetensors"))]
    assert max(sizes) <= 9_000
    assert sum(sizes) == 2 * 4 * 3300


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    parts = _parts(tmp_path, [5000])
    folder = tmp_path / "out"
    folder.mkdir()
    assemble(folder, parts, [], whole_bytes=1)
    assert (folder / "model.safetensors").read_bytes() == parts[0].read_bytes()
    assert not (folder / "model.safetensors").samefile(parts[0])


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path / "not" / "there" / "yet", free // 2)
    with pytest.raises(ExportError, match=r"needs about .* GB, but .* GB are free on .*; make room or choose another"):
        check_space(tmp_path / "not" / "there" / "yet", 2 * free)


def test_a_finished_folder_that_does_not_read_back_as_planned_is_refused(tiny_llama, quantized_folder):
    folder, expected = quantized_folder
    check_written(folder, expected)
    layer = "model.layers.1.mlp.up_proj"
    eight = Scheme(weights=WeightScheme(bits=8, group=32))
    wrong = [
        (
            replace(expected, schemes={**expected.schemes, layer: eight}),
            f"{layer}: was planned as W8A16 but reads back as W4A16",
        ),
        (
            replace(expected, schemes={**expected.schemes, "lm_head": eight}),
            "lm_head: was planned as W8A16 but reads back as full",
        ),
        (
            replace(expected, kv_cache=KVCacheScheme(bits=8, type="float")),
            "the scheme of the KV cache does not read back",
        ),
        (replace(expected, names=expected.names | {"x.weight"}), "x.weight: is missing from the finished files"),
        (replace(expected, names=expected.names - {"model.norm.weight"}), "model.norm.weight: stands unplanned in"),
    ]
    for planned, message in wrong:
        with pytest.raises(ExportError, match=re.escape(message)):
            check_written(folder, planned)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{layer}.weight_scale"][0, 0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=rf"^{layer}.weight_scale: holds a scale that is not finite and above zero"):
        check_written(folder, expected)


def _recipe(method: str, **more: object) -> Recipe:
    """4 bits in groups of 32 by one method."""
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "methods": [{"name": method}],
        "scheme": {"weights": {"bits": 4, "group": 32}},
        **more,
    }
    return build(Recipe, mapping, registries={QuantMethod: METHODS})


@pytest.fixture
def quantized_folder(tiny_llama, tmp_path):
    """A finished checkpoint of a tiny Llama in 4 bits, and what it is expected to say."""
    folder = quantize(_recipe("rtn"), resolve(str(tiny_llama()), cache=tmp_path / "cache"), tmp_path / "out").path
    reader = CheckpointReader(folder)
    return folder, Expected(schemes=reader.layout.linears, kv_cache=None, names=frozenset(reader.names()))


def test_a_disk_without_room_for_the_hidden_states_is_told_in_one_line(tiny_llama, tmp_path):
    recipe = _recipe("gptq", calibration={"samples": 32, "length": 64})
    base = resolve(str(tiny_llama()), cache=tmp_path / "cache")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ExportError, match=r"out: cannot write inputs-00000\.bin: File too large; make room"):
            quantize(recipe, base, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.parametrize("limit", [3_000, 60_000])
def test_a_disk_that_fills_up_in_mid_shard_is_told_in_one_line_and_finished_blocks_are_kept(
    tiny_llama, tmp_path, limit
):
    """The first limit stops the second block (its MLP is wider in bytes), the second one the putting together."""
    output = tmp_path / "out"
    recipe = build(
        Recipe,
        {
            "version": 1,
            "model": {"source": "unused", "name": "tiny"},
            "methods": [{"name": "rtn"}],
            "scheme": {"weights": {"bits": 4, "group": 32}},
            "rules": [{"match": r"re:model\.layers\.0\.(mlp|self_attn\.[qko])", "keep": True}],
        },
        registries={QuantMethod: METHODS},
    )
    base = resolve(str(tiny_llama()), cache=tmp_path / "cache")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(ExportError) as caught:
            quantize(recipe, base, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finished = 1 if limit == 3_000 else 2
    where = r"block-00001\.safetensors at model\.layers\.1\.\S+" if finished == 1 else r"model\.safetensors at \S+"
    assert re.fullmatch(
        rf"{output}: cannot write {where}: File too large; make room and run again; "
        rf"{finished} finished blocks are kept in {tmp_path}/\.out\.work",
        str(caught.value),
    )
    assert not output.exists()
    assert not list(tmp_path.glob(".out.work/**/manifest.json"))
    assert quantize(recipe, base, output).resumed == finished
