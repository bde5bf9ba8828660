"""What a Scheme does to activations and to stored keys and values: rounded to 8 bits and back, in eager torch.

This is the definition that every kernel is compared with. Codes are rounded half to even; scales are kept in float32.
Shapes: T tokens (any leading dimensions), I in_features, G kv heads, D head size.
"""

import torch

from narrowgauge.quant.formats.scheme import FP8_MAX, ActivationScheme, KVCacheScheme

_SMALLEST = torch.finfo(torch.float32).tiny
"""Scale of a token of zeros: never zero, so that nothing is divided by it."""


def activation_scales(x: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """The dynamic scales of x [..., I], fp32: [..., 1] a token, [..., I / group, 1] a group, [1] a tensor.

    A last group that `group` does not divide is refused by the plan, so it is an assertion here.
    """
    magnitude = x.float().abs()
    if scheme.granularity == "tensor":
        absmax = magnitude.amax().view(1)
    elif scheme.group is not None:
        assert x.shape[-1] % scheme.group == 0
        absmax = _grouped(magnitude, scheme.group).amax(-1, keepdim=True)
    else:
        absmax = magnitude.amax(-1, keepdim=True)
    return (absmax / (FP8_MAX if scheme.type == "float" else 127.5)).clamp(min=_SMALLEST)


def round_activations(
    x: torch.Tensor, scheme: ActivationScheme, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., I] as its quantized form stands for it, in x's dtype. `input_scale` [1] only where the scheme is static."""
    assert scheme.dynamic == (input_scale is None)
    scales = activation_scales(x, scheme) if input_scale is None else input_scale.float()
    values = x.float() if scheme.group is None else _grouped(x.float(), scheme.group)
    rounded = _round(values, scales, scheme.type)
    return (rounded if scheme.group is None else rounded.flatten(-2)).to(x.dtype)


def kv_scales(absmax: torch.Tensor, scheme: KVCacheScheme) -> torch.Tensor:
    """Scales fp32 of what was seen: absmax [G] by kv head -> [1], or [G] with one for each head."""
    seen = absmax.float().amax().view(1) if scheme.granularity == "tensor" else absmax.float()
    return seen / (FP8_MAX if scheme.type == "float" else 127.5)


def round_kv(x: torch.Tensor, scheme: KVCacheScheme, scale: torch.Tensor) -> torch.Tensor:
    """Keys or values [..., G, T, D] as the cache gives them back, in x's dtype; scale [1] or [G]."""
    shaped = scale.float().view(-1, 1, 1) if scheme.granularity == "head" else scale.float()
    return _round(x.float(), shaped, scheme.type).to(x.dtype)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, group)


def _round(x: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "float":
        codes = (x / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    else:
        codes = (x / scales).round_().clamp_(-128, 127)
    return codes.mul_(scales)
