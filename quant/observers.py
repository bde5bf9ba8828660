"""Ranges of weights -> scales and zero points, and rounding with them.

Shapes: O out_features, I in_features, G groups of input columns. Formulas as compressed-tensors has them.
"""

import torch

from narrowgauge.quant.formats.base import QuantizedWeight
from narrowgauge.quant.formats.scheme import WeightScheme


class WeightNotFinite(ValueError):
    """A weight that holds NaN or infinity and therefore cannot be rounded."""


def minmax_scales(
    weight: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales [O, G] in `dtype` and zero points [O, G] int8 (None when symmetric) from the range of each group.

    Symmetric: absmax / ((qmax - qmin) / 2). Asymmetric: the range, stretched to hold 0, over qmax - qmin. A group of
    zeros gets the machine epsilon of `dtype`: never zero, so that nothing is divided by it. Raises WeightNotFinite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise WeightNotFinite("the weight holds NaN or infinity")
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // (scheme.group or columns), -1)
    steps = scheme.qmax - scheme.qmin
    if scheme.symmetric:
        scales = grouped.abs().amax(-1) / (steps / 2)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = (high - low) / steps
    # Codes are chosen with the scale as it is stored, so it is rounded to its dtype first.
    scales = scales.to(dtype)
    scales = torch.where(scales > 0, scales, torch.finfo(dtype).eps)
    if scheme.symmetric:
        return scales, None
    zeros = torch.round(scheme.qmin - low / scales.float()).clamp(scheme.qmin, scheme.qmax)
    return scales, zeros.to(torch.int8)


def round_to_nearest(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """codes = clamp(round(w / scale) + zero), halves to even; `weight` [O, I] in the dtype the scales are stored in."""
    scales, zeros = minmax_scales(weight, scheme, weight.dtype)
    rows, columns = weight.shape
    codes = weight.float().view(rows, scales.shape[1], -1) / scales.float().unsqueeze(-1)
    codes.round_()
    if zeros is not None:
        codes += zeros.float().unsqueeze(-1)
    codes.clamp_(scheme.qmin, scheme.qmax)
    return QuantizedWeight(codes=codes.to(torch.int8).view(rows, columns), scales=scales, zeros=zeros)
