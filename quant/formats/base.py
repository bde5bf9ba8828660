"""What a checkpoint format owns: tensor names, dtypes, shapes, packing, its part of config.json, and dequantization.

A format is the truth about bytes on disk. A layout for a fast kernel is the engine's, made from `unpack` at load.
Shapes: O out_features, I in_features, G groups of input columns (1 for one scale a row).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from narrowgauge.quant.formats.read import Registry, lookup
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme

FORMATS: Registry = {
    "compressed-tensors": "narrowgauge.quant.formats.compressed_tensors:CompressedTensors",
}


class FormatError(ValueError):
    """A checkpoint that does not say what its format requires; the message names the tensor or key and the remedy."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A rounded weight in the terms of its Scheme: w = (codes - zeros) * scales, broadcast over each group.

    codes  [O, I] int8, in the signed domain (qmin..qmax)
    scales [O, G] in the model's dtype
    zeros  [O, G] int8 in the signed domain, or None when symmetric
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class QuantizationLayout:
    """What a checkpoint's config says: the Scheme of each Linear (absent means full precision) and of the KV cache."""

    format: str
    linears: Mapping[str, Scheme]
    kv_cache: KVCacheScheme | None = None


class CheckpointFormat(Protocol):
    """One format, read and written. Methods take and return tensors under *local* names ("weight_packed", ...)."""

    name: str
    markers: tuple[str, ...]
    """Local tensor names, any of which shows that a module is stored in quantized form."""

    def config(self, linears: Mapping[str, Scheme], kept: tuple[str, ...]) -> dict[str, Any]:
        """The `quantization_config` for config.json; `kept` are the Linears left in full precision."""

    def layout(self, config: Mapping[str, Any], linear_names: tuple[str, ...]) -> QuantizationLayout:
        """Reads a `quantization_config`: which of the model's Linears carry which Scheme. Raises FormatError."""

    def pack(self, weight: QuantizedWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors to store for one Linear."""

    def stored_bytes(self, shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
        """Bytes that `pack` makes of a weight of `shape` (O, I) with scales of `scale_bytes` each."""

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
        """The inverse of `pack`. Raises FormatError where a tensor is missing or has the wrong shape."""

    def dequantize(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
        """The full weight [O, I]: the reference that every kernel is compared with."""


def get_format(name: str) -> CheckpointFormat:
    """The format of that name. Raises FormatError with the known names."""
    if name not in FORMATS:
        raise FormatError(f"unknown checkpoint format {name!r}; known: {', '.join(sorted(FORMATS))}")
    checkpoint_format: CheckpointFormat = lookup(FORMATS, name)()
    return checkpoint_format


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """w = (codes - zeros) * scales, [O, I]; the product is rounded once, in `dtype`, as compressed-tensors does."""
    rows, columns = weight.codes.shape
    groups = weight.scales.shape[1]
    codes = weight.codes.view(rows, groups, columns // groups).to(dtype)
    if weight.zeros is not None:
        codes = codes - weight.zeros.to(dtype).unsqueeze(-1)
    return (codes * weight.scales.to(dtype).unsqueeze(-1)).view(rows, columns)
