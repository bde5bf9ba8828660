"""AWQ: scales up the weights of salient input channels before rounding, and narrows ranges where that loses less.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (MLSys 2024), with the
scales that weigh activations against weights ("duo") as AutoAWQ has them. The published search runs the block for every
candidate; here the lost output of the Linears themselves decides, which needs no forward pass: for H = XᵀX,
‖X(W - Q)ᵀ‖² = tr((W - Q) H (W - Q)ᵀ).
Shapes: O out_features, I in_features, G groups of g input columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, Site, Smoothing, unusable
from narrowgauge.quant.observers import cell_ranges, find_scales, nearest_values

_SMALLEST, _LARGEST = 1e-4, 1e4
"""Bounds of s, as AutoAWQ has the lower one."""
_CLIP_STEPS, _CLIP_GRID = 10, 20
"""Ranges tried: 1 - k / _CLIP_GRID for k below _CLIP_STEPS, so down to a bit more than half, as llm-awq does."""


@dataclass(frozen=True, kw_only=True)
class AWQ:
    """`{name: awq, grid: 20, clip: true, sites: [norm, linear]}` in a recipe.

    grid: ratios tried between scales by the weights alone (0) and by the activations alone (1); no scales at all are always
    a candidate. clip: also search the range of each group. sites: "norm" moves scale into norms, "linear" into v before o
    and up before down.
    """

    name: Literal["awq"]
    grid: int = 20
    clip: bool = True
    sites: tuple[Site, ...] = ("norm", "linear")

    def __post_init__(self) -> None:
        if self.grid < 2:
            raise ValueError(f"grid: must be at least 2 ratios, not {self.grid}")
        if not self.sites and not self.clip:
            raise ValueError("sites: name at least one of norm, linear, or set clip: true")

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """H to search by, another to check by, and the mean |x| of each channel."""
        return frozenset({"hessian", "heldout", "range"})

    def smooth(self, weights: Sequence[torch.Tensor], scheme: WeightScheme, inputs: InputStatistics) -> Smoothing:
        """Scales [I] for weights [O, I] fp32, refused with a note where samples held out lose more by them."""
        reason = unusable(inputs)
        if reason is not None or inputs.hessian is None:
            return Smoothing(scales=None, note=reason)
        weight = torch.cat([weight.float() for weight in weights])
        if not bool(torch.isfinite(weight).all()):
            return Smoothing(scales=None, note="the weights hold NaN or infinity")
        salience, size = inputs.absmean.float(), _relative_size(weights, scheme)
        least, best = _lost(weights, scheme, None, hessian=inputs.hessian), None
        for step in range(self.grid):
            scales = _candidate(salience, size, step / (self.grid - 1))
            lost = _lost(weights, scheme, scales, hessian=inputs.hessian)
            if lost < least:
                least, best = lost, scales
        if best is None:
            return Smoothing(scales=None, note="no scales lose less than none")
        if (heldout := _usable(inputs.heldout)) is not None:
            plain = _lost(weights, scheme, None, hessian=heldout)
            if not _lost(weights, scheme, best, hessian=heldout) < plain:
                return Smoothing(scales=None, note="the best scales lose more than none on samples held out")
        return Smoothing(scales=best)

    def limits(
        self, weights: Sequence[torch.Tensor], scheme: WeightScheme, inputs: InputStatistics
    ) -> list[torch.Tensor] | None:
        """For each cell the range that loses least, where samples held out agree that it loses less than the whole."""
        if not self.clip or scheme.granularity not in ("channel", "group") or unusable(inputs) is not None:
            return None
        assert inputs.hessian is not None
        group = scheme.group or len(inputs.hessian)
        seen = _diagonal_blocks(inputs.hessian, group)
        unseen = _diagonal_blocks(heldout, group) if (heldout := _usable(inputs.heldout)) is not None else None
        return [_clip(weight.float(), scheme, seen, unseen=unseen) for weight in weights]


def _relative_size(weights: Sequence[torch.Tensor], scheme: WeightScheme) -> torch.Tensor:
    """Mean over all rows of |w| / the largest |w| that shares its scale, [I]."""
    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight in weights:
        values = weight.float().abs()
        rows, columns = values.shape
        ranges = cell_ranges(weight, scheme) + 1e-6
        if scheme.block is not None:
            tall, wide = scheme.block
            ranges = ranges.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        else:
            ranges = ranges.expand(rows, -1).repeat_interleave(columns // ranges.shape[1], 1)
        total += (values / ranges).sum(0)
    return total / sum(len(weight) for weight in weights)


def _candidate(salience: torch.Tensor, size: torch.Tensor, ratio: float) -> torch.Tensor:
    """mean|x| ** r / (size ** (1 - r) + 1e-4), brought to a geometric middle of 1; 1 for channels that carry nothing."""
    alive = (salience > 0) & (size > 0)
    scales = (salience**ratio / (size ** (1 - ratio) + 1e-4)).clamp(min=_SMALLEST)
    kept = scales[alive]
    if not len(kept):
        return torch.ones_like(scales)
    scales = (scales / (kept.max() * kept.min()).sqrt()).clamp(_SMALLEST, _LARGEST)
    return torch.where(alive & torch.isfinite(scales), scales, 1.0)


def _lost(
    weights: Sequence[torch.Tensor], scheme: WeightScheme, scales: torch.Tensor | None, *, hessian: torch.Tensor
) -> float:
    """‖X(W - Q)ᵀ‖² over all weights, where Q = round(W * s) / s."""
    scaled = [weight.float() if scales is None else weight.float() * scales for weight in weights]
    total = torch.zeros((), dtype=torch.float64, device=hessian.device)
    for weight, own in zip(scaled, find_scales(scaled, scheme), strict=True):
        difference = nearest_values(weight, scheme, own).sub_(weight)
        if scales is not None:
            difference /= scales
        total += ((difference @ hessian) * difference).sum(dtype=torch.float64)
    return float(total)


def _usable(hessian: torch.Tensor | None) -> torch.Tensor | None:
    """`hessian` where it says something."""
    if hessian is None or not bool(torch.isfinite(hessian).all() & (hessian.diagonal() > 0).any()):
        return None
    return hessian


def _diagonal_blocks(hessian: torch.Tensor, group: int) -> torch.Tensor:
    """The blocks [G, g, g] on the diagonal of H [I, I]."""
    groups = len(hessian) // group
    return hessian.view(groups, group, groups, group).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _clip(
    weight: torch.Tensor, scheme: WeightScheme, seen: torch.Tensor, *, unseen: torch.Tensor | None
) -> torch.Tensor:
    """The range [O, G] of each cell of weight [O, I]; seen and unseen [G, g, g] weigh its errors."""
    whole = cell_ranges(weight, scheme)
    best, least, checked = whole, None, None
    for step in range(_CLIP_STEPS):
        tried = whole * (1 - step / _CLIP_GRID)
        found = find_scales([weight], scheme, limits=[tried])[0]
        difference = nearest_values(weight, scheme, found).sub_(weight)
        errors = (difference.view(len(weight), len(seen), -1)).transpose(0, 1)
        lost = ((errors @ seen) * errors).sum(-1).t()
        other = lost if unseen is None else ((errors @ unseen) * errors).sum(-1).t()
        if least is None or checked is None:
            least, checked = lost, other
            continue
        better = (lost < least) & (other < checked)
        best = torch.where(better, tried, best)
        least = torch.where(better, lost, least)
    return best
