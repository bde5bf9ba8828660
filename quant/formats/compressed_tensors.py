"""The compressed-tensors format: pack-, int-, float- and naive-quantized weights, alone or mixed, and KV scales.

Tensors of a Linear [O, I] with scales [R, C] as QuantizedWeight has them:
  pack-quantized   weight_packed int32 [O, ceil(I * bits / 32)], weight_shape int64 [2] = (O, I)
  the others       weight int8 or float8_e4m3fn [O, I]; int8 also holds narrower codes
  weight_scale       model's dtype [R, C]; [1] for one scale a tensor
  weight_zero_point  only when asymmetric, and then always: int32 [ceil(O * bits / 32), G], packed along O, beside packed
                     weights; int8 [O, G] beside the others
  input_scale        [1], only with static activations
  weight_g_idx       int32 [I], group of each column; read from old files, never written
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from narrowgauge.quant.formats import compressed_tensors_config as groups
from narrowgauge.quant.formats.base import (
    FormatError,
    KVScales,
    QuantizationLayout,
    QuantizedWeight,
    ReadTensor,
    Stored,
    StoredTensor,
    check_read,
    check_written,
    dequantize_weight,
    require,
)
from narrowgauge.quant.formats.kv_cache import kv_arguments, kv_tensors, read_kv_scheme
from narrowgauge.quant.formats.packing import PACKED_BITS, pack_int32, unpack_int32
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme, WeightScheme

_LIBRARY_VERSION = "0.20.1"
_MARKERS = {"weight_packed", "weight_scale"}
_WEIGHT_ONLY = "its activations are taken as not rounded"


class CompressedTensors:
    """compressed-tensors checkpoints, read and written by transformers, vLLM and llm-compressor."""

    name = "compressed-tensors"

    def config(
        self, linears: Mapping[str, Scheme], kept: tuple[str, ...], kv_cache: KVCacheScheme | None = None
    ) -> dict[str, Any]:
        """`quantization_config`, one group for each Scheme. Raises FormatError for what the format cannot hold."""
        for name, scheme in linears.items():
            if reason := _unsupported(scheme):
                raise FormatError(f"{name}: {reason}")
        if not linears and kv_cache is None:
            raise FormatError("no Linear is quantized: the recipe's rules keep every layer at full precision")
        config_groups = groups.write_groups(linears, kept)
        formats = sorted({str(group["format"]) for group in config_groups.values()})
        return {
            "config_groups": config_groups,
            "format": formats[0] if len(formats) == 1 else "mixed-precision" if formats else "dense",
            "global_compression_ratio": None,
            "ignore": sorted(kept),
            "kv_cache_scheme": kv_arguments(kv_cache),
            "quant_method": self.name,
            "quantization_status": "compressed",
            "version": _LIBRARY_VERSION,
        }

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """None: everything stands in config.json."""
        return {}

    def layout(self, config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> QuantizationLayout:
        """Resolves targets and `ignore` over the modules stored in quantized form; the tensors win where they differ.

        Raises FormatError where the status is not "compressed" (loaders that accept such a file answer with random
        weights), for a format or scheme that is not read, and for a stored module that no group covers.
        """
        labelled = config.get("quant_method") == self.name
        config_groups = self._groups(config) if labelled else ()
        ignore = tuple(str(entry) for entry in config.get("ignore") or ())
        linears, warnings = {}, []
        for name in (name for name, tensors in stored.items() if _MARKERS & set(tensors)):
            scheme = next((group.scheme for group in config_groups if groups.matches(name, group.targets)), None)
            if labelled and (scheme is None or groups.matches(name, ignore, classes=False)):
                raise FormatError(f"{name} is stored in quantized form, but quantization_config leaves it out")
            module = _Module(name, stored[name], read)
            linears[name], differences = module.scheme(scheme)
            warnings += differences
        if idle := groups.unmatched(ignore, stored):
            warnings.append(
                f"quantization_config.ignore: {', '.join(map(repr, idle))} match no module of the checkpoint"
            )
        kv_cache = read_kv_scheme(config.get("kv_cache_scheme"))
        return QuantizationLayout(format=self.name, linears=linears, kv_cache=kv_cache, warnings=tuple(warnings))

    def refusal(self, shape: tuple[int, int], scheme: Scheme, weight: QuantizedWeight | None = None) -> str | None:
        """Why a Linear of `shape` (O, I) cannot be stored so; None if it can."""
        if reason := _unsupported(scheme):
            return reason
        if scheme.weights.group is not None and shape[1] % scheme.weights.group:
            return f"in_features {shape[1]} is not a multiple of group {scheme.weights.group}"
        activations = scheme.activations
        if activations is not None and activations.group is not None and shape[1] % activations.group:
            return (
                f"in_features {shape[1]} is not a multiple of the activations' group {activations.group}: loaders fail "
                "when they run it; round its activations by token, or keep the layer at 16 bits"
            )
        if weight is not None and weight.column_groups is not None:
            return (
                "its groups are permuted columns (activation order on disk), which compressed-tensors no longer reads"
            )
        return None

    def pack(self, weight: QuantizedWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors of one Linear. Raises FormatError for a scale that is not finite and above zero."""
        rows, columns = weight.codes.shape
        if reason := self.refusal((rows, columns), scheme, weight):
            raise FormatError(reason)
        check_written(weight, scheme)
        bits, packed = scheme.weights.bits, groups.format_of(scheme) == "pack-quantized"
        tensors = {
            "weight_scale": weight.scales.reshape(1) if scheme.weights.per_tensor else weight.scales.contiguous()
        }
        if packed:
            tensors["weight_packed"] = pack_int32(weight.codes, bits)
            tensors["weight_shape"] = torch.tensor(weight.codes.shape, dtype=torch.int64)
        else:
            tensors["weight"] = weight.codes.contiguous()
        if weight.zeros is not None:
            zeros = pack_int32(weight.zeros.t().contiguous(), bits).t() if packed else weight.zeros
            tensors["weight_zero_point"] = zeros.contiguous()
        if weight.input_scale is not None:
            tensors["input_scale"] = weight.input_scale.reshape(1)
        return tensors

    def stored_bytes(self, shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
        """Bytes of the tensors of one Linear of `shape` (O, I), with scales of `scale_bytes` each."""
        (rows, columns), bits = shape, scheme.weights.bits
        scale_rows, scale_columns = scheme.weights.grid(rows, columns)
        size = scale_bytes * scale_rows * scale_columns
        if scheme.activations is not None and not scheme.activations.dynamic:
            size += scale_bytes
        if groups.format_of(scheme) != "pack-quantized":
            return size + rows * columns + (0 if scheme.weights.symmetric else scale_rows * scale_columns)
        words = rows * -(-columns * bits // 32)
        if not scheme.weights.symmetric:
            words += scale_columns * -(-rows * bits // 32)
        return size + 4 * words + 16

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
        """Codes, scales and zero points of one Linear. Raises FormatError for a missing tensor or a wrong shape."""
        bits, packed = scheme.weights.bits, "weight_packed" in tensors
        scales = check_read("weight_scale", require(tensors, "weight_scale"))
        try:
            if packed or (scheme.weights.type == "int" and "weight" not in tensors):
                words, shape = require(tensors, "weight_packed"), require(tensors, "weight_shape").tolist()
                codes = unpack_int32(words, bits, int(shape[1]))
            else:
                words = codes = require(tensors, "weight")
                shape = list(codes.shape)
            rows, columns = int(shape[0]), int(shape[1])
            grid = scheme.weights.grid(rows, columns)
            if codes.shape[0] != rows or scales.numel() != grid[0] * grid[1] or _ragged(columns, scheme.weights):
                raise FormatError(
                    f"weight {list(words.shape)}, weight_scale {list(scales.shape)} and the shape {shape} do not fit "
                    f"{scheme.name} with {_sharing(scheme.weights)}"
                )
            zeros = None if scheme.weights.symmetric else _zeros(tensors, bits, rows)
        except ValueError as error:
            raise FormatError(str(error)) from None
        static = scheme.activations is not None and not scheme.activations.dynamic
        return QuantizedWeight(
            codes=codes,
            scales=scales.reshape(grid),
            zeros=zeros,
            block=None if scheme.weights.block is None else (scheme.weights.block[0], scheme.weights.block[1]),
            input_scale=check_read("input_scale", require(tensors, "input_scale")).reshape(1) if static else None,
            column_groups=_column_groups(tensors.get("weight_g_idx"), columns, grid[1]),
        )

    def dequantize(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
        """The full weight [O, I] in `dtype`."""
        return dequantize_weight(self.unpack(tensors, scheme), dtype)

    def kv_tensors(self, attention: str, scales: KVScales) -> dict[str, torch.Tensor]:
        """`<attention>.k_scale` and `.v_scale`. Raises FormatError for a scale that is not finite and above zero."""
        return kv_tensors(attention, scales)

    def _groups(self, config: Mapping[str, Any]) -> tuple[groups.ConfigGroup, ...]:
        status = config.get("quantization_status")
        if status != "compressed":
            raise FormatError(
                f"quantization_config.quantization_status is {status!r}, not 'compressed': the file was not finished "
                "by its writer; save it again with save_compressed=True"
            )
        return groups.read_groups(config)


class _Module:
    """The stored tensors of one quantized Linear, asked what Scheme they hold."""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor], read: ReadTensor) -> None:
        self._name, self._tensors, self._read = name, tensors, read

    def scheme(self, said: Scheme | None) -> tuple[Scheme, list[str]]:
        """The Scheme that config.json says, corrected by the tensors; and in words where the two differ."""
        found, differences = self._found(said), []
        if said is None:
            differences.append(
                f"{self._name}: config.json does not say its scheme; read as {found.name}, {_WEIGHT_ONLY}"
            )
        for what, before, after in _differences(said, found):
            differences.append(
                f"{self._name}: config.json says {what} {before}, the tensors {after}; the tensors are right"
            )
        return found, differences

    def _found(self, said: Scheme | None) -> Scheme:
        weight, scale = self._weight(), self._stored("weight_scale")
        kind: Literal["int", "float"] = "float" if weight.dtype == "F8_E4M3" else "int"
        rows, columns = self._shape(weight)
        trusted = said is not None and said.weights.type == kind
        if said is not None and trusted:
            weights = replace(said.weights, bits=self._bits(weight, columns, said.weights.bits))
        else:
            weights = WeightScheme(bits=self._bits(weight, columns, 0), type=kind)
        if not _fits(scale.shape, weights, rows=rows, columns=columns):
            weights = _by_scale(weights, scale.shape, rows=rows, columns=columns) or weights
        if not _fits(scale.shape, weights, rows=rows, columns=columns):
            raise FormatError(
                f"{self._name}: weight_scale {list(scale.shape)} does not fit a weight [{rows}, {columns}] with "
                f"{_sharing(weights)}"
            )
        if kind == "int" and weights.symmetric != self._symmetric():
            weights = replace(weights, symmetric=not weights.symmetric)
        activations = said.activations if said is not None and trusted else None
        return Scheme(weights=weights, activations=activations)

    def _stored(self, local: str) -> StoredTensor:
        if local not in self._tensors:
            raise FormatError(f"{self._name}.{local} is missing")
        return self._tensors[local]

    def _weight(self) -> StoredTensor:
        local = "weight_packed" if "weight_packed" in self._tensors else "weight"
        weight = self._stored(local)
        wanted = ("I32",) if local == "weight_packed" else ("I8", "F8_E4M3")
        if weight.dtype not in wanted:
            raise FormatError(f"{self._name}.{local} is stored as {weight.dtype}; read are {' and '.join(wanted)}")
        if len(weight.shape) != 2:
            raise FormatError(f"{self._name}.{local} {list(weight.shape)} is no matrix; experts are read one by one")
        return weight

    def _shape(self, weight: StoredTensor) -> tuple[int, int]:
        if weight.dtype != "I32":
            return weight.shape[0], weight.shape[1]
        self._stored("weight_shape")
        rows, columns = self._read(f"{self._name}.weight_shape").tolist()
        return int(rows), int(columns)

    def _bits(self, weight: StoredTensor, columns: int, said: int) -> int:
        """The width that fills the stored words, the one said first; int8 holds any width, so the one said stands."""
        if weight.dtype != "I32":
            return said or 8
        for bits in sorted(PACKED_BITS, key=lambda bits: bits != said):
            if -(-columns * bits // 32) == weight.shape[1]:
                return bits
        raise FormatError(
            f"{self._name}.weight_packed has {weight.shape[1]} words for {columns} columns: not 2, 4 or 8 bits; other widths "
            "are laid out differently by different releases"
        )

    def _symmetric(self) -> bool:
        """No zero points are stored, or (as some writers do for symmetric weights) only zeros."""
        if "weight_zero_point" not in self._tensors:
            return True
        zeros = self._read(f"{self._name}.weight_zero_point")
        return False if zeros.dtype == torch.int32 else not bool(zeros.any())


def _differences(said: Scheme | None, found: Scheme) -> Iterator[tuple[str, object, object]]:
    if said is None or said == found:
        return
    for what in ("type", "bits", "granularity", "group", "symmetric"):
        before, after = getattr(said.weights, what), getattr(found.weights, what)
        if before != after:
            yield what, before, after


def _unsupported(scheme: Scheme) -> str | None:
    weights = scheme.weights
    if groups.format_of(scheme) != "pack-quantized":
        return None
    if weights.bits not in PACKED_BITS:
        return f"{scheme.name}: packed weights have 2, 4 or 8 bits: other widths differ between releases"
    if weights.per_tensor:
        return f"{scheme.name}: packed weights have a scale for each group or row, not one for the whole tensor"
    return None


def _fits(scale: tuple[int, ...], weights: WeightScheme, *, rows: int, columns: int) -> bool:
    if _ragged(columns, weights):
        return False
    wanted = weights.grid(rows, columns)
    return scale == wanted or (scale in ((), (1,)) and wanted == (1, 1)) or (scale == (rows,) and wanted == (rows, 1))


def _by_scale(weights: WeightScheme, scale: tuple[int, ...], *, rows: int, columns: int) -> WeightScheme | None:
    """What the scale's shape says of who shares one; None where it says nothing. A block's size is never guessed."""
    alone = replace(weights, group=None, block=None, per_tensor=False)
    if scale in ((), (1,)):
        return replace(alone, per_tensor=True)
    if scale in ((rows,), (rows, 1)):
        return alone
    if len(scale) == 2 and scale[0] == rows and columns % scale[1] == 0:
        return replace(alone, group=columns // scale[1])
    return None


def _ragged(columns: int, weights: WeightScheme) -> bool:
    return weights.group is not None and columns % weights.group != 0


def _sharing(weights: WeightScheme) -> str:
    if weights.block is not None:
        return f"blocks of {weights.block[0]} x {weights.block[1]}"
    return f"group {weights.group}" if weights.group else f"one scale a {weights.granularity}"


def _zeros(tensors: Mapping[str, torch.Tensor], bits: int, rows: int) -> torch.Tensor:
    """Zero points [O, G] int8: packed along O beside packed weights; as they are in int8 files and in some old packed ones."""
    zeros = require(tensors, "weight_zero_point")
    if zeros.dtype != torch.int32:
        return zeros.reshape(rows, -1).to(torch.int8)
    return unpack_int32(zeros.t(), bits, rows).t().contiguous()


def _column_groups(g_idx: torch.Tensor | None, columns: int, count: int) -> torch.Tensor | None:
    """The group of each column, or None where groups are runs of neighbours; -1 anywhere stands for "never set"."""
    if g_idx is None or bool((g_idx < 0).any()):
        return None
    plain = torch.arange(columns, device=g_idx.device) // (columns // count)
    if tuple(g_idx.shape) != (columns,) or int(g_idx.max()) >= count:
        raise FormatError(f"weight_g_idx {list(g_idx.shape)} does not fit {columns} columns in {count} groups")
    return None if torch.equal(g_idx.long(), plain) else g_idx.long()
