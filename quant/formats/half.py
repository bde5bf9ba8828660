"""Scales in float16, where GPTQ and AWQ files keep them: what survives the change of dtype, and what is done to the rest."""

import torch

from narrowgauge.quant.formats.base import FormatError

_SMALLEST = 2.0**-24
"""The smallest float16 above zero: a scale must not vanish, or the reader divides by it."""


def to_half(scales: torch.Tensor) -> torch.Tensor:
    """The nearest float16 scales, none of them zero. Raises FormatError for a scale beyond float16's 65504."""
    if float(scales.abs().max()) > torch.finfo(torch.float16).max:
        raise FormatError(f"a scale of {float(scales.abs().max()):g} does not fit float16, which ends at 65504")
    half = scales.to(torch.float16)
    return torch.where((half == 0) & (scales > 0), torch.full_like(half, _SMALLEST), half)


def half_refusal(scales: torch.Tensor) -> str | None:
    """Why scales cannot be stored in float16 bit for bit; None if they can."""
    changed = scales.to(torch.float16).to(torch.float64) != scales.to(torch.float64)
    if not bool(changed.any()):
        return None
    example = float(scales.double()[changed][0])
    return f"the {str(scales.dtype).removeprefix('torch.')} scale {example:.9g} has no equal in float16"
