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
from narrowgauge.quant.methods.rtn import RTN
from narrowgauge.quant.observers import Scales, Search, find_scales

_LADDER = ((1.0, torch.float32), (1.0, torch.float64), (10.0, torch.float64), (100.0, torch.float64))
"""(factor on the damping, dtype of the factorization): tried in turn until H is positive definite."""
_TILE = 16
"""Columns that correct one another one at a time; beyond them errors are moved by matrix products."""


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """`{name: gptq, block: 128, damping: 0.01, order: static, search: none}` in a recipe.

    block: columns between two updates of the whole rest. damping: share of the mean diagonal added to the diagonal of H.
    order: "static" rounds columns by falling diagonal of H; "group" whole groups by their largest, and so within each;
    "none" from left to right. search: "mse" takes for each scale the range with the least rounding error.
    """

    name: Literal["gptq"]
    block: int = 128
    damping: float = 0.01
    order: Literal["static", "group", "none"] = "static"
    search: Search = "none"

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
        reason, factor, order = unusable(inputs), None, torch.empty(0)
        if reason is None:
            assert inputs is not None
            assert inputs.hessian is not None
            order = self._order(inputs.hessian, _width(scheme, len(inputs.hessian)))
            factor = _factorize(inputs.hessian[order][:, order], self.damping)
            reason = None if factor is not None else "the Hessian is not positive definite under any damping"
        if factor is None:
            nearest = RTN(name="rtn", search=self.search).round(weights, scheme, None, limits=limits)
            return [RoundedWeight(weight=one.weight, fallback=reason) for one in nearest]
        found = find_scales(weights, scheme, search=self.search, limits=limits)
        columns = _Columns.of(weights, scheme, found, order=order)
        rounded = columns.round(torch.cat([weight.float() for weight in weights]).t()[order], factor, self.block)
        codes = torch.empty_like(rounded)
        codes[order] = rounded
        parts = torch.split(codes.t(), [len(weight) for weight in weights])
        block = None if scheme.block is None else (scheme.block[0], scheme.block[1])
        return [
            RoundedWeight(
                weight=QuantizedWeight(codes=part.contiguous(), scales=own.scales, zeros=own.zeros, block=block)
            )
            for part, own in zip(parts, found, strict=True)
        ]

    def _order(self, hessian: torch.Tensor, width: int) -> torch.Tensor:
        diagonal = hessian.diagonal()
        if self.order == "none":
            return torch.arange(len(diagonal), device=hessian.device)
        falling = torch.argsort(diagonal, descending=True, stable=True)
        if self.order == "static":
            return falling
        group = falling // width
        first = torch.full((int(group.max()) + 1,), len(diagonal), device=hessian.device)
        place = torch.arange(len(diagonal), device=hessian.device)
        first.scatter_reduce_(0, group, place, "amin")
        return falling[torch.argsort(first[group], stable=True)]


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The column loop. scales [C, O] fp32; lowest, highest: the bounds of (code - zero), numbers or [C, O]; zeros [C, O].

    cells[i] is the cell of the i-th column in rounding order.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    cells: list[int]
    bounds: tuple[float, float]
    is_float: bool

    @classmethod
    def of(
        cls, weights: Sequence[torch.Tensor], scheme: WeightScheme, found: Sequence[Scales], *, order: torch.Tensor
    ) -> "_Columns":
        """For stacked weights whose columns are rounded in `order` [I]."""
        rows = [len(weight) for weight in weights]
        scales = torch.cat([_by_row(own.scales, scheme, n) for own, n in zip(found, rows, strict=True)])
        zeros = None
        if not scheme.symmetric:
            pairs = [(own.zeros, n) for own, n in zip(found, rows, strict=True) if own.zeros is not None]
            zeros = torch.cat([_by_row(own, scheme, n) for own, n in pairs]).float().t().contiguous()
        return cls(
            scales=scales.float().t().contiguous(),
            zeros=zeros,
            cells=(order // _width(scheme, len(order))).tolist(),
            bounds=(-FP8_MAX, FP8_MAX) if scheme.type == "float" else (scheme.qmin, scheme.qmax),
            is_float=scheme.type == "float",
        )

    def round(self, weight_t: torch.Tensor, factor: torch.Tensor, block: int) -> torch.Tensor:
        """Codes [I, O] of weight_t [I, O] fp32; factor [I, I] is R with each column divided by its diagonal.

        The errors of a tile reach the rest of its block, and those of a block all the rest, in one matrix product. Inside
        a tile each column collects them from its forerunners; the rows of those still to come are zero.
        """
        columns, rows = weight_t.shape
        moved = weight_t.clone()
        codes = torch.empty_like(weight_t)
        errors = torch.zeros((block, rows), device=weight_t.device)
        for start in range(0, columns, block):
            stop = min(start + block, columns)
            errors.zero_()
            for first in range(start, stop, _TILE):
                last = min(first + _TILE, stop)
                own = errors[first - start : last - start]
                self._tile(weight_t, moved, codes, factor=factor, errors=own, first=first)
                if last < stop:
                    moved[last:stop].addmm_(factor[first:last, last:stop].t(), own)
            if stop < columns:
                moved[stop:].addmm_(factor[start:stop, stop:].t(), errors[: stop - start])
        return self._stored(codes)

    def _tile(
        self,
        weight_t: torch.Tensor,
        moved: torch.Tensor,
        codes: torch.Tensor,
        *,
        factor: torch.Tensor,
        errors: torch.Tensor,
        first: int,
    ) -> None:
        """Rounds len(errors) columns from `first` on. Views are made for all at once: their making costs as much as the
        arithmetic on a narrow layer."""
        own = slice(first, first + len(errors))
        cells = self.cells[own]
        scales = self.scales[cells].unbind()
        lows = highs = None
        if self.zeros is not None:
            zeros = self.zeros[cells]
            lows, highs = (self.bounds[0] - zeros).unbind(), (self.bounds[1] - zeros).unbind()
        before = factor[own, own].t().contiguous().unbind()
        columns = zip(weight_t[own].unbind(), moved[own].unbind(), codes[own].unbind(), errors.unbind(), strict=True)
        stacked = errors.t()
        for at, (weight, current, code, error) in enumerate(columns):
            if at:
                current.addmv_(stacked, before[at])
            torch.div(current, scales[at], out=code)
            if self.is_float:
                code.copy_(code.clamp_(*self.bounds).to(torch.float8_e4m3fn))
            elif lows is None or highs is None:
                code.round_().clamp_(*self.bounds)
            else:
                torch.clamp(code.round_(), lows[at], highs[at], out=code)
            torch.addcmul(weight, code, scales[at], value=-1, out=error)

    def _stored(self, codes: torch.Tensor) -> torch.Tensor:
        if self.is_float:
            return codes.to(torch.float8_e4m3fn)
        if self.zeros is not None:
            codes += self.zeros[self.cells]
        return codes.to(torch.int8)


def _width(scheme: WeightScheme, columns: int) -> int:
    """Neighbouring input columns that share a scale."""
    if scheme.block is not None:
        return scheme.block[1]
    return scheme.group or columns


def _by_row(values: torch.Tensor, scheme: WeightScheme, rows: int) -> torch.Tensor:
    """Scales or zeros [R, C] -> [O, C], one row of them for each row of the weight."""
    if scheme.block is not None:
        return values.repeat_interleave(scheme.block[0], 0)[:rows]
    return values.expand(rows, -1)


def _factorize(hessian: torch.Tensor, damping: float) -> torch.Tensor | None:
    """R [I, I] fp32, upper triangular with R Rᵀ = the damped H, each column divided by its diagonal; None where every
    damping fails.

    A column that no token excited has a zero row and column in H; its diagonal is set to the mean, which makes it
    independent of the others: it takes no errors and is rounded to nearest.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.double().mean())
    if not 0 < mean < float("inf"):
        return None
    for strength, dtype in _LADDER:
        # The lower factor of H with its order reversed is the upper one, reversed.
        damped = hessian.to(dtype).flip(0, 1)
        own = damped.diagonal()
        own[own <= 0] = mean
        own += strength * damping * mean
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        factor: torch.Tensor = lower.flip(0, 1)
        factor = (factor / factor.diagonal()).float()
        if bool(torch.isfinite(factor).all()):
            return factor
    return None
