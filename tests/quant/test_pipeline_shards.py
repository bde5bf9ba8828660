"""Safetensors files of our own writing: safetensors' bytes, whole or absent, put together without a tensor in memory."""

import errno
import functools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from narrowgauge.quant.pipeline.shards import TensorNotWritten, pieces, write_pieces, write_tensors

TENSORS = {
    "z.weight": torch.arange(24, dtype=torch.float32).view(4, 6).bfloat16(),
    "a.weight_packed": torch.arange(10, dtype=torch.int32),
    "a.weight_shape": torch.tensor([3, 5]),
    "ü.f8": torch.linspace(-400, 400, 15).to(torch.float8_e4m3fn).view(3, 5),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]),
    "bytes": torch.arange(7, dtype=torch.int8),
    "turned": torch.arange(12, dtype=torch.float16).view(3, 4).t(),
}


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: what a full disk looks like to a writer (EFBIG for ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_holds_the_very_bytes_that_safetensors_writes(tmp_path):
    write_tensors(tmp_path / "ours", TENSORS)
    save_file({name: t.contiguous() for name, t in TENSORS.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_pieces_of_several_files_make_one_file_as_if_written_at_once(tmp_path):
    names = list(TENSORS)
    for number in range(3):
        write_tensors(tmp_path / f"part{number}", {name: TENSORS[name] for name in names[number::3]})
    found = [piece for number in range(3) for piece in pieces(tmp_path / f"part{number}")]
    write_pieces(tmp_path / "merged", found)
    write_tensors(tmp_path / "whole", TENSORS)
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "whole").read_bytes()


def test_pieces_are_copied_where_the_kernel_cannot_copy_between_files(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    write_tensors(tmp_path / "part", TENSORS)
    monkeypatch.setattr(os, "copy_file_range", refuse)
    write_pieces(tmp_path / "copy", [piece for piece in pieces(tmp_path / "part") if piece.name != "scalar"])
    loaded = load_file(tmp_path / "copy")
    assert set(loaded) == set(TENSORS) - {"scalar"}
    assert all(torch.equal(tensor.float(), TENSORS[name].float()) for name, tensor in loaded.items())


@pytest.mark.parametrize("merge", [False, True])
def test_a_disk_that_fills_up_leaves_no_file_and_names_the_tensor(tmp_path, merge):
    tensors = {f"layer.{number}": torch.full((1000,), float(number)) for number in range(5)}
    write_tensors(tmp_path / "part", tensors)
    write = functools.partial(write_pieces, parts=pieces(tmp_path / "part"))
    if not merge:
        write = functools.partial(write_tensors, tensors=tensors)
    with file_limit(9_000), pytest.raises(TensorNotWritten) as caught:
        write(tmp_path / "full")
    assert str(caught.value.strerror) == "full at layer.2: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


def test_a_piece_that_its_file_no_longer_holds_is_an_error(tmp_path):
    path = tmp_path / "part"
    write_tensors(path, {"w": torch.ones(1000)})
    found = pieces(path)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(TensorNotWritten, match="ends before byte"):
        write_pieces(tmp_path / "copy", found)
    assert not (tmp_path / "copy").exists()


def test_each_piece_says_where_the_bytes_of_its_tensor_lie(tmp_path: Path):
    write_tensors(tmp_path / "file", TENSORS)
    data = (tmp_path / "file").read_bytes()
    with safe_open(tmp_path / "file", framework="pt") as file:
        for piece in pieces(tmp_path / "file"):
            expected = file.get_tensor(piece.name)
            raw = expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[piece.start : piece.start + piece.size] == raw
            assert piece.shape == tuple(expected.shape)
