"""Scales of a quantized KV cache: where writers have put them over the years, and what a scale must be.

Written as compressed-tensors has it: `<attention>.k_scale` and `.v_scale`, [1], or [kv heads, 1, 1] with one a head.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from narrowgauge.quant.formats.base import FormatError, KVScales, ReadTensor, is_positive
from narrowgauge.quant.formats.scheme import KVCacheScheme

_SPELLINGS = (
    ("k_scale", "v_scale"),  # compressed-tensors, vLLM
    ("k_proj.output_scale", "v_proj.output_scale"),  # llm-compressor before 0.4
    ("k_proj.k_scale", "v_proj.v_scale"),  # AutoFP8, ModelOpt
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("kv_scale", "kv_scale"),  # AutoFP8: one for both
)


def kv_tensors(attention: str, scales: KVScales) -> dict[str, torch.Tensor]:
    """The tensors to store, by full name, in the scales' dtype. Raises FormatError for one not finite and above zero."""
    tensors = {}
    for local, scale in (("k_scale", scales.key), ("v_scale", scales.value)):
        name = f"{attention}.{local}"
        _check(name, scale)
        stored = scale.reshape(-1) if scale.numel() == 1 else scale.reshape(-1, 1, 1)
        tensors[name] = stored.contiguous()
    return tensors


def find_kv_scales(attention: str, has: Callable[[str], bool]) -> tuple[str, str] | None:
    """Full names of the key's and the value's scale of one attention layer, or None. Raises FormatError for half a pair."""
    for key, value in _SPELLINGS:
        names = f"{attention}.{key}", f"{attention}.{value}"
        found = [name for name in names if has(name)]
        if len(found) == 1:
            missing = next(name for name in names if name not in found)
            raise FormatError(f"{found[0]} is stored but {missing} is not: the KV scales are incomplete")
        if found:
            return names
    return None


def read_kv_scales(names: tuple[str, str], read: ReadTensor) -> KVScales:
    """The scales under those names, [1] or [kv heads] each. Raises FormatError for one not finite and above zero."""
    key, value = (read(name) for name in names)
    for name, scale in zip(names, (key, value), strict=True):
        _check(name, scale)
    return KVScales(key=key.reshape(-1), value=value.reshape(-1))


def read_kv_scheme(value: Any) -> KVCacheScheme | None:
    """`kv_cache_scheme` of config.json, or None. Raises FormatError for what cannot be read.

    AutoFP8 wrote the word "static" for FP8 with one scale a tensor.
    """
    if value is None:
        return None
    if value == "static":
        return KVCacheScheme(bits=8, type="float")
    key = "quantization_config.kv_cache_scheme"
    if not isinstance(value, Mapping):
        raise FormatError(f"{key} cannot be read: it is {value!r}")
    if value.get("dynamic") or not value.get("symmetric", True) or value.get("strategy") not in ("tensor", "attn_head"):
        raise FormatError(
            f"{key}: only static symmetric scales, one a tensor or one a head, are read, not {dict(value)}"
        )
    try:
        return KVCacheScheme(
            bits=int(value.get("num_bits", 0)),
            type="float" if value.get("type") == "float" else "int",
            granularity="head" if value["strategy"] == "attn_head" else "tensor",
        )
    except ValueError as error:
        raise FormatError(f"{key} cannot be read: {error}") from None


def kv_arguments(scheme: KVCacheScheme | None) -> dict[str, Any] | None:
    """The inverse of `read_kv_scheme`, in the keys that compressed-tensors accepts."""
    if scheme is None:
        return None
    strategy = "attn_head" if scheme.granularity == "head" else "tensor"
    return {"dynamic": False, "num_bits": scheme.bits, "strategy": strategy, "symmetric": True, "type": scheme.type}


def attentions_with_scales(names: Iterable[str]) -> tuple[str, ...]:
    """Names of the attention modules that have KV scales among these stored tensors, sorted."""
    found = set()
    for name in names:
        for local in {local for pair in _SPELLINGS for local in pair}:
            if name.endswith(f".{local}"):
                found.add(name.removesuffix(f".{local}"))
    # "a.k_proj.k_scale" also ends in ".k_scale": the projections are not the attention.
    return tuple(
        sorted(name for name in found if name.rpartition(".")[2] not in ("k_proj", "v_proj", "qkv_proj", "attn"))
    )


def _check(name: str, scale: torch.Tensor) -> None:
    if not is_positive(scale):
        raise FormatError(
            f"{name} is not finite and above zero: servers take such a scale for 1.0 or answer garbage; "
            "calibrate the KV cache again"
        )
