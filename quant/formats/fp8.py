"""Native FP8 checkpoints as DeepSeek writes them: E4M3 weights with one scale a block, activations rounded by token and group.

Tensors of a Linear [O, I]:
  weight            float8_e4m3fn [O, I], not padded
  weight_scale_inv  float32 [ceil(O / 128), ceil(I / 128)]; a multiplier in spite of its name: w = q * s
Also read: one scale a tensor (`weight_scale_inv` or `weight_scale`, a scalar) with `activation_scale` or `input_scale`, and
scales stored as powers of two (`ue8m0`). Not written so: loaders disagree on those names; compressed-tensors has both.
"""

from collections.abc import Mapping
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
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme

_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("activation_scale", "input_scale")


class NativeFP8:
    """`quant_method: fp8` with `weight_block_size`."""

    name = "fp8"

    def config(
        self, linears: Mapping[str, Scheme], kept: tuple[str, ...], kv_cache: KVCacheScheme | None = None
    ) -> dict[str, Any]:
        """`quantization_config`; kept layers stand under the key of transformers and under that of vLLM. Raises FormatError."""
        check_weights_only("native fp8", linears, kv_cache, unsupported=_unsupported)
        blocks = {scheme.weights.block for scheme in linears.values()}
        if len(blocks) > 1:
            raise FormatError("native fp8 has one block size for the whole model; use compressed-tensors")
        return {
            "quant_method": self.name,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(blocks.pop() or ()),
            "modules_to_not_convert": sorted(kept),
            "ignored_layers": sorted(kept),
        }

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """None: everything stands in config.json."""
        return {}

    def layout(self, config: Mapping[str, Any], stored: Stored, read: ReadTensor) -> QuantizationLayout:
        """The modules that have scales. The block is the one that config.json names: never one derived from shapes."""
        block = config.get("weight_block_size")
        kept = {str(name) for key in ("modules_to_not_convert", "ignored_layers") for name in config.get(key) or ()}
        linears, warnings = {}, unmatched_names(sorted(kept), stored)
        for name, tensors in stored.items():
            if not set(_SCALES) & set(tensors):
                continue
            linears[name] = _scheme(name, tensors, config, block=_checked_block(block))
            if name in kept:
                warnings.append(f"{name}: config.json says it is not quantized, but it is stored as FP8; it is read so")
        return QuantizationLayout(format=self.name, linears=linears, warnings=tuple(warnings))

    def refusal(self, shape: tuple[int, int], scheme: Scheme, weight: QuantizedWeight | None = None) -> str | None:
        """Why a Linear of `shape` (O, I) cannot be stored so; None if it can.

        Ragged blocks are refused: transformers derives the block from the shapes and gives 21 of 100 weights a
        neighbour's scale, without a word.
        """
        if reason := _unsupported(scheme):
            return reason
        assert scheme.weights.block is not None
        for what, size, step in zip(("out_features", "in_features"), shape, scheme.weights.block, strict=True):
            if size % step:
                return (
                    f"{what} {size} is not a multiple of the block's {step}: loaders of native fp8 give such a layer wrong "
                    "scales; use compressed-tensors, or keep the layer at 16 bits"
                )
        return None

    def pack(self, weight: QuantizedWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors of one Linear, ragged ones too. Raises FormatError for a scale that is not finite and above zero."""
        if reason := _unsupported(scheme):
            raise FormatError(reason)
        check_written(weight, scheme)
        return {"weight": weight.codes.contiguous(), "weight_scale_inv": weight.scales.to(torch.float32).contiguous()}

    def stored_bytes(self, shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
        """Bytes of the tensors of one Linear of `shape` (O, I); scales take 4 bytes whatever the model's dtype."""
        rows, columns = scheme.weights.grid(*shape)
        return shape[0] * shape[1] + 4 * rows * columns

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
        """Codes and scales of one Linear. Raises FormatError for a missing tensor or a wrong shape."""
        codes = require(tensors, "weight")
        name = _SCALES[0] if _SCALES[0] in tensors else _SCALES[1]
        scales = check_read(name, _wide(require(tensors, name)))
        grid = scheme.weights.grid(codes.shape[0], codes.shape[1])
        if scales.numel() != grid[0] * grid[1]:
            raise FormatError(f"weight {list(codes.shape)} and {name} {list(scales.shape)} do not fit {scheme.name}")
        input_scale = None
        if scheme.activations is not None and not scheme.activations.dynamic:
            local = _INPUT_SCALES[0] if _INPUT_SCALES[0] in tensors else _INPUT_SCALES[1]
            input_scale = check_read(local, _wide(require(tensors, local))).reshape(1)
        block = None if scheme.weights.block is None else (scheme.weights.block[0], scheme.weights.block[1])
        return QuantizedWeight(codes=codes, scales=scales.reshape(grid), block=block, input_scale=input_scale)

    def dequantize(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
        """The full weight [O, I] in `dtype`."""
        return dequantize_weight(self.unpack(tensors, scheme), dtype)

    def kv_tensors(self, attention: str, scales: KVScales) -> dict[str, torch.Tensor]:
        """Raises FormatError: the format holds none."""
        raise FormatError(f"{attention}: native fp8 files hold no KV scales; use compressed-tensors")


def _scheme(
    name: str, tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], *, block: tuple[int, int] | None
) -> Scheme:
    weight = tensors.get("weight")
    if weight is None or weight.dtype != "F8_E4M3":
        stored = "missing" if weight is None else f"stored as {weight.dtype}"
        raise FormatError(f"{name}.weight is {stored}; native fp8 is read as F8_E4M3")
    local = next(local for local in _SCALES if local in tensors)
    scale = tensors[local]
    if scale.dtype not in ("F32", "BF16", "F16", "F8_E8M0", "U8"):
        raise FormatError(f"{name}.{local} is stored as {scale.dtype}, which is not read")
    rows, columns = weight.shape
    static = config.get("activation_scheme") == "static"
    if scale.shape in ((), (1,), (1, 1)) and block is None:
        activations = ActivationScheme(
            bits=8, type="float", granularity="tensor" if static else "token", dynamic=not static
        )
        return Scheme(weights=WeightScheme(bits=8, type="float", per_tensor=True), activations=activations)
    if block is None:
        raise FormatError(
            f"{name}.{local} has {list(scale.shape)} scales, but quantization_config has no weight_block_size"
        )
    weights = WeightScheme(bits=8, type="float", block=block)
    if scale.shape != weights.grid(rows, columns):
        raise FormatError(
            f"{name}.{local} {list(scale.shape)} does not fit a weight {[rows, columns]} in blocks of {list(block)}"
        )
    activations = ActivationScheme(bits=8, type="float", granularity="group", group=block[1])
    return Scheme(weights=weights, activations=activations)


def _checked_block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise FormatError(f"quantization_config.weight_block_size must be two positive numbers, not {block!r}")
    return block[0], block[1]


def _wide(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32; bytes are exponents of two, as some writers store them for want of a dtype."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _unsupported(scheme: Scheme) -> str | None:
    weights, activations = scheme.weights, scheme.activations
    if weights.type != "float" or weights.block is None:
        return f"{scheme.name}: native fp8 files hold FP8 weights with one scale a block; use compressed-tensors"
    if activations is None or activations.granularity != "group" or activations.group != weights.block[1]:
        return (
            f"{scheme.name}: loaders of native fp8 round activations by token in groups of {weights.block[1]}; "
            "set them so, or use compressed-tensors"
        )
    return None
