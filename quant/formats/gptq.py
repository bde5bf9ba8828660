"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them, zero points of version 1 and of version 2.

Tensors of a Linear [O, I] with G groups of columns; q and z are unsigned, w = (q - z) * s:
  qweight  int32 [I * bits / 32, O], packed along I
  qzeros   int32 [G, O * bits / 32], packed along O: z in version 2, (z - 1) mod 2^bits in version 1
  scales   float16 [G, O]
  g_idx    int32 [I], the group of each column (activation order on disk where these are not runs of neighbours)

Version 1 cannot hold a zero point of 0: of its writers AutoGPTQ loses the neighbours' fields, GPTQModel subtracts 1 from
every field of the whole word and lets it borrow, others wrap each field. Their files agree wherever every z is above 0.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

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
)
from narrowgauge.quant.formats.half import half_refusal, to_half
from narrowgauge.quant.formats.packing import PACKED_BITS, pack_int32, unpack_int32
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme, WeightScheme

Zeros = Literal["plain", "field", "word"]
"""How qzeros hold z: as it is; minus 1 in each field; minus 1 in each field of the whole word, with borrows."""
_VERSIONS = {"gptq": "v1", "gptq_v2": "v2"}


class GPTQ:
    """Version 1, `checkpoint_format: gptq`: the one that every loader reads."""

    name = "gptq"

    def __init__(self, zeros: Zeros = "field") -> None:
        self.zeros = zeros

    def config(
        self, linears: Mapping[str, Scheme], kept: tuple[str, ...], kv_cache: KVCacheScheme | None = None
    ) -> dict[str, Any]:
        """`quantization_config`: the most common Scheme for the model, others and kept layers by name under `dynamic`."""
        check_weights_only(self.name, linears, kv_cache, unsupported=lambda scheme: _unsupported(scheme, self.name))
        schemes = list(linears.values())
        main = max(dict.fromkeys(schemes), key=schemes.count)
        dynamic: dict[str, Any] = {
            f"+:^{re.escape(name)}$": _arguments(scheme) for name, scheme in linears.items() if scheme != main
        }
        dynamic |= {f"-:^{re.escape(name)}$": {} for name in sorted(kept) if name != "lm_head"}
        return {
            "quant_method": "gptq",
            **_arguments(main),
            "desc_act": False,
            "lm_head": "lm_head" in linears,
            "checkpoint_format": self.name,
            "pack_dtype": "int32",
            "dynamic": dynamic,
            "meta": {"quantizer": ["narrowgauge:0.1"]},
        }

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """quantize_config.json, where AutoGPTQ and older loaders look."""
        return {"quantize_config.json": dict(config)}

    def layout(self, config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> QuantizationLayout:
        """Bits, groups and symmetry of each module by its tensors; the config decides only what they leave open."""
        linears, warnings = {}, []
        for name, tensors in stored.items():
            if "qweight" not in tensors:
                continue
            said = _said(config, name)
            rows, columns, bits, groups = _sizes(name, tensors)
            group = _group(said, name, columns=columns, groups=groups)
            symmetric = bool(said.get("sym", True))
            if symmetric or self.zeros == "field":
                middle, wrapped = self._look_at_zeros(read(f"{name}.qzeros"), bits, rows)
                if symmetric and not middle:
                    symmetric = False
                    warnings.append(
                        f"{name}: config.json says sym, but its zero points are not all {1 << bits - 1}; they are used"
                    )
                elif wrapped and not symmetric:
                    warnings.append(
                        f"{name}: a zero point of 0 in {self.name}, which writers store differently; it is read field by "
                        "field, and neighbours may be off by one"
                    )
            for key, here in (("bits", bits), ("group_size", group or -1)):
                if key in said and said[key] not in (here, columns if here == -1 else here):
                    warnings.append(
                        f"{name}: config.json says {key} {said[key]}, the tensors {here}; the tensors are right"
                    )
            linears[name] = Scheme(weights=WeightScheme(bits=bits, group=group, symmetric=symmetric))
        return QuantizationLayout(format=self.name, linears=linears, warnings=tuple(warnings))

    def refusal(self, shape: tuple[int, int], scheme: Scheme, weight: QuantizedWeight | None = None) -> str | None:
        """Why a Linear of `shape` (O, I) cannot be stored so; None if it can."""
        if reason := _unsupported(scheme, self.name):
            return reason
        (rows, columns), fields = shape, 32 // scheme.weights.bits
        for what, size in (("out_features", rows), ("in_features", columns)):
            if size % fields:
                return f"{what} {size} is not a multiple of {fields}, the codes of {scheme.weights.bits} bits in a word"
        if scheme.weights.group is not None and columns % scheme.weights.group:
            return f"in_features {columns} is not a multiple of group {scheme.weights.group}"
        if weight is None:
            if self.zeros != "plain" and not scheme.weights.symmetric:
                return f"{self.name} cannot hold a zero point of 0, which asymmetric rounding may need; use gptq_v2"
            return None
        if self.zeros != "plain" and weight.zeros is not None and bool((weight.zeros == scheme.weights.qmin).any()):
            return f"a zero point is 0, which {self.name} cannot hold; use gptq_v2 or compressed-tensors"
        if weight.column_groups is not None:
            return "its groups are permuted columns (activation order on disk), which is read but not written"
        return half_refusal(weight.scales)

    def pack(self, weight: QuantizedWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors of one Linear; scales are rounded to float16. Raises FormatError for what the format cannot hold."""
        check_written(weight, scheme)
        rows, columns = weight.codes.shape
        weight = replace(weight, scales=to_half(weight.scales))
        if reason := self.refusal((rows, columns), scheme, weight):
            raise FormatError(reason)
        bits, groups = scheme.weights.bits, weight.scales.shape[1]
        zeros = torch.zeros(rows, groups, dtype=torch.int8) if weight.zeros is None else weight.zeros
        shift = 0 if self.zeros == "plain" else 1
        return {
            "qweight": pack_int32(weight.codes, bits).t().contiguous(),
            "qzeros": pack_int32((zeros - shift).t().contiguous(), bits),
            "scales": weight.scales.t().contiguous(),
            "g_idx": (torch.arange(columns) // (columns // groups)).to(torch.int32),
        }

    def stored_bytes(self, shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
        """Bytes of the tensors of one Linear of `shape` (O, I); scales take 2 bytes whatever the model's dtype."""
        (rows, columns), bits = shape, scheme.weights.bits
        groups = scheme.weights.grid(rows, columns)[1]
        return rows * columns * bits // 8 + groups * rows * bits // 8 + 2 * groups * rows + 4 * columns

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
        """Codes, scales and zero points of one Linear. Raises FormatError for a missing tensor or a wrong shape."""
        packed = require(tensors, "qweight")
        scales = check_read("scales", require(tensors, "scales")).t().contiguous()
        bits, (rows, groups) = scheme.weights.bits, scales.shape
        columns = packed.shape[0] * 32 // bits
        try:
            codes = unpack_int32(packed.t(), bits, columns)
            zeros = None if scheme.weights.symmetric else self._read_zeros(require(tensors, "qzeros"), bits, rows)
        except ValueError as error:
            raise FormatError(str(error)) from None
        if codes.shape[0] != rows or (zeros is not None and zeros.shape != scales.shape):
            raise FormatError(
                f"qweight {list(packed.shape)}, scales {[groups, rows]} and qzeros do not fit one another"
            )
        index = _column_groups(tensors.get("g_idx"), scheme.weights.group or columns, columns=columns, groups=groups)
        return QuantizedWeight(codes=codes, scales=scales, zeros=zeros, column_groups=index)

    def dequantize(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
        """The full weight [O, I] in `dtype`."""
        return dequantize_weight(self.unpack(tensors, scheme), dtype)

    def kv_tensors(self, attention: str, scales: KVScales) -> dict[str, torch.Tensor]:
        """Raises FormatError: the format holds none."""
        raise FormatError(f"{attention}: {self.name} files hold no KV scales; use compressed-tensors")

    def _read_zeros(self, qzeros: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
        """[G, W] int32 -> z [O, G] int8 in the signed domain."""
        if self.zeros == "word":
            # Adding 1 to every field of the whole word, carries and all, undoes the subtraction that borrowed.
            qzeros = qzeros + sum(1 << shift for shift in range(0, 32, bits))
        zeros = unpack_int32(qzeros, bits, rows)
        if self.zeros == "field":
            low = -(1 << (bits - 1))
            zeros = ((zeros.to(torch.int16) - low + 1) % (1 << bits) + low).to(torch.int8)
        return zeros.t().contiguous()

    def _look_at_zeros(self, qzeros: torch.Tensor, bits: int, rows: int) -> tuple[bool, bool]:
        """Whether all zero points are the middle of the range, and whether one is 0."""
        zeros = self._read_zeros(qzeros, bits, rows)
        return not bool(zeros.any()), bool((zeros == -(1 << (bits - 1))).any())


class GPTQv2(GPTQ):
    """Version 2, `checkpoint_format: gptq_v2`: zero points as they are."""

    name = "gptq_v2"

    def __init__(self) -> None:
        super().__init__("plain")


def recognize(config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> tuple[GPTQ, list[str]]:
    """The version that wrote these tensors, and in words where config.json says another.

    Raises FormatError for the formats that only share the name. Symmetric zero points tell the version; else the label must.
    """
    label = config.get("checkpoint_format") or config.get("format") or "gptq"
    if label not in _VERSIONS:
        raise FormatError(
            f"checkpoint_format is {label!r}: a kernel's own layout; save it as gptq or gptq_v2 with GPTQModel"
        )
    told = _told(config, stored, read) or label
    warnings = []
    if told != label:
        warnings.append(f"config.json says checkpoint_format {label}, the zero points {told}; the tensors are right")
    if told == "gptq_v2":
        return GPTQv2(), warnings
    writers = (config.get("meta") or {}).get("quantizer") or ()
    writers = (writers,) if isinstance(writers, str) else writers
    whole_words = any(str(writer).lower().startswith("gptqmodel") for writer in writers)
    return GPTQ("word" if whole_words else "field"), warnings


def _told(config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> str | None:
    for name, tensors in stored.items():
        if "qweight" not in tensors or not _said(config, name).get("sym", True):
            continue
        rows, _, bits, _ = _sizes(name, tensors)
        zeros = unpack_int32(read(f"{name}.qzeros"), bits, rows)
        if bool((zeros == 0).all()):
            return "gptq_v2"
        if bool((zeros == -1).all()):
            return "gptq"
    return None


def _said(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys of the config as they hold for one module: those of the first `dynamic` entry that matches it win."""
    for pattern, changes in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), name):
            return {**config, **(changes or {})}
    return dict(config)


def _sizes(name: str, tensors: Mapping[str, StoredTensor]) -> tuple[int, int, int, int]:
    """(O, I, bits, G) by the shapes of the tensors alone. Raises FormatError where they do not fit one another."""
    if missing := [local for local in ("qzeros", "scales") if local not in tensors]:
        raise FormatError(f"{name}.{missing[0]} is missing")
    qweight, qzeros, scales = (tensors[local].shape for local in ("qweight", "qzeros", "scales"))
    rows, bits = scales[1], 32 * qzeros[1] // scales[1]
    if qweight[1] != rows or qzeros[0] != scales[0] or bits not in PACKED_BITS:
        raise FormatError(
            f"{name}: qweight {list(qweight)}, qzeros {list(qzeros)} and scales {list(scales)} are not GPTQ of 2, 4 or 8 bits"
        )
    return rows, qweight[0] * 32 // bits, bits, scales[0]


def _group(said: Mapping[str, Any], name: str, *, columns: int, groups: int) -> int | None:
    size = said.get("group_size")
    if isinstance(size, int) and 0 < size <= columns and -(-columns // size) == groups:
        return size
    if groups == 1:
        return None
    if columns % groups:
        raise FormatError(f"{name}: {columns} columns in {groups} groups do not fit group_size {size}")
    return columns // groups


def _column_groups(g_idx: torch.Tensor | None, group: int, *, columns: int, groups: int) -> torch.Tensor | None:
    """The group of each column, or None where groups are whole runs of neighbours."""
    plain = torch.arange(columns) // group
    index = plain if g_idx is None else g_idx.long().cpu()
    if tuple(index.shape) != (columns,) or int(index.min()) < 0 or int(index.max()) >= groups:
        raise FormatError(f"g_idx {list(index.shape)} does not fit {columns} columns in {groups} groups")
    if columns == group * groups and torch.equal(index, plain):
        return None
    return index if g_idx is None else index.to(g_idx.device)


def _arguments(scheme: Scheme) -> dict[str, Any]:
    return {"bits": scheme.weights.bits, "group_size": scheme.weights.group or -1, "sym": scheme.weights.symmetric}


def _unsupported(scheme: Scheme, name: str) -> str | None:
    weights = scheme.weights
    if scheme.activations is not None:
        return f"{scheme.name}: {name} files hold weights only; use compressed-tensors, or activations: null"
    if weights.type != "int" or weights.bits not in PACKED_BITS or weights.per_tensor:
        return f"{scheme.name}: {name} files hold int weights of 2, 4 or 8 bits with a scale for each group or row"
    return None
