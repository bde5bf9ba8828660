"""Ranges of weights -> scales and zero points, and rounding with them.

Formulas as compressed-tensors has them. Weights that share one scale are one *cell*: a tensor [R, C, N] holds all cells of
a weight, R x C as Scheme.grid gives it, N numbers each (those beyond a ragged block's edge are zeros: they change no range
and round to nothing).
Shapes: O out_features, I in_features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from narrowgauge.quant.formats.base import QuantizedWeight
from narrowgauge.quant.formats.scheme import FP8_MAX, WeightScheme

Search = Literal["none", "mse"]
"""How a scale is found: from the whole range of its cell, or by the least rounding error over shrunk ranges."""

_SHRINK, _GRID, _NORM, _PATIENCE = 0.2, 100, 2.4, 5
"""llm-compressor's MSE observer: ranges down to 1 - _SHRINK in steps of 1 / _GRID, errors to the power of _NORM, and an end
when _PATIENCE steps running improve no cell."""


class WeightNotFinite(ValueError):
    """A weight that holds NaN or infinity and therefore cannot be rounded."""


@dataclass(frozen=True)
class Scales:
    """Scales [R, C] in the dtype that is stored, finite and > 0, and zero points [R, C] int8 (None when symmetric)."""

    scales: torch.Tensor
    zeros: torch.Tensor | None = None


def find_scales(
    weights: Sequence[torch.Tensor],
    scheme: WeightScheme,
    *,
    search: Search = "none",
    limits: Sequence[torch.Tensor] | None = None,
) -> list[Scales]:
    """The scales of each weight [O, I], in the weight's dtype; with one scale a tensor, all weights get a common one.

    Symmetric int: absmax / ((qmax - qmin) / 2). Float: absmax / 448. Asymmetric: the range, stretched to hold 0, over
    qmax - qmin. `limits` [R, C] for each weight caps the range. A cell of zeros gets the machine epsilon of the dtype.
    Raises WeightNotFinite.
    """
    if any(not bool(torch.isfinite(weight).all()) for weight in weights):
        raise WeightNotFinite("the weight holds NaN or infinity")
    caps: Sequence[torch.Tensor | None] = limits if limits is not None else [None] * len(weights)
    if scheme.per_tensor and len(weights) > 1:
        everything = torch.cat([weight.reshape(1, -1) for weight in weights], dim=1)
        cap = None if limits is None else torch.stack(list(limits)).amax(0)
        return find_scales([everything], scheme, search=search, limits=None if cap is None else [cap]) * len(weights)
    return [_scales_of(weight, scheme, search, limit=cap) for weight, cap in zip(weights, caps, strict=True)]


def encode(weight: torch.Tensor, scheme: WeightScheme, found: Scales) -> QuantizedWeight:
    """codes = clamp(round(w / scale) + zero), halves to even; floats are clamped to +-448 before the cast."""
    cells = _cells(weight, scheme)
    codes = _codes(cells, scheme, found)
    kept = torch.float8_e4m3fn if scheme.type == "float" else torch.int8
    block = None if scheme.block is None else (scheme.block[0], scheme.block[1])
    return QuantizedWeight(
        codes=_uncells(codes.to(kept), scheme, weight.shape), scales=found.scales, zeros=found.zeros, block=block
    )


def nearest_values(weight: torch.Tensor, scheme: WeightScheme, found: Scales) -> torch.Tensor:
    """The values [O, I] fp32 that the codes of `encode` stand for."""
    return _uncells(_values(_cells(weight, scheme), scheme, found), scheme, weight.shape)


def round_to_nearest(
    weight: torch.Tensor,
    scheme: WeightScheme,
    *,
    search: Search = "none",
    limits: torch.Tensor | None = None,
) -> QuantizedWeight:
    """One weight [O, I] rounded to the nearest codes; scales take its dtype. Raises WeightNotFinite."""
    found = find_scales([weight], scheme, search=search, limits=None if limits is None else [limits])
    return encode(weight, scheme, found[0])


def cell_range(weight: torch.Tensor, scheme: WeightScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest number [R, C] fp32 of each cell of weight [O, I], 0 counted in: least <= 0 <= largest."""
    cells = _cells(weight, scheme)
    return cells.amin(-1).clamp(max=0), cells.amax(-1).clamp(min=0)


def cell_width(scheme: WeightScheme, columns: int) -> int:
    """How many neighbouring columns of a row of `columns` share a scale."""
    if scheme.block is not None:
        return scheme.block[1]
    return scheme.group or columns


