"""AWQ: scales up the weights of salient input channels before rounding, and narrows ranges where that loses less.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (MLSys 2024), with
the scales that weigh activations against weights ("duo") as AutoAWQ has them. The published search runs the block for
every candidate; here the lost output of the Linears themselves decides, which needs no forward pass: for H = XᵀX,
‖X(W - Q)ᵀ‖² = tr((W - Q) H (W - Q)ᵀ).
Shapes: O out_features, I in_features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.base import dequantize_weight, spread_blocks
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, Rounder, Site, Smoothing, scaled_inputs, unusable
from narrowgauge.quant.methods.ranges import output_range
from narrowgauge.quant.observers import cell_range, find_scales, nearest_values

_SMALLEST, _LARGEST = 1e-4, 1e4
"""Bounds of s, as AutoAWQ has the lower one."""
_SEARCHED_ROWS = 256
"""Rows that the search looks at; its winner is then compared with no scales at all on every row."""
_ROUNDED_ROWS = 1024
"""Rows that are rounded as they will be, to see what becomes of the winner."""


@dataclass(frozen=True, kw_only=True)
class AWQ:
    """`{name: awq, grid: 20, clip: true, sites: [norm, linear]}` in a recipe.

    grid: ratios tried, half of them on the activations' size alone and half weighed against the weights' ("duo"); no
    scales at all are always a candidate. clip: also search the range of each scale. sites: "norm" moves scale into norms
    before q, k, v and gate, up; "linear" into v before o and up before down.
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

    def smooth(
        self,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        inputs: InputStatistics,
        *,
        rounder: Rounder | None = None,
    ) -> Smoothing:
        """Scales [I] for weights [O, I], refused with a note where samples held out lose more by them.

        The search rounds to nearest. With a `rounder`, what it makes of the best scales, of milder ones and of none, ranges
        narrowed as they will be, decides: a rounder that moves errors between columns needs less of AWQ, or nothing.
        """
        reason = unusable(inputs)
        if reason is None and not all(bool(torch.isfinite(weight).all()) for weight in weights):
            reason = "the weights hold NaN or infinity"
        if reason is not None or inputs.hessian is None:
            return Smoothing(scales=None, note=reason)
        sample = _some_rows(weights, scheme, _SEARCHED_ROWS)
        least, best = _lost(sample, scheme, None, hessian=inputs.hessian), None
        for scales in _candidates(inputs.absmean.float(), _relative_size(weights, scheme), self.grid):
            lost = _lost(sample, scheme, scales, hessian=inputs.hessian)
            if lost < least:
                least, best = lost, scales
        if best is None or not _helps(weights, scheme, best, hessian=inputs.hessian):
            return Smoothing(scales=None, note="no scales lose less than none")
        heldout = _usable(inputs.heldout)
        if heldout is not None and not _helps(weights, scheme, best, hessian=heldout):
            return Smoothing(scales=None, note="the best scales lose more than none on samples held out")
        if rounder is not None:
            sample = _some_rows(weights, scheme, _ROUNDED_ROWS)
            judge = inputs.hessian if heldout is None else heldout
            least = self._lost_by(rounder, sample, scheme, scales=torch.ones_like(best), inputs=inputs, hessian=judge)
            tried, best = (best, best.sqrt()), None
            for scales in tried:
                lost = self._lost_by(rounder, sample, scheme, scales=scales, inputs=inputs, hessian=judge)
                if lost < least:
                    least, best = lost, scales
            if best is None:
                return Smoothing(scales=None, note=f"{rounder.name} loses less without scales on samples held out")
        return Smoothing(scales=best)

    def _lost_by(
        self,
        rounder: Rounder,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        *,
        scales: torch.Tensor,
        inputs: InputStatistics,
        hessian: torch.Tensor,
    ) -> float:
        """‖X(W - Q)ᵀ‖² by `hessian` over all weights, where Q is what `rounder` makes of W * s, over s."""
        scaled, inputs = [weight * scales for weight in weights], scaled_inputs(inputs, scales)
        limits = self.limits(scaled, scheme, inputs)
        total = 0.0
        for weight, rounded in zip(weights, rounder.round(scaled, scheme, inputs, limits=limits), strict=True):
            total += _output_loss(weight - dequantize_weight(rounded.weight, torch.float32) / scales, hessian)
        return total

    def limits(
        self, weights: Sequence[torch.Tensor], scheme: WeightScheme, inputs: InputStatistics
    ) -> list[torch.Tensor] | None:
        """For each cell the range that loses least, where samples held out agree that it loses less than the whole."""
        if not self.clip or scheme.per_tensor or unusable(inputs) is not None:
            return None
        assert inputs.hessian is not None
        heldout = _usable(inputs.heldout)
        return [output_range(weight, scheme, inputs.hessian, heldout=heldout) for weight in weights]


