"""AWQ checkpoints in AutoAWQ's GEMM layout: 4 bits, with zero points.

Tensors of a Linear [O, I] with groups of g columns; q and z are unsigned, w = (q - z) * s:
  qweight  int32 [I, O / 8], packed along O: field i of word c holds row 8 c + [0, 2, 4, 6, 1, 3, 5, 7][i]
  qzeros   int32 [I / g, O / 8], packed the same way
  scales   float16 [I / g, O]
A symmetric weight is stored with the zero point 8 everywhere; a file of such zeros is read as symmetric.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.quant.formats.base import (
    FormatError,
    KVScales,
    QuantizationLayout,
    QuantizedWeight,
    ReadTensor,
    Stored,
    StoredTensor,
    check_read,
    check_weights_only,
    check_written,
    dequantize_weight,
    require,
    unmatched_names,
)
from narrowgauge.quant.formats.half import half_refusal, to_half
from narrowgauge.quant.formats.packing import pack_int32, unpack_int32
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme, WeightScheme

_BITS, _FIELDS = 4, 8
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class AWQ:
    """`quant_method: awq`, `version: gemm`."""

    name = "awq"

    def config(
        self, linears: Mapping[str, Scheme], kept: tuple[str, ...], kv_cache: KVCacheScheme | None = None
    ) -> dict[str, Any]:
        """`quantization_config`. Raises FormatError: the format has one group size, and names kept layers by substring."""
        check_weights_only("awq", linears, kv_cache, unsupported=_unsupported)
        for name in linears:
            if name.rpartition(".")[2] == "lm_head":
                raise FormatError(f"{name}: awq loaders never quantize the output head; keep it at 16 bits")
            if caught := [entry for entry in kept if entry in name]:
                raise FormatError(
                    f"{name}: awq names kept layers by substring, so that {caught[0]!r}, which is kept, names it as well; "
                    "use compressed-tensors"
                )
        sizes = {scheme.weights.group for scheme in linears.values()}
        if len(sizes) > 1:
            raise FormatError(f"awq has one group size for the whole model, not {len(sizes)}; use compressed-tensors")
        return {
            "quant_method": self.name,
            "bits": _BITS,
            "group_size": sizes.pop() or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": sorted(kept) or None,
        }

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """None: everything stands in config.json."""
        return {}

    def layout(self, config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> QuantizationLayout:
        """Group and symmetry of each module by its tensors. Raises FormatError for layouts other than GEMM."""
        version = str(config.get("version") or "gemm").lower()
        if config.get("quant_method") == self.name and version != "gemm":
            raise FormatError(
                f"AWQ version {version!r} is a kernel's own layout, which is not read; get the GEMM version of the model"
            )
        said = config.get("group_size", config.get("q_group_size"))
        groups: dict[str, int | None] = {}
        symmetric, warnings = True, unmatched_names(config.get("modules_to_not_convert") or (), stored)
        for name, tensors in stored.items():
            if "qweight" not in tensors:
                continue
            rows, columns, count = _sizes(name, tensors)
            groups[name] = columns // count if count > 1 or said == columns else None
            found = columns // count
            if said is not None and said != found and not (said == -1 and count == 1):
                warnings.append(
                    f"{name}: config.json says group_size {said}, the tensors {found}; the tensors are right"
                )
            if symmetric and "qzeros" in tensors:
                symmetric = not bool(_unpack(read(f"{name}.qzeros"), rows).any())
        linears = {
            name: Scheme(weights=WeightScheme(bits=_BITS, group=group, symmetric=symmetric))
            for name, group in groups.items()
        }
        return QuantizationLayout(format=self.name, linears=linears, warnings=tuple(warnings))

    def refusal(self, shape: tuple[int, int], scheme: Scheme, weight: QuantizedWeight | None = None) -> str | None:
        """Why a Linear of `shape` (O, I) cannot be stored so; None if it can."""
        if reason := _unsupported(scheme):
            return reason
        if shape[0] % _FIELDS:
            return f"out_features {shape[0]} is not a multiple of {_FIELDS}, the codes in a word"
        if scheme.weights.group is not None and shape[1] % scheme.weights.group:
            return f"in_features {shape[1]} is not a multiple of group {scheme.weights.group}"
        if weight is None:
            return None
        if weight.column_groups is not None:
            return "its groups are permuted columns (activation order on disk), which awq has not"
        return half_refusal(weight.scales)

    def pack(self, weight: QuantizedWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors of one Linear; scales are rounded to float16. Raises FormatError for what the format cannot hold."""
        check_written(weight, scheme)
        rows, columns = weight.codes.shape
        weight = replace(weight, scales=to_half(weight.scales))
        if reason := self.refusal((rows, columns), scheme, weight):
            raise FormatError(reason)
        zeros = torch.zeros(weight.scales.shape, dtype=torch.int8) if weight.zeros is None else weight.zeros
        return {"qweight": _pack(weight.codes), "qzeros": _pack(zeros), "scales": weight.scales.t().contiguous()}

    def stored_bytes(self, shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
        """Bytes of the tensors of one Linear of `shape` (O, I); scales take 2 bytes whatever the model's dtype."""
        rows, columns = shape
        groups = scheme.weights.grid(rows, columns)[1]
        return rows * columns // 2 + groups * rows // 2 + 2 * groups * rows

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
        """Codes, scales and zero points of one Linear. Raises FormatError for a missing tensor or a wrong shape."""
        qweight = require(tensors, "qweight")
        scales = check_read("scales", require(tensors, "scales")).t().contiguous()
        rows, groups = scales.shape
        try:
            codes = _unpack(qweight, rows)
            zeros = None if scheme.weights.symmetric else _unpack(require(tensors, "qzeros"), rows)
        except ValueError as error:
            raise FormatError(str(error)) from None
        if groups != scheme.weights.grid(rows, codes.shape[1])[1] or (
            zeros is not None and zeros.shape != scales.shape
        ):
            raise FormatError(
                f"qweight {list(qweight.shape)} and scales {[groups, rows]} do not fit {scheme.name} with group "
                f"{scheme.weights.group}"
            )
        return QuantizedWeight(codes=codes, scales=scales, zeros=zeros)

    def dequantize(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
        """The full weight [O, I] in `dtype`."""
        return dequantize_weight(self.unpack(tensors, scheme), dtype)

    def kv_tensors(self, attention: str, scales: KVScales) -> dict[str, torch.Tensor]:
        """Raises FormatError: the format holds none."""
        raise FormatError(f"{attention}: awq files hold no KV scales; use compressed-tensors")


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """[O, C] int8 (signed domain) -> [C, O / 8] int32."""
    across = codes.t().reshape(codes.shape[1], -1, _FIELDS)
    return pack_int32(across[..., _ORDER].reshape(codes.shape[1], -1), _BITS)


def _unpack(words: torch.Tensor, rows: int) -> torch.Tensor:
    """[C, O / 8] int32 -> [O, C] int8 (signed domain). Raises ValueError where the words do not hold `rows` codes."""
    across = unpack_int32(words, _BITS, rows).reshape(words.shape[0], -1, _FIELDS)
    back = [_ORDER.index(position) for position in range(_FIELDS)]
    return across[..., back].reshape(words.shape[0], rows).t().contiguous()


def _sizes(name: str, tensors: Mapping[str, StoredTensor]) -> tuple[int, int, int]:
    """(O, I, G) by the shapes of the tensors. Raises FormatError where they do not fit one another."""
    if "scales" not in tensors:
        raise FormatError(f"{name}.scales is missing")
    (columns, words), (groups, rows) = tensors["qweight"].shape, tensors["scales"].shape
    qzeros = tensors.get("qzeros")
    wrong = words * _FIELDS != rows or columns % groups or (qzeros is not None and qzeros.shape != (groups, words))
    if wrong:
        raise FormatError(f"{name}: qweight {[columns, words]} and scales {[groups, rows]} are not AWQ GEMM of 4 bits")
    return rows, columns, groups


def _unsupported(scheme: Scheme) -> str | None:
    weights = scheme.weights
    if scheme.activations is not None:
        return f"{scheme.name}: awq files hold weights only; use compressed-tensors, or activations: null"
    if weights.type != "int" or weights.bits != _BITS or weights.per_tensor:
        return f"{scheme.name}: awq files hold int weights of 4 bits with a scale for each group or row"
    return None