def range_scales(
    low: torch.Tensor,
    high: torch.Tensor,
    scheme: WeightScheme,
    *,
    dtype: torch.dtype,
    limit: torch.Tensor | None = None,
) -> Scales:
    """Scales in `dtype` for cells that span low <= 0 <= high [R, C], both capped at +-`limit`; see find_scales."""
    if limit is not None:
        low, high = torch.maximum(low, -limit.float()), torch.minimum(high, limit.float())
    if scheme.type == "float":
        scales = torch.maximum(-low, high) / FP8_MAX
    elif scheme.symmetric:
        scales = torch.maximum(-low, high) / ((scheme.qmax - scheme.qmin) / 2)
    else:
        steps = scheme.qmax - scheme.qmin
        scales = high / steps - low / steps
    # Codes are chosen with the scale as it is stored, so it is rounded to its dtype first.
    scales = scales.to(dtype)
    scales = torch.where(scales > 0, scales, torch.finfo(dtype).eps)
    if scheme.symmetric:
        return Scales(scales)
    zeros = torch.round(scheme.qmin - low / scales.float()).clamp(scheme.qmin, scheme.qmax)
    return Scales(scales, zeros.to(torch.int8))


def _scales_of(weight: torch.Tensor, scheme: WeightScheme, search: Search, *, limit: torch.Tensor | None) -> Scales:
    low, high = cell_range(weight, scheme)
    if search == "none":
        return range_scales(low, high, scheme, dtype=weight.dtype, limit=limit)
    if limit is not None:
        low, high = torch.maximum(low, -limit.float()), torch.minimum(high, limit.float())
    return _searched(_cells(weight, scheme), low, high, scheme=scheme, dtype=weight.dtype)


def _searched(
    cells: torch.Tensor, low: torch.Tensor, high: torch.Tensor, *, scheme: WeightScheme, dtype: torch.dtype
) -> Scales:
    """Of the ranges shrunk step by step the one with the least sum of |w - q| ** _NORM, for each cell."""
    best = range_scales(low, high, scheme, dtype=dtype)
    least = _errors(cells, scheme, best)
    stale = 0
    for step in range(1, round(_SHRINK * _GRID)):
        shrink = 1 - step / _GRID
        tried = range_scales(low * shrink, high * shrink, scheme, dtype=dtype)
        errors = _errors(cells, scheme, tried)
        better = errors < least
        stale = 0 if bool(better.any()) else stale + 1
        if stale == _PATIENCE:
            break
        least = torch.where(better, errors, least)
        zeros = None
        if best.zeros is not None and tried.zeros is not None:
            zeros = torch.where(better, tried.zeros, best.zeros)
        best = Scales(torch.where(better, tried.scales, best.scales), zeros)
    return best


def _errors(cells: torch.Tensor, scheme: WeightScheme, found: Scales) -> torch.Tensor:
    """Sum of |w - q| ** _NORM [R, C], a few rows at a time so that what is in between stays in the cache."""
    parts = []
    for part, own in _by_rows(cells, found):
        difference = _values(part, scheme, own).sub_(part).abs_()
        parts.append(difference.pow_(_NORM).sum(-1))
    return torch.cat(parts)


def _by_rows(cells: torch.Tensor, found: Scales) -> Iterator[tuple[torch.Tensor, Scales]]:
    elements = 1 << (16 if cells.device.type == "cpu" else 26)
    rows = max(1, elements // max(1, cells[0].numel()))
    for start in range(0, len(cells), rows):
        own = slice(start, start + rows)
        yield cells[own], Scales(found.scales[own], None if found.zeros is None else found.zeros[own])


def _codes(cells: torch.Tensor, scheme: WeightScheme, found: Scales) -> torch.Tensor:
    """Codes [R, C, N]: whole numbers as fp32, or float8."""
    codes = cells / found.scales.float().unsqueeze(-1)
    if scheme.type == "float":
        return codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    codes.round_()
    if found.zeros is not None:
        codes += found.zeros.float().unsqueeze(-1)
    return codes.clamp_(scheme.qmin, scheme.qmax)


def _values(cells: torch.Tensor, scheme: WeightScheme, found: Scales) -> torch.Tensor:
    codes = _codes(cells, scheme, found).float()
    if found.zeros is not None:
        codes -= found.zeros.float().unsqueeze(-1)
    return codes.mul_(found.scales.float().unsqueeze(-1))


def _cells(weight: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Weight [O, I] -> cells [R, C, N] fp32."""
    rows, columns = weight.shape
    values = weight.float()
    if scheme.block is None:
        return values.reshape(*scheme.grid(rows, columns), -1)
    high, wide = scheme.grid(rows, columns)
    tall, broad = scheme.block
    padded = functional.pad(values, (0, wide * broad - columns, 0, high * tall - rows))
    return padded.view(high, tall, wide, broad).transpose(1, 2).reshape(high, wide, -1)


def _uncells(cells: torch.Tensor, scheme: WeightScheme, shape: torch.Size) -> torch.Tensor:
    """The inverse of _cells, in the dtype of `cells`."""
    if scheme.block is None:
        return cells.view(shape)
    high, wide, _ = cells.shape
    tall, broad = scheme.block
    whole = cells.view(high, wide, tall, broad).transpose(1, 2).reshape(high * tall, wide * broad)
    return whole[: shape[0], : shape[1]].contiguous()
