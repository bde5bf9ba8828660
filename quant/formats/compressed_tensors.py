"""The compressed-tensors format, "pack-quantized": weight-only int codes packed in int32 (W2, W4, W8 with A16).

Tensors of a Linear [O, I] with G groups of columns:
  weight_packed      int32 [O, ceil(I * bits / 32)]
  weight_scale       model's dtype [O, G] (G = 1 for one scale a row)
  weight_zero_point  int32 [ceil(O * bits / 32), G], packed along O; only when asymmetric, and then always
  weight_shape       int64 [2] = (O, I)
Keys written into config.json are the smallest set that every release from 0.9 to 0.20 accepts: the configuration
classes refuse unknown keys, and some releases refuse keys that others write.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch

from narrowgauge.quant.formats.base import (
    FormatError,
    KVScales,
    QuantizationLayout,
    QuantizedWeight,
    ReadTensor,
    Stored,
    dequantize_weight,
)
from narrowgauge.quant.formats.kv_cache import kv_tensors
from narrowgauge.quant.formats.packing import PACKED_BITS, pack_int32, unpack_int32
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme, WeightScheme

_PACKED = "pack-quantized"
_LIBRARY_VERSION = "0.20.1"


class CompressedTensors:
    """compressed-tensors checkpoints, read and written by transformers, vLLM and llm-compressor."""

    name = "compressed-tensors"
    markers = ("weight_packed", "weight_scale")

    def config(
        self, linears: Mapping[str, Scheme], kept: tuple[str, ...], kv_cache: KVCacheScheme | None = None
    ) -> dict[str, Any]:
        """`quantization_config`, one group for each Scheme. Raises FormatError for what the format cannot hold."""
        by_scheme: dict[Scheme, list[str]] = {}
        for name, scheme in linears.items():
            _check_supported(scheme)
            by_scheme.setdefault(scheme, []).append(name)
        if not by_scheme and kv_cache is None:
            raise FormatError("no Linear is quantized: the recipe's rules keep every layer at full precision")
        groups = {}
        for index, (scheme, names) in enumerate(by_scheme.items()):
            groups[f"group_{index}"] = {
                "format": _PACKED,
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"] if len(by_scheme) == 1 else sorted(names),
                "weights": _weight_arguments(scheme.weights),
            }
        return {
            "config_groups": groups,
            "format": _PACKED,
            "global_compression_ratio": None,
            "ignore": sorted(kept),
            "kv_cache_scheme": None if kv_cache is None else _kv_arguments(kv_cache),
            "quant_method": self.name,
            "quantization_status": "compressed",
            "version": _LIBRARY_VERSION,
        }

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """None: everything stands in config.json."""
        return {}

    def layout(self, config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> QuantizationLayout:
        """Resolves targets and `ignore` over the modules stored in quantized form.

        Raises FormatError where the status is not "compressed" (loaders that accept such a file answer with random
        weights), for a format or scheme this release does not read, and for a stored module that no group covers.
        """
        status = config.get("quantization_status")
        if status != "compressed":
            raise FormatError(
                f"quantization_config.quantization_status is {status!r}, not 'compressed': the file was not finished "
                "by its writer; save it again with save_compressed=True"
            )
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping):
            raise FormatError("quantization_config.config_groups is missing")
        groups_read = [(_targets(group, key), _read_group(group, key, config)) for key, group in groups.items()]
        ignore = tuple(config.get("ignore") or ())
        linears = {}
        for name in (module for module, tensors in stored.items() if set(self.markers) & set(tensors)):
            scheme = next((scheme for targets, scheme in groups_read if _matches(name, targets)), None)
            if scheme is None or _matches(name, ignore, classes=False):
                raise FormatError(f"{name} is stored in quantized form, but quantization_config leaves it out")
            linears[name] = scheme
        return QuantizationLayout(format=self.name, linears=linears, kv_cache=_read_kv(config.get("kv_cache_scheme")))

    def refusal(self, shape: tuple[int, int], scheme: Scheme, weight: QuantizedWeight | None = None) -> str | None:
        """Why a Linear of `shape` (O, I) cannot be stored so; None if it can."""
        try:
            _check_supported(scheme)
        except FormatError as error:
            return str(error)
        if scheme.weights.group is not None and shape[1] % scheme.weights.group:
            return f"in_features {shape[1]} is not a multiple of group {scheme.weights.group}"
        return None

    def pack(self, weight: QuantizedWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors of one Linear. Raises FormatError for a scale that is not finite and above zero."""
        _check_supported(scheme)
        if not bool(torch.isfinite(weight.scales).all()) or not bool((weight.scales > 0).all()):
            raise FormatError(
                "a scale is not finite and above zero: the weight or its calibration holds NaN or infinity"
            )
        bits = scheme.weights.bits
        tensors = {
            "weight_packed": pack_int32(weight.codes, bits),
            "weight_scale": weight.scales.contiguous(),
            "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
        }
        if not scheme.weights.symmetric:
            if weight.zeros is None:
                raise FormatError("an asymmetric weight needs zero points")
            tensors["weight_zero_point"] = pack_int32(weight.zeros.t().contiguous(), bits).t().contiguous()
        return tensors

    def stored_bytes(self, shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
        """Bytes of the tensors of one Linear of `shape` (O, I), with scales of `scale_bytes` each."""
        (rows, columns), bits = shape, scheme.weights.bits
        groups = columns // (scheme.weights.group or columns)
        words = rows * -(-columns * bits // 32)
        if not scheme.weights.symmetric:
            words += groups * -(-rows * bits // 32)
        return 4 * words + scale_bytes * rows * groups + 16

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
        """Codes, scales and zero points of one Linear. Raises FormatError for a missing tensor or a wrong shape."""
        _check_supported(scheme)
        packed, scales = _require(tensors, "weight_packed"), _require(tensors, "weight_scale")
        bits, shape = scheme.weights.bits, _require(tensors, "weight_shape").tolist()
        rows, columns = int(shape[0]), int(shape[1])
        group = scheme.weights.group or columns
        groups = columns // group
        if columns % group or packed.shape[0] != rows or tuple(scales.shape) != (rows, groups):
            raise FormatError(
                f"weight_packed {list(packed.shape)}, weight_scale {list(scales.shape)} and weight_shape {shape} do "
                f"not fit {scheme.name} with group {scheme.weights.group}"
            )
        zeros = None
        try:
            if not scheme.weights.symmetric:
                zeros = unpack_int32(_require(tensors, "weight_zero_point").t(), bits, rows).t().contiguous()
            codes = unpack_int32(packed, bits, columns)
        except ValueError as error:
            raise FormatError(str(error)) from None
        return QuantizedWeight(codes=codes, scales=scales, zeros=zeros)

    def dequantize(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
        """The full weight [O, I] in `dtype`."""
        return dequantize_weight(self.unpack(tensors, scheme), dtype)

    def kv_tensors(self, attention: str, scales: KVScales) -> dict[str, torch.Tensor]:
        """`<attention>.k_scale` and `.v_scale`. Raises FormatError for a scale that is not finite and above zero."""
        return kv_tensors(attention, scales)


def _check_supported(scheme: Scheme) -> None:
    if scheme.weights.type != "int" or scheme.weights.bits not in PACKED_BITS:
        raise FormatError(
            f"{scheme.name}: compressed-tensors files are read and written with int weights of 2, 4 or 8 bits"
        )
    if scheme.activations is not None:
        raise FormatError(f"{scheme.name}: quantized activations are not supported; set them to null")


def _weight_arguments(weights: WeightScheme) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dynamic": False,
        "num_bits": weights.bits,
        "strategy": "channel" if weights.group is None else "group",
        "symmetric": weights.symmetric,
        "type": weights.type,
    }
    if weights.group is not None:
        arguments["group_size"] = weights.group
    return arguments


def _kv_arguments(scheme: KVCacheScheme) -> dict[str, Any]:
    return {
        "dynamic": False,
        "num_bits": scheme.bits,
        "strategy": "attn_head" if scheme.granularity == "head" else "tensor",
        "symmetric": True,
        "type": scheme.type,
    }


def _targets(group: Any, key: str) -> tuple[str, ...]:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not targets:
        raise FormatError(f"quantization_config.config_groups.{key}.targets is missing")
    return tuple(targets)


def _read_group(group: Mapping[str, Any], key: str, config: Mapping[str, Any]) -> Scheme:
    where = f"quantization_config.config_groups.{key}"
    stored = group.get("format") or config.get("format")
    if stored != _PACKED:
        raise FormatError(f"{where}.format is {stored!r}; this release reads {_PACKED!r}")
    if group.get("input_activations") is not None or group.get("output_activations") is not None:
        raise FormatError(f"{where} quantizes activations; this release reads weight-only checkpoints")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise FormatError(f"{where}.weights is missing")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise FormatError(
            f"{where}.weights.actorder {weights['actorder']!r} permutes columns on disk, which is not read"
        )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else None)
    if strategy not in ("group", "channel"):
        raise FormatError(f"{where}.weights.strategy is {strategy!r}; this release reads 'group' and 'channel'")
    kind: Literal["int", "float"] = "float" if weights.get("type") == "float" else "int"
    try:
        scheme = WeightScheme(
            bits=int(weights["num_bits"]),
            type=kind,
            group=int(weights["group_size"]) if strategy == "group" else None,
            symmetric=bool(weights.get("symmetric", True)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}.weights cannot be read: {error}") from None
    result = Scheme(weights=scheme)
    _check_supported(result)
    return result


def _read_kv(scheme: Any) -> KVCacheScheme | None:
    if scheme is None:
        return None
    granularity: Literal["tensor", "head"] = "head" if scheme.get("strategy") == "attn_head" else "tensor"
    kind: Literal["int", "float"] = "float" if scheme.get("type") == "float" else "int"
    try:
        return KVCacheScheme(bits=int(scheme.get("num_bits", 0)), type=kind, granularity=granularity)
    except ValueError as error:
        raise FormatError(f"quantization_config.kv_cache_scheme cannot be read: {error}") from None


def _matches(name: str, entries: tuple[str, ...], *, classes: bool = True) -> bool:
    """compressed-tensors' matcher: an exact name, "re:" + a regex anchored at its start only, or the class "Linear"."""
    for entry in entries:
        if entry.startswith("re:"):
            if re.match(entry.removeprefix("re:"), name):
                return True
        elif entry == name or (classes and entry == "Linear"):
            return True
    return False


def _require(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise FormatError(f"the tensor {name} is missing")
    return tensors[name]
