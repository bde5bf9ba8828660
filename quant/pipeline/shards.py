"""Safetensors files written whole or not at all, tensor by tensor, and put together from pieces of other such files.

The library's own writer takes all tensors of a file at once; here a file may be put together from files that lie on disk
already, with no tensor in memory. Bytes are the library's: the same order, the same header.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from narrowgauge.quant.formats.manifest import fsync_folder

_CHUNK = 1 << 24
_UNABLE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""What copy_file_range answers where this kernel or these file systems cannot copy by it."""
_METADATA = {"format": "pt"}
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_WIDTHS = {name: dtype.itemsize for dtype, name in _DTYPES.items()}
_RANKS = {name: rank for rank, name in enumerate(_DTYPES.values())}
"""Safetensors puts the dtypes in this order, the last ones first, so that each tensor is aligned to its width."""


class TensorNotWritten(OSError):
    """The disk would not take a file; `strerror` names the file, the tensor that was being written and the reason."""


@dataclass(frozen=True)
class Piece:
    """The bytes of one stored tensor: `size` bytes of the file `path` from `start` on; dtype by safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    size: int


def pieces(path: Path) -> tuple[Piece, ...]:
    """The tensors of a safetensors file, in the order of their bytes. The header is believed: check it by opening the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = [
        Piece(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            path=path,
            start=8 + length + entry["data_offsets"][0],
            size=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]
    return tuple(sorted(found, key=lambda piece: (piece.start, piece.name)))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes one file; tensors may lie on any device. Raises TensorNotWritten, and then no file of that name is there."""
    described = {
        name: (_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    }
    order, header = _header(described)
    with whole_file(path) as (file, at):
        file.write(header)
        for name in order:
            at.name = name
            data = tensors[name].detach().cpu().contiguous().reshape(-1)
            file.write(data.view(torch.uint8).numpy().data)
            file.flush()


def write_pieces(path: Path, parts: Iterable[Piece]) -> None:
    """Writes one file out of pieces of others, inside the kernel where it can copy there. Raises TensorNotWritten."""
    by_name = {piece.name: piece for piece in parts}
    order, header = _header({piece.name: (piece.dtype, piece.shape, piece.size) for piece in by_name.values()})
    with whole_file(path) as (file, at), contextlib.ExitStack() as stack:
        file.write(header)
        file.flush()
        sources: dict[Path, IO[bytes]] = {}
        for name in order:
            at.name = name
            piece = by_name[name]
            if piece.path not in sources:
                sources[piece.path] = stack.enter_context(piece.path.open("rb"))
            _copy(sources[piece.path], file, start=piece.start, size=piece.size)


class Position:
    """The name of the tensor that is being written."""

    name = ""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[tuple[IO[bytes], Position]]:
    """A file to write that appears under its name, durable, on leaving without an error, and else not at all.

    Raises TensorNotWritten for what the disk refuses. The temporary name is a fixed one: a killed run's is overwritten.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    at = Position()
    try:
        with temporary.open("wb") as file:
            yield file, at
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        where = f"{path.name} at {at.name}" if at.name else path.name
        raise TensorNotWritten(error.errno, f"{where}: {error.strerror}", str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _header(described: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[list[str], bytes]:
    """The order of the tensors and the bytes before them; described: name -> (dtype, shape, bytes)."""
    order = sorted(described, key=lambda name: (-_RANKS[described[name][0]], name))
    entries: dict[str, Any] = {"__metadata__": _METADATA}
    end = 0
    for name in order:
        dtype, shape, size = described[name]
        assert size == math.prod(shape) * _WIDTHS[dtype], name
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


def _copy(source: IO[bytes], target: IO[bytes], *, start: int, size: int) -> None:
    """Appends `size` bytes from `start` on; the target's own buffer is empty."""
    done = 0
    while done < size:
        try:
            moved = os.copy_file_range(source.fileno(), target.fileno(), min(size - done, _CHUNK), start + done)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            break
        if not moved:
            raise OSError(errno.EIO, f"{source.name} ends before byte {start + size}")
        done += moved
    source.seek(start + done)
    while done < size:
        data = source.read(min(size - done, _CHUNK))
        if not data:
            raise OSError(errno.EIO, f"{source.name} ends before byte {start + size}")
        target.write(data)
        target.flush()
        done += len(data)
