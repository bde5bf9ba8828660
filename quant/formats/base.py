"""What a checkpoint format owns: tensor names, dtypes, shapes, packing, its part of config.json, and dequantization.

A format is the truth about bytes on disk. A layout for a fast kernel is the engine's, made from `unpack` at load.
Shapes: O out_features, I in_features, G groups of input columns (1 for one scale a row).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from narrowgauge.quant.formats.read import Registry, lookup
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme

FORMATS: Registry = {
    "compressed-tensors": "narrowgauge.quant.formats.compressed_tensors:CompressedTensors",
    "gptq": "narrowgauge.quant.formats.gptq:GPTQ",
    "gptq_v2": "narrowgauge.quant.formats.gptq:GPTQv2",
    "awq": "narrowgauge.quant.formats.awq:AWQ",
    "fp8": "narrowgauge.quant.formats.fp8:NativeFP8",
}


class FormatError(ValueError):
    """A checkpoint that does not say what its format requires; the message names the tensor or key and the remedy."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A rounded weight in the terms of its Scheme: w = (codes - zeros) * scales, each scale broadcast over what shares it.

    codes  [O, I] int8 in the signed domain (qmin..qmax), or float8_e4m3fn
    scales [R, C] in the model's dtype: [O, G] for groups of columns (G = 1: one a row), [1, 1] for one a tensor,
           [ceil(O / rows), ceil(I / columns)] where `block` says how many rows and columns share one
    zeros  [O, G] int8 in the signed domain, or None when symmetric
    input_scale  [1], the calibrated scale of the Linear's input, or None where there is none
    column_groups  [I] int64: the group of each column where a file's groups are not runs of neighbours, else None
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    block: tuple[int, int] | None = None
    input_scale: torch.Tensor | None = None
    column_groups: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class KVScales:
    """Scales of one attention layer's stored keys and values: [1] each, or [kv heads] with one for each head."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What a file's header says of one tensor: safetensors' name of the dtype ("BF16", "I32", "F8_E4M3") and the shape."""

    dtype: str
    shape: tuple[int, ...]


Stored = Mapping[str, Mapping[str, StoredTensor]]
"""Module name -> local tensor name -> what is stored."""


@dataclass(frozen=True, kw_only=True)
class QuantizationLayout:
    """What a checkpoint holds: the Scheme of each Linear (absent means full precision) and of the KV cache.

    `warnings` tell where config.json and the stored tensors differ, or what a reader should know; the tensors won.
    """

    format: str
    linears: Mapping[str, Scheme]
    kv_cache: KVCacheScheme | None = None
    warnings: tuple[str, ...] = ()


ReadTensor = Callable[[str], torch.Tensor]
"""Full tensor name -> the tensor."""


