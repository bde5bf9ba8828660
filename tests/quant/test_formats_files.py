"""Files that are missing, truncated, lying or pickled: each told in one line with the file and the tensor."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.quant.formats.base import FormatError
from narrowgauge.quant.formats.files import TensorFiles, read_json


def _shards(folder: Path) -> Path:
    """Two files and an index: a and b in the first, c in the second."""
    save_file({"a": torch.zeros(4), "b": torch.ones(2, 2)}, folder / "one.safetensors")
    save_file({"c": torch.arange(3)}, folder / "two.safetensors")
    _index(folder, a="one.safetensors", b="one.safetensors", c="two.safetensors")
    return folder


def _index(folder: Path, **weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _header(path: Path, **entries: object) -> None:
    """A safetensors file with that header and 16 bytes behind it."""
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


def test_tensors_of_several_files_are_read(tmp_path):
    files = TensorFiles(_shards(tmp_path))
    assert torch.equal(files.tensor("c"), torch.arange(3))
    assert (files.stored("b").dtype, files.stored("b").shape, files.size_of("b")) == ("F32", (2, 2), 16)
    assert files.file("a") == tmp_path / "one.safetensors"
    assert files.size_bytes() == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for read in (files.tensor, files.stored, files.size_of, files.file):
        with pytest.raises(FormatError, match="the tensor x is not stored"):
            read("x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": "three.safetensors"}, r"three\.safetensors is named in model\.safetensors\.index\.json but missing"),
        (
            {"c": "one.safetensors"},
            r"one\.safetensors: does not hold c, which model\.safetensors\.index\.json puts there",
        ),
        ({"d": "two.safetensors"}, r"two\.safetensors: does not hold d"),
        ({"c": "../two.safetensors"}, r"c points to '\.\./two\.safetensors', which is no file of the folder"),
        ({"c": 7}, "c points to 7"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, change, message):
    _shards(tmp_path)
    _index(tmp_path, **{"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"} | change)
    with pytest.raises(FormatError, match=message):
        TensorFiles(tmp_path)


def test_a_tensor_in_two_files_or_twice_in_the_index_is_refused(tmp_path):
    _shards(tmp_path)
    save_file({"c": torch.arange(3), "b": torch.zeros(2, 2)}, tmp_path / "two.safetensors")
    with pytest.raises(FormatError, match=r"b is stored twice, in one\.safetensors and in two\.safetensors"):
        TensorFiles(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(FormatError, match="the key 'a' stands twice"):
        TensorFiles(tmp_path)
    index.write_text('{"weight_map": {}}')
    with pytest.raises(FormatError, match="has no weight_map"):
        TensorFiles(tmp_path)


def test_a_file_cut_short_or_with_a_lying_header_is_refused_by_name(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    whole = path.read_bytes()
    _header(tmp_path / "long", a={"dtype": "F32", "shape": [64], "data_offsets": [0, 256]})
    _header(tmp_path / "shape", a={"dtype": "F32", "shape": [3], "data_offsets": [0, 16]})
    _header(tmp_path / "dtype", a={"dtype": "F31", "shape": [4], "data_offsets": [0, 16]})
    lying = [(tmp_path / name).read_bytes() for name in ("long", "shape", "dtype")]
    for content in (whole[:-1], whole[:20], whole[:4], b"", struct.pack("<Q", 1 << 60) + whole[8:], *lying):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"model\.safetensors: cannot be read as safetensors") as raised:
            TensorFiles(tmp_path)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pth"])
def test_pickled_weights_are_not_opened_and_the_way_out_is_told(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(FormatError, match=rf"only pickled weights \({name}\), which run code .* save_pretrained"):
        TensorFiles(tmp_path)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path):
    with pytest.raises(FormatError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        TensorFiles(tmp_path)


def test_json_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(FormatError, match="must hold a JSON object"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="cannot be read as JSON"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_the_dtype_of_a_matrix_is_told_from_the_header(tmp_path, dtype):
    save_file({"a": torch.zeros(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    assert TensorFiles(tmp_path).matrix_dtype("a") is dtype
