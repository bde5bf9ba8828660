"""The safetensors files of a checkpoint folder: which tensor lies where, and what a header says of it.

Files stay mapped and nothing is loaded before it is asked for. Faults are told in one line with the file and the tensor.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from narrowgauge.quant.formats.base import FormatError, StoredTensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "F4": 4,
} | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), 8)
_PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "*.pt", "*.pth")


class TensorFiles:
    """The tensors of a folder by name, from one file or from those of an index.

    Raises FormatError for a file that is missing, truncated or lying, for a tensor that the index puts where it is not,
    and for one that lies in two files.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self._folder, self._device = folder, device
        self._files: dict[str, Any] = {}
        self.file_of = self._locate()

    def tensor(self, name: str) -> torch.Tensor:
        """One stored tensor as it is on disk. Raises FormatError for a name that is not stored."""
        try:
            return self._open(name).get_tensor(name)  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise FormatError(f"{self.file(name)}: {name} cannot be read: {error}") from None

    def stored(self, name: str) -> StoredTensor:
        """Dtype and shape of one stored tensor, without reading it."""
        try:
            header = self._open(name).get_slice(name)
        except SafetensorError as error:
            raise FormatError(f"{self.file(name)}: {name} cannot be read: {error}") from None
        return StoredTensor(dtype=header.get_dtype(), shape=tuple(header.get_shape()))

    def matrix_dtype(self, name: str) -> torch.dtype:
        """torch's dtype of one stored matrix, without reading it."""
        try:
            dtype: torch.dtype = self._open(name).get_slice(name)[:0].dtype
        except SafetensorError as error:
            raise FormatError(f"{self.file(name)}: {name} cannot be read: {error}") from None
        return dtype

    def size_of(self, name: str) -> int:
        """Bytes of one stored tensor, without reading it."""
        stored = self.stored(name)
        if stored.dtype not in _BITS:
            raise FormatError(f"{self.file(name)}: {name} has the unknown dtype {stored.dtype}")
        return math.prod(stored.shape) * _BITS[stored.dtype] // 8

    def file(self, name: str) -> Path:
        """The file that holds a tensor. Raises FormatError for a name that is not stored."""
        if name not in self.file_of:
            raise FormatError(f"{self._folder}: the tensor {name} is not stored")
        return self._folder / self.file_of[name]

    def size_bytes(self) -> int:
        """Bytes of the files."""
        return sum((self._folder / file).stat().st_size for file in set(self.file_of.values()))

    def _open(self, name: str) -> Any:
        return self._handle(self.file(name).name)

    def _handle(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            try:
                self._files[file] = safe_open(path, framework="pt", device=self._device)
            except (SafetensorError, OSError) as error:
                raise FormatError(f"{path}: cannot be read as safetensors: {error}") from None
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file, from the index where there is one, else from the single file."""
        if (self._folder / INDEX).exists():
            return self._by_index(self._folder / INDEX)
        if (self._folder / WEIGHTS).is_file():
            return dict.fromkeys(self._handle(WEIGHTS).keys(), WEIGHTS)
        found = sorted(path.name for pattern in _PICKLED for path in self._folder.glob(pattern))
        if found:
            raise FormatError(
                f"{self._folder}: has only pickled weights ({found[0]}), which run code when they are opened; load the model "
                "where you trust it and save it again with save_pretrained(..., safe_serialization=True)"
            )
        raise FormatError(f"{self._folder}: has no {WEIGHTS} and no {INDEX}; only safetensors weights are read")

    def _by_index(self, index: Path) -> dict[str, str]:
        weight_map = read_json(index, keys_once=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{index}: has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise FormatError(f"{index}: {name} points to {file!r}, which is no file of the folder")
            if not (self._folder / file).is_file():
                raise FormatError(f"{self._folder}: {file} is named in {INDEX} but missing")
        seen: dict[str, str] = {}
        for file in sorted(set(weight_map.values())):
            for name in self._handle(file).keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                if name in seen:
                    raise FormatError(f"{self._folder}: {name} is stored twice, in {seen[name]} and in {file}")
                seen[name] = file
        for name, file in weight_map.items():
            if seen.get(name) != file:
                raise FormatError(f"{self._folder / file}: does not hold {name}, which {INDEX} puts there")
        return dict(weight_map)


def read_json(path: Path, *, keys_once: bool = False) -> dict[str, Any]:
    """A JSON object from a file. Raises FormatError: missing, not JSON, with `keys_once` a key that stands twice."""
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_once if keys_once else None)
    except FileNotFoundError:
        raise FormatError(f"{path.parent}: has no {path.name}: not a model folder") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: must hold a JSON object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return value