class CheckpointFormat(Protocol):
    """One format, read and written. Methods take and return tensors under *local* names ("weight_packed", ...)."""

    name: str

    def refusal(self, shape: tuple[int, int], scheme: Scheme, weight: QuantizedWeight | None = None) -> str | None:
        """Why a Linear of `shape` (O, I) cannot be stored so, in words that follow the layer's name; None if it can.

        Without `weight` the answer holds for every weight that the scheme allows; with it, for its very numbers: None then
        promises that `unpack(pack(weight))` gives them back bit for bit.
        """

    def config(
        self, linears: Mapping[str, Scheme], kept: tuple[str, ...], kv_cache: KVCacheScheme | None = None
    ) -> dict[str, Any]:
        """The `quantization_config` for config.json; `kept` are the Linears left in full precision. Raises FormatError."""

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """JSON files that older loaders want beside config.json, by name, from what `config` returned; often none."""

    def layout(self, config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> QuantizationLayout:
        """Which modules carry which Scheme, by the tensors stored and then by `quantization_config`. Raises FormatError.

        `stored` holds every module of the checkpoint; `read` gives a tensor by its full name.
        """

    def pack(self, weight: QuantizedWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors to store for one Linear."""

    def stored_bytes(self, shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
        """Bytes that `pack` makes of a weight of `shape` (O, I) with scales of `scale_bytes` each."""

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
        """The inverse of `pack`. Raises FormatError where a tensor is missing or has the wrong shape."""

    def dequantize(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
        """The full weight [O, I]: the reference that every kernel is compared with."""

    def kv_tensors(self, attention: str, scales: KVScales) -> dict[str, torch.Tensor]:
        """The tensors, by full name, that hold the KV scales of one attention layer ("model.layers.0.self_attn").

        Raises FormatError where the format has none, and for a scale that is not finite and above zero.
        """


def get_format(name: str) -> CheckpointFormat:
    """The format of that name. Raises FormatError with the known names."""
    if name not in FORMATS:
        raise FormatError(f"unknown checkpoint format {name!r}; known: {', '.join(sorted(FORMATS))}")
    checkpoint_format: CheckpointFormat = lookup(FORMATS, name)()
    return checkpoint_format


def check_weights_only(
    name: str,
    linears: Mapping[str, Scheme],
    kv_cache: KVCacheScheme | None,
    *,
    unsupported: Callable[[Scheme], str | None],
) -> None:
    """Raises FormatError for what a format `name` without KV scales cannot hold, naming the first Linear it refuses."""
    if kv_cache is not None:
        raise FormatError(f"{name} files hold no KV scales; use compressed-tensors, or kv_cache: null")
    if not linears:
        raise FormatError("no Linear is quantized: the recipe's rules keep every layer at full precision")
    for layer, scheme in linears.items():
        if reason := unsupported(scheme):
            raise FormatError(f"{layer}: {reason}")


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """w = (codes - zeros) * scales, [O, I] in `dtype`, rounded once.

    Scales stored in `dtype` multiply in it, as in compressed-tensors; others in float32, so that they are not rounded first.
    """
    rows, columns = weight.codes.shape
    compute = dtype if weight.scales.dtype == dtype else torch.float32
    codes, scales = weight.codes.to(compute), weight.scales.to(compute)
    if weight.block is not None:
        return codes.mul_(spread_blocks(scales, weight.block, (rows, columns))).to(dtype)
    if weight.column_groups is not None:
        if weight.zeros is not None:
            codes = codes - weight.zeros.to(compute)[:, weight.column_groups]
        return (codes * scales[:, weight.column_groups]).to(dtype)
    groups = scales.shape[1]
    codes = codes.view(rows, groups, columns // groups)
    if weight.zeros is not None:
        codes = codes - weight.zeros.to(compute).unsqueeze(-1)
    return (codes * scales.unsqueeze(-1)).view(rows, columns).to(dtype)


def spread_blocks(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """Scales [R, C] of blocks -> [O, I], one for each element; the last row and column of blocks may be ragged."""
    return scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def check_written(weight: QuantizedWeight, scheme: Scheme) -> None:
    """What every format asks of a weight to be stored. Raises FormatError for a scale that is not finite and above zero.

    Also for a part that the scheme needs and the weight lacks. Such a file would load and answer garbage.
    """
    if not is_positive(weight.scales):
        raise FormatError("a scale is not finite and above zero: the weight or its calibration holds NaN or infinity")
    if not scheme.weights.symmetric and weight.zeros is None:
        raise FormatError("an asymmetric weight needs zero points")
    if scheme.activations is not None and not scheme.activations.dynamic:
        if weight.input_scale is None:
            raise FormatError(f"{scheme.name} needs a calibrated input_scale")
        if not is_positive(weight.input_scale):
            raise FormatError(
                "input_scale is not finite and above zero: the calibration saw NaN, infinity or zeros only"
            )


def unmatched_names(entries: Iterable[object], modules: Iterable[str]) -> list[str]:
    """Entries of a list of kept modules that are part of no module's name, in words for a warning; at most one line.

    A tied lm_head has no tensor of its own, so it counts as there.
    """
    names = ["lm_head", *modules]
    idle = [str(entry) for entry in entries if not any(str(entry) in name for name in names)]
    return (
        [f"modules that config.json keeps: {', '.join(map(repr, idle))} match no module of the checkpoint"]
        if idle
        else []
    )


def is_positive(scales: torch.Tensor) -> bool:
    """Whether every scale is finite and above zero."""
    wide = scales.float()
    return bool((torch.isfinite(wide) & (wide > 0)).all())


def check_read(name: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales as read from a file. Raises FormatError for NaN and infinity; zero stands for a group of zeros."""
    if not bool(torch.isfinite(scales.float()).all()):
        raise FormatError(
            f"{name} holds NaN or infinity: the file is damaged, or its calibration was; quantize it again"
        )
    return scales


def require(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """One tensor of a module by its local name. Raises FormatError where it is missing."""
    if name not in tensors:
        raise FormatError(f"the tensor {name} is missing")
    return tensors[name]
