"""Reads a checkpoint folder (config.json + safetensors) tensor by tensor, quantized or not, on one code path.

Nothing is loaded before it is asked for: the files stay mapped, so a model larger than memory can be walked through.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from narrowgauge.quant.formats.base import (
    CheckpointFormat,
    FormatError,
    KVScales,
    QuantizationLayout,
    QuantizedWeight,
    StoredTensor,
    get_format,
)
from narrowgauge.quant.formats.kv_cache import find_kv_scales, read_kv_scales
from narrowgauge.quant.formats.scheme import Scheme

CONFIG = "config.json"
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
    "U8": 8,
    "BOOL": 8,
} | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), 8)


@dataclass(frozen=True, kw_only=True)
class LinearTensors:
    """What is stored for one Linear, by local name ("weight", "weight_packed", ...); scheme None = full precision."""

    scheme: Scheme | None
    tensors: Mapping[str, torch.Tensor]
    bias: torch.Tensor | None


class CheckpointReader:
    """Lazy access to the tensors of one checkpoint folder.

    Raises FormatError where config.json or the weights are missing or malformed, and where the quantization is one
    that this release does not read. `layout` is None for a model in full precision.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FormatError(f"{self.folder}: there is no such folder")
        self.config: dict[str, Any] = _read_json(self.folder / CONFIG)
        self._device = device
        self._files: dict[str, Any] = {}
        self._file_of = _locate(self.folder)
        self._locals: dict[str, list[str]] = {}
        for name in self._file_of:
            module, _, local = name.rpartition(".")
            self._locals.setdefault(module, []).append(local)
        self._format: CheckpointFormat | None = None
        self.layout: QuantizationLayout | None = self._read_layout()

    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors, sorted."""
        return tuple(sorted(self._file_of))

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is stored."""
        return name in self._file_of

    def tensor(self, name: str) -> torch.Tensor:
        """One stored tensor as it is on disk. Raises FormatError for a name that is not stored."""
        return self._open(name).get_tensor(name)  # type: ignore[no-any-return]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one stored tensor, without reading it."""
        return tuple(self._open(name).get_slice(name).get_shape())

    def stored(self, name: str) -> StoredTensor:
        """Dtype and shape of one stored tensor, without reading it."""
        header = self._open(name).get_slice(name)
        return StoredTensor(dtype=header.get_dtype(), shape=tuple(header.get_shape()))

    def size_of(self, name: str) -> int:
        """Bytes of one stored tensor, without reading it."""
        stored = self._open(name).get_slice(name)
        elements: int = math.prod(stored.get_shape())
        return elements * _BITS[stored.get_dtype()] // 8

    def linear(self, name: str) -> LinearTensors:
        """All tensors of one module ("model.layers.0.self_attn.q_proj"). Raises FormatError where none is stored."""
        if name not in self._locals:
            raise FormatError(f"{self.folder}: no tensor of a module {name} is stored")
        tensors = {local: self.tensor(f"{name}.{local}") for local in self._locals[name]}
        bias = tensors.pop("bias", None)
        scheme = self.layout.linears.get(name) if self.layout else None
        return LinearTensors(scheme=scheme, tensors=tensors, bias=bias)

    def weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The weight [O, I] of a Linear in `dtype`, dequantized where it is stored quantized. Raises FormatError."""
        linear = self.linear(name)
        if linear.scheme is None:
            if "weight" not in linear.tensors:
                raise FormatError(f"{self.folder}: {name}.weight is not stored")
            return linear.tensors["weight"].to(dtype)
        assert self._format is not None
        try:
            return self._format.dequantize(linear.tensors, linear.scheme, dtype)
        except FormatError as error:
            raise FormatError(f"{self.folder}: {name}: {error}") from None

    def unpack(self, name: str) -> QuantizedWeight:
        """Codes, scales and zeros of a Linear that `layout` lists, by its format. Raises FormatError with the layer's name."""
        linear = self.linear(name)
        assert linear.scheme is not None
        assert self._format is not None
        try:
            return self._format.unpack(linear.tensors, linear.scheme)
        except FormatError as error:
            raise FormatError(f"{self.folder}: {name}: {error}") from None

    def kv_scales(self, attention: str) -> KVScales | None:
        """The KV scales of one attention layer ("model.layers.0.self_attn"), [1] or [kv heads]; None where none is stored.

        All spellings that writers have used are known. Raises FormatError for a scale that is not finite and above zero.
        """
        try:
            names = find_kv_scales(attention, self.has)
            return None if names is None else read_kv_scales(names, self.tensor)
        except FormatError as error:
            raise FormatError(f"{self.folder}: {error}") from None

    @property
    def size_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum((self.folder / file).stat().st_size for file in set(self._file_of.values()))

    def _open(self, name: str) -> Any:
        if name not in self._file_of:
            raise FormatError(f"{self.folder}: the tensor {name} is not stored")
        file = self._file_of[name]
        if file not in self._files:
            self._files[file] = _safe_open(self.folder / file, self._device)
        return self._files[file]

    def _read_layout(self) -> QuantizationLayout | None:
        config = self.config.get("quantization_config")
        if config is None:
            return None
        try:
            self._format = get_format(str(config.get("quant_method")))
            markers = set(self._format.markers)
            if not any(markers & set(locals_) for locals_ in self._locals.values()):
                raise FormatError("config.json says the model is quantized, but no quantized weight is stored")
            stored = {
                module: {local: self.stored(f"{module}.{local}") for local in locals_}
                for module, locals_ in sorted(self._locals.items())
            }
            return self._format.layout(config, stored, self.tensor)
        except FormatError as error:
            raise FormatError(f"{self.folder}: {error}") from None


def _locate(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index where there is one, else from the single file."""
    index = folder / INDEX
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{index}: has no weight_map")
        if missing := sorted(file for file in set(weight_map.values()) if not (folder / file).is_file()):
            raise FormatError(f"{folder}: {missing[0]} is named in {INDEX} but missing")
        return weight_map
    if not (folder / WEIGHTS).is_file():
        raise FormatError(f"{folder}: has no {WEIGHTS} and no {INDEX}; only safetensors weights are read")
    return dict.fromkeys(_safe_open(folder / WEIGHTS, "cpu").keys(), WEIGHTS)


def _safe_open(path: Path, device: str) -> Any:
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path}: cannot be read as safetensors: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FormatError(f"{path.parent}: has no {path.name}: not a model folder") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: must hold a JSON object")
    return value