def _some_rows(weights: Sequence[torch.Tensor], scheme: WeightScheme, count: int) -> Sequence[torch.Tensor]:
    """Every n-th row of each weight, about `count` in all, where rows do not share scales."""
    step = max(1, sum(map(len, weights)) // count)
    if scheme.granularity in ("tensor", "block"):
        return weights
    return [weight[::step] for weight in weights]


def _relative_size(weights: Sequence[torch.Tensor], scheme: WeightScheme) -> torch.Tensor:
    """Mean over all rows of |w| / the largest |w| that shares its scale, [I]."""
    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight in weights:
        rows, columns = weight.shape
        low, high = cell_range(weight, scheme)
        ranges = torch.maximum(high, -low) + 1e-6
        if scheme.block is not None:
            ranges = spread_blocks(ranges, (scheme.block[0], scheme.block[1]), (rows, columns))
        else:
            ranges = ranges.expand(rows, -1).repeat_interleave(columns // ranges.shape[1], 1)
        total += (weight.float().abs() / ranges).sum(0)
    return total / sum(map(len, weights))


def _candidates(salience: torch.Tensor, size: torch.Tensor, grid: int) -> Iterator[torch.Tensor]:
    """mean|x| ** r for r in (0, 1], and mean|x| ** r / size ** (1 - r) for r in [0, 1], `grid` in all.

    Each is brought to a geometric middle of 1. A channel that carries nothing gets 1.
    """
    alive = (salience > 0) & (size > 0) & torch.isfinite(salience)
    if not bool(alive.any()):
        return
    duo = grid // 2
    for step in range(grid):
        if step < duo:
            ratio = step / max(1, duo - 1)
            scales = salience**ratio / (size ** (1 - ratio) + 1e-4)
        else:
            scales = salience ** ((step - duo + 1) / (grid - duo))
        scales = scales.clamp(min=_SMALLEST)
        kept = scales[alive]
        scales = (scales / (kept.max() * kept.min()).sqrt()).clamp(_SMALLEST, _LARGEST)
        yield torch.where(alive & torch.isfinite(scales), scales, 1.0)


def _helps(
    weights: Sequence[torch.Tensor], scheme: WeightScheme, scales: torch.Tensor, *, hessian: torch.Tensor
) -> bool:
    """Whether less is lost with `scales` than with none, over all rows."""
    return _lost(weights, scheme, scales, hessian=hessian) < _lost(weights, scheme, None, hessian=hessian)


def _lost(
    weights: Sequence[torch.Tensor], scheme: WeightScheme, scales: torch.Tensor | None, *, hessian: torch.Tensor
) -> float:
    """‖X(W - Q)ᵀ‖² over all weights, where Q = round(W * s) / s by the whole range."""
    scaled = [weight.float() if scales is None else weight.float() * scales for weight in weights]
    total = 0.0
    for weight, own in zip(scaled, find_scales(scaled, scheme), strict=True):
        difference = nearest_values(weight, scheme, own).sub_(weight)
        if scales is not None:
            difference /= scales
        total += _output_loss(difference, hessian)
    return total


def _output_loss(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(D H Dᵀ) for D [O, I]."""
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))


def _usable(hessian: torch.Tensor | None) -> torch.Tensor | None:
    """`hessian` where it says something."""
    if hessian is None or not bool(torch.isfinite(hessian).all() & (hessian.diagonal() > 0).any()):
        return None
    return hessian
