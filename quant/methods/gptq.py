"""GPTQ: rounds column by column and moves each rounding error into the columns not yet rounded.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (ICLR 2023),
with scales kept in the original groups, so that the stored layout is plain. Solved as Babai's nearest plane (Chen et al.,
"The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm", 2025), which gives the same codes without the
inverse of H: with H = R Rᵀ, R upper triangular, what is lost is ‖(W - Q) R‖², and its j-th column is least where column j
is rounded from w_j + Σ_{i<j} (w_i - q_i) R_ij / R_jj.
Shapes: O out_features (of all stacked weights), I in_features, C cells of a row that have each a scale. Work runs on
transposed weights [I, O], where a column of the weight is one contiguous row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.base import QuantizedWeight
from narrowgauge.quant.formats.scheme import FP8_MAX, WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, RoundedWeight, unusable
from narrowgauge.quant.methods.ranges import output_range
from narrowgauge.quant.methods.rtn import RTN
from narrowgauge.quant.observers import Scales, cell_width, find_scales

_LADDER = ((1.0, torch.float32), (1.0, torch.float64), (10.0, torch.float64), (100.0, torch.float64))
"""(factor on the damping, dtype of the factorization): tried in turn until H is positive definite."""
_TILE = 16
"""Columns that correct one another one at a time; beyond them errors are moved by matrix products."""


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """`{name: gptq, block: 128, damping: 0.01, order: static, search: output}` in a recipe.

    block: columns between two updates of the whole rest. damping: share of the mean diagonal added to the diagonal of H.
    order: "static" rounds columns by falling diagonal of H; "group" whole groups by their largest, and so within each;
    "none" from left to right. search: "output" takes for each scale the range by which the output loses least (see
    ranges.py), "mse" the one by which the weights do, "none" the whole range.
    """

    name: Literal["gptq"]
    block: int = 128
    damping: float = 0.01
    order: Literal["static", "group", "none"] = "static"
    search: Literal["none", "mse", "output"] = "output"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block: must be at least 1 column, not {self.block}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping: must be above 0 and at most 1, not {self.damping}")

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """H comes from the inputs."""
        return frozenset({"hessian"})

    def refusal(self, scheme: WeightScheme) -> str | None:
        """Every scheme will do."""
        return None

    def round(
        self,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        inputs: InputStatistics | None,
        *,
        limits: Sequence[torch.Tensor] | None = None,
    ) -> list[RoundedWeight]:
        """Rounds weights [O, I] stacked along O, in one pass over the columns.

        Falls back to round to nearest, with the reason, where no token reached the layers or where H cannot be
        factorized even with the strongest damping. Raises WeightNotFinite.
        """
        found = self._solution(scheme, inputs)
        if isinstance(found, str):
            nearest = RTN(name="rtn", search="none" if self.search == "none" else "mse")
            rounded = nearest.round(weights, scheme, None, limits=limits)
            return [RoundedWeight(weight=one.weight, fallback=found) for one in rounded]
        if self.search == "output" and limits is None:
            limits = [output_range(weight, scheme, found.hessian) for weight in weights]
        scales = find_scales(weights, scheme, search="mse" if self.search == "mse" else "none", limits=limits)
        columns = _Columns.of(weights, scheme, scales, order=found.order)
        weight_t = torch.cat([weight.float() for weight in weights]).t()[found.order]
        codes = torch.empty(weight_t.shape, dtype=columns.dtype, device=weight_t.device)
        codes[found.order] = columns.round(weight_t, found.factor, self.block)
        parts = torch.split(codes.t(), [len(weight) for weight in weights])
        block = None if scheme.block is None else (scheme.block[0], scheme.block[1])
        return [
            RoundedWeight(
                weight=QuantizedWeight(codes=part.contiguous(), scales=own.scales, zeros=own.zeros, block=block),
                fallback=found.note,
            )
            for part, own in zip(parts, scales, strict=True)
        ]

    def _solution(self, scheme: WeightScheme, inputs: InputStatistics | None) -> "_Solution | str":
        """What all weights of these inputs have in common, or why there is no such thing."""
        if reason := unusable(inputs):
            return reason
        assert inputs is not None
        assert inputs.hessian is not None
        order = self._order(inputs.hessian, cell_width(scheme, len(inputs.hessian)))
        return _factorize(inputs.hessian, order, self.damping)

    def _order(self, hessian: torch.Tensor, width: int) -> torch.Tensor:
        """[I]: the columns in the order they are rounded in."""
        diagonal = hessian.diagonal()
        places = torch.arange(len(diagonal), device=hessian.device)
        if self.order == "none":
            return places
        falling = torch.argsort(diagonal, descending=True, stable=True)
        if self.order == "static":
            return falling
        group = falling // width
        first = torch.full_like(places, len(diagonal)).scatter_reduce_(0, group, places, "amin")
        return falling[torch.argsort(first[group], stable=True)]


@dataclass(frozen=True, kw_only=True)
class _Solution:
    """order [I]; factor [I, I] fp32: R of H in that order, each column divided by its diagonal; note: what it took."""

    hessian: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The column loop. scales, zeros [C, O] fp32; cells [I]: the cell of each column in rounding order.

    bounds: least and largest of (code - zero), or of the code where zeros are None.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    cells: torch.Tensor
    bounds: tuple[float, float]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, weights: Sequence[torch.Tensor], scheme: WeightScheme, found: Sequence[Scales], *, order: torch.Tensor
    ) -> "_Columns":
        """For stacked weights whose columns are rounded in `order` [I]."""
        rows = [len(weight) for weight in weights]
        scales = torch.cat([_by_row(own.scales, scheme, n) for own, n in zip(found, rows, strict=True)])
        pairs = [(own.zeros, n) for own, n in zip(found, rows, strict=True) if own.zeros is not None]
        zeros = torch.cat([_by_row(own, scheme, n) for own, n in pairs]).float().t().contiguous() if pairs else None
        is_float = scheme.type == "float"
        return cls(
            scales=scales.float().t().contiguous(),
            zeros=zeros,
            cells=order // cell_width(scheme, len(order)),
            bounds=(-FP8_MAX, FP8_MAX) if is_float else (scheme.qmin, scheme.qmax),
            dtype=torch.float8_e4m3fn if is_float else torch.int8,
        )

    def round(self, weight_t: torch.Tensor, factor: torch.Tensor, block: int) -> torch.Tensor:
        """Codes [I, O] of weight_t [I, O] fp32 by factor [I, I], both in rounding order.

        The errors of a tile reach the rest of its block, and those of a block all the rest, in one matrix product.
        """
        columns, rows = weight_t.shape
        moved = weight_t.clone()
        codes = torch.empty((columns, rows), dtype=self.dtype, device=weight_t.device)
        for start in range(0, columns, block):
            stop = min(start + block, columns)
            cells = self.cells[start:stop]
            scales, code = self.scales[cells], torch.empty_like(weight_t[start:stop])
            zeros = None if self.zeros is None else self.zeros[cells]
            errors = torch.zeros_like(code)
            for first in range(0, stop - start, _TILE):
                own, rest = slice(first, first + _TILE), slice(first + _TILE, stop - start)
                self._tile(
                    weight_t[start:stop][own],
                    moved[start:stop][own],
                    code[own],
                    errors=errors[own],
                    scales=scales[own],
                    zeros=None if zeros is None else zeros[own],
                    factor=factor[start:stop, start:stop][own, own],
                )
                moved[start:stop][rest].addmm_(factor[start:stop, start:stop][own, rest].t(), errors[own])
            moved[stop:].addmm_(factor[start:stop, stop:].t(), errors)
            codes[start:stop] = code if zeros is None else code.add_(zeros)
        return codes

    def _tile(
        self,
        weight_t: torch.Tensor,
        moved: torch.Tensor,
        codes: torch.Tensor,
        *,
        errors: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        factor: torch.Tensor,
    ) -> None:
        """Fills codes (less the zeros) and errors of a tile; all are [columns, O], factor is [columns, columns].

        Each column collects the errors of its forerunners; those of columns still to come are zero. Views are made for
        all columns at once: on a narrow layer, making them one by one costs as much as the arithmetic.
        """
        lowest, highest = self.bounds
        lows = highs = None
        if zeros is not None:
            lows, highs = (lowest - zeros).unbind(), (highest - zeros).unbind()
        stacked, shares, steps = errors.t(), factor.t().contiguous().unbind(), scales.unbind()
        columns = zip(weight_t.unbind(), moved.unbind(), codes.unbind(), errors.unbind(), strict=True)
        for at, (weight, current, code, error) in enumerate(columns):
            if at:
                current.addmv_(stacked, shares[at])
            torch.div(current, steps[at], out=code)
            if self.dtype == torch.float8_e4m3fn:
                code.copy_(code.clamp_(lowest, highest).to(self.dtype))
            elif lows is None or highs is None:
                code.round_().clamp_(lowest, highest)
            else:
                torch.clamp(code.round_(), lows[at], highs[at], out=code)
            torch.addcmul(weight, code, steps[at], value=-1, out=error)


def _by_row(values: torch.Tensor, scheme: WeightScheme, rows: int) -> torch.Tensor:
    """Scales or zeros [R, C] -> [O, C], one row of them for each row of the weight."""
    if scheme.block is not None:
        return values.repeat_interleave(scheme.block[0], 0)[:rows]
    return values.expand(rows, -1)


def _factorize(hessian: torch.Tensor, order: torch.Tensor, damping: float) -> _Solution | str:
    """R of the damped H with its columns in `order`; why there is none where every damping fails.

    A column that no token excited has a zero row and column in H; its diagonal is set to the mean, which makes it
    independent of the others: it takes no errors and is rounded to nearest.
    """
    backwards = order.flip(0)
    reordered = hessian.index_select(0, backwards).index_select(1, backwards)
    mean = float(reordered.diagonal().double().mean())
    if not 0 < mean < float("inf"):
        return "the Hessian is not positive definite under any damping"
    for strength, dtype in _LADDER:
        damped = reordered.to(dtype, copy=True)
        own = damped.diagonal()
        own[own <= 0] = mean
        own += strength * damping * mean
        # The lower factor of H with its order reversed is the upper one of H, reversed.
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        factor = lower.flip(0, 1)
        factor = (factor / factor.diagonal()).float()
        if bool(torch.isfinite(factor).all()):
            note = None if strength == 1 else f"H took {strength:g} times the damping to factorize"
            return _Solution(hessian=hessian, order=order, factor=factor, note=note)
    return "the Hessian is not positive definite under any damping"
