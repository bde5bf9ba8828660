"""Which format a checkpoint is in: by the tensors present, and by the label in config.json only for what they leave open."""

from collections.abc import Iterable, Mapping
from typing import Any

from narrowgauge.quant.formats import gptq
from narrowgauge.quant.formats.base import (
    FORMATS,
    CheckpointFormat,
    FormatError,
    ReadTensor,
    Stored,
    StoredTensor,
    get_format,
)

QUANTIZED = frozenset({"weight_packed", "weight_scale", "weight_scale_inv", "qweight"})
"""Local names, any of which shows that a module is stored in quantized form."""
_NOT_CONVERTIBLE = {
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "mxfp6-pack-quantized": "MXFP6",
    "mxfp8-quantized": "MXFP8",
}


def recognize(
    config: Mapping[str, Any] | None, stored: Stored, read: ReadTensor
) -> tuple[CheckpointFormat, list[str]] | None:
    """The format that reads these modules, and in words where config.json says another; None for full precision.

    Raises FormatError for formats that are not read, and where tensors of two formats lie side by side.
    """
    said = config or {}
    label = str(said["quant_method"]) if said.get("quant_method") else None
    if name := _NOT_CONVERTIBLE.get(str(said.get("format"))):
        raise FormatError(f"{name} weights are not read; known: {', '.join(sorted(FORMATS))}")
    found: dict[str, str] = {}
    for module, tensors in stored.items():
        if kind := _kind(module, tensors, label):
            found.setdefault(kind, module)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise FormatError(f"{first} is stored as {one} but {second} as {other}: one checkpoint has one format")
    if not found:
        return None if config is None else _unseen(label, said)
    kind = next(iter(found))
    warnings = []
    if label != kind:
        says = "no quantization_config" if label is None else f"quant_method {label!r}"
        warnings.append(f"config.json says {says}, the tensors are {kind}; the tensors are right")
    if kind == "gptq":
        version, more = gptq.recognize(said, stored, read)
        chosen: CheckpointFormat = version
        return chosen, warnings + more
    return get_format(kind), warnings


def quantized_modules(locals_by_module: Mapping[str, Iterable[str]]) -> bool:
    """Whether any module holds a tensor that only quantized modules have."""
    return any(not QUANTIZED.isdisjoint(locals_) for locals_ in locals_by_module.values())


def _kind(module: str, tensors: Mapping[str, StoredTensor], label: str | None) -> str | None:
    if "weight_packed" in tensors:
        return "compressed-tensors"
    if "weight_scale_inv" in tensors:
        return "fp8"
    if "weight_scale" in tensors:
        return "fp8" if label == "fp8" else "compressed-tensors"
    if "qweight" not in tensors:
        return None
    qweight: tuple[int, ...] = tensors["qweight"].shape
    scales: tuple[int, ...] = tensors["scales"].shape if "scales" in tensors else ()
    if len(qweight) == 2 and len(scales) == 2 and tensors["qweight"].dtype == "I32":
        if qweight[1] == scales[1]:
            return "gptq"
        if qweight[1] * 8 == scales[1]:
            return "awq"
    raise FormatError(
        f"{module}.qweight {list(qweight)} is neither GPTQ nor AWQ GEMM (a kernel's own layout such as GEMV or Marlin?); "
        "get the GPTQ or the GEMM version of the model"
    )


def _unseen(label: str | None, said: Mapping[str, Any]) -> tuple[CheckpointFormat, list[str]]:
    """No quantized weight: right only for a file that quantizes nothing but the KV cache."""
    if label is None or label not in FORMATS:
        raise FormatError(f"unknown checkpoint format {label!r}; known: {', '.join(sorted(FORMATS))}")
    if said.get("kv_cache_scheme") is None or said.get("config_groups"):
        raise FormatError("config.json says the model is quantized, but no quantized weight is stored")
    return get_format(label), []
