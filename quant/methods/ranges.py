"""The range that a scale should reach, by what the Linear's output loses instead of what its weights lose.

For one row d of W - Q, ‖X d‖² = d H dᵀ with H = XᵀX. Cells of a row are taken one by one, so each is judged by its own
block on the diagonal of H. Source: the clip search of Lin et al., "AWQ" (MLSys 2024), which runs sampled tokens through the
layer where this needs none.
Shapes: O out_features, I in_features, cells [R, C] as observers.py has them, g input columns of a cell.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.observers import cell_range, cell_width, nearest_values, range_scales

_STEPS, _GRID = 10, 20
"""Ranges tried: 1 - k / _GRID for k below _STEPS, so down to a bit more than half, as llm-awq does."""
_WIDEST = 256
"""Columns of a cell beyond which only the diagonal of H counts: its blocks would cost more than the rounding itself."""


def output_range(
    weight: torch.Tensor, scheme: WeightScheme, hessian: torch.Tensor, *, heldout: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest |w| [R, C] fp32 that the scales of weight [O, I] should reach: the range that loses least.

    With `heldout`, an H of other samples, only where these too lose less than by the whole range. With one scale a tensor
    the whole range: a single outlier's worth of clipping says nothing there.
    """
    low, high = cell_range(weight, scheme)
    whole = torch.maximum(high, -low)
    if scheme.per_tensor:
        return whole
    width = cell_width(scheme, weight.shape[1])
    costs = [_Cost(part, width) for part in (hessian, heldout) if part is not None]
    parts = []
    for rows, cells in _by_rows(weight, scheme):
        parts.append(_least(weight[rows], scheme, (low[cells], high[cells], whole[cells]), costs=costs))
    return torch.cat(parts)


def _least(
    weight: torch.Tensor,
    scheme: WeightScheme,
    spans: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    costs: list["_Cost"],
) -> torch.Tensor:
    low, high, whole = spans
    best, least, least_of_whole = whole, whole, whole
    for step in range(_STEPS):
        tried = whole * (1 - step / _GRID)
        found = range_scales(low, high, scheme, dtype=weight.dtype, limit=tried)
        lost = nearest_values(weight, scheme, found).sub_(weight)
        seen, other = (_cells_of(cost(lost), scheme) for cost in (costs[0], costs[-1]))
        if step == 0:
            least, least_of_whole = seen, other
            continue
        better = (seen < least) & (other < least_of_whole)
        best, least = torch.where(better, tried, best), torch.where(better, seen, least)
    return best


class _Cost:
    """d H dᵀ of each row, by runs of `width` columns: the last one may be shorter."""

    def __init__(self, hessian: torch.Tensor, width: int) -> None:
        self._width = width
        self._missing = -len(hessian) % width
        self._diagonal: torch.Tensor | None = None
        if width > _WIDEST:
            self._diagonal = functional.pad(hessian.diagonal(), (0, self._missing))
            return
        padded = functional.pad(hessian, (0, self._missing, 0, self._missing))
        runs = len(padded) // width
        blocks = padded.view(runs, width, runs, width).diagonal(dim1=0, dim2=2)
        self._blocks = blocks.permute(2, 0, 1).contiguous()

    def __call__(self, lost: torch.Tensor) -> torch.Tensor:
        """lost [O, I] -> [O, C]."""
        rows = len(lost)
        padded = functional.pad(lost, (0, self._missing)) if self._missing else lost
        if self._diagonal is not None:
            return (padded.square() * self._diagonal).view(rows, -1, self._width).sum(-1)
        runs = padded.view(rows, -1, self._width).transpose(0, 1)
        return (torch.bmm(runs, self._blocks) * runs).sum(-1).t()


def _cells_of(costs: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Costs of rows [O, C] -> of cells [R, C]."""
    if scheme.block is None:
        return costs
    tall = scheme.block[0]
    padded = functional.pad(costs, (0, 0, 0, -len(costs) % tall))
    return padded.view(-1, tall, costs.shape[1]).sum(1)


def _by_rows(weight: torch.Tensor, scheme: WeightScheme) -> Iterator[tuple[slice, slice]]:
    """Slices of rows and of rows of cells, few enough at a time to stay in the cache."""
    tall = 1 if scheme.block is None else scheme.block[0]
    cells = max(1, (1 << (17 if weight.device.type == "cpu" else 26)) // (weight.shape[1] * tall))
    for start in range(0, -(-len(weight) // tall), cells):
        yield slice(start * tall, (start + cells) * tall), slice(start, start + cells)
