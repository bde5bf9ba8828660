"""GPTQ: rounds column by column and moves each rounding error into the columns not yet rounded.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (ICLR 2023),
with activation order and scales kept in the original groups ("static groups"), so that the stored layout is plain.
Shapes: O out_features (of all stacked weights), I in_features, G groups. Work runs on transposed weights [I, O], where a
column of the weight is one contiguous row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.base import QuantizedWeight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, RoundedWeight
from narrowgauge.quant.observers import minmax_scales, round_to_nearest

_LADDER = ((1.0, torch.float32), (1.0, torch.float64), (10.0, torch.float64), (100.0, torch.float64))
"""(factor on the damping, dtype of the factorization): tried in turn until H is positive definite."""


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """`{name: gptq, block: 128, damping: 0.01, order: static}` in a recipe.

    block: columns between two updates of the whole rest. damping: share of the mean diagonal added to the diagonal of
    H. order: "static" rounds columns by falling diagonal of H, "none" from left to right.
    """

    name: Literal["gptq"]
    block: int = 128
    damping: float = 0.01
    order: Literal["static", "none"] = "static"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block: must be at least 1 column, not {self.block}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping: must be above 0 and at most 1, not {self.damping}")

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """H comes from the inputs."""
        return frozenset({"hessian"})

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
        if inputs is None or inputs.hessian is None or inputs.tokens == 0:
            return _fall_back(weights, scheme, "no calibration token reached the layer")
        if not bool(torch.isfinite(inputs.hessian).all()):
            return _fall_back(weights, scheme, "the calibration inputs hold NaN or infinity")
        order = self._order(inputs.hessian)
        factor = _factorize(inputs.hessian[order][:, order], self.damping)
        if factor is None:
            return _fall_back(weights, scheme, "the Hessian is not positive definite under any damping")
        parameters = [minmax_scales(weight, scheme, weight.dtype) for weight in weights]
        stacked = torch.cat([weight.float() for weight in weights]).t()[order]
        scales = torch.cat([scales for scales, _ in parameters]).float().t().contiguous()
        zeros = None
        if not scheme.symmetric:
            zeros = torch.cat([zeros for _, zeros in parameters if zeros is not None]).float().t().contiguous()
        groups = (order // (scheme.group or order.numel())).tolist()
        rounder = _Columns(scales=scales, zeros=zeros, groups=groups, qmin=scheme.qmin, qmax=scheme.qmax)
        rounded = rounder.round(stacked, factor, self.block)
        codes = torch.empty_like(rounded)
        codes[order] = rounded
        rows = [weight.shape[0] for weight in weights]
        return [
            RoundedWeight(weight=QuantizedWeight(codes=part.contiguous(), scales=own[0], zeros=own[1]))
            for part, own in zip(torch.split(codes.t(), rows), parameters, strict=True)
        ]

    def _order(self, hessian: torch.Tensor) -> torch.Tensor:
        if self.order == "none":
            return torch.arange(hessian.shape[0], device=hessian.device)
        return torch.argsort(hessian.diagonal(), descending=True, stable=True)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The column loop. scales, zeros [G, O] fp32; groups[i] is the group of the i-th column in rounding order."""

    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: list[int]
    qmin: int
    qmax: int

    def round(self, weight_t: torch.Tensor, factor: torch.Tensor, block: int) -> torch.Tensor:
        """Codes [I, O] int8 of weight_t [I, O] fp32 (overwritten); factor [I, I] is upper, H⁻¹ = factorᵀ · factor.

        Inside a block each column first collects the errors of the block's earlier columns (one matrix-vector product
        that only reads), after the block the rest is updated at once.
        """
        columns, rows = weight_t.shape
        codes = torch.empty((columns, rows), dtype=torch.int8, device=weight_t.device)
        errors = torch.empty((block, rows), device=weight_t.device)
        code, value = torch.empty(rows, device=weight_t.device), torch.empty(rows, device=weight_t.device)
        diagonal = factor.diagonal().tolist()
        for start in range(0, columns, block):
            stop = min(start + block, columns)
            for column in range(start, stop):
                done = column - start
                current = weight_t[column]
                if done:
                    current.addmv_(errors[:done].t(), factor[start:column, column], alpha=-1.0)
                self._nearest(current, self.groups[column], code=code, value=value)
                codes[column] = code
                torch.sub(current, value, out=value)
                torch.mul(value, 1.0 / diagonal[column], out=errors[done])
            if stop < columns:
                weight_t[stop:].addmm_(factor[start:stop, stop:].t(), errors[: stop - start], alpha=-1.0)
        return codes

    def _nearest(self, current: torch.Tensor, group: int, *, code: torch.Tensor, value: torch.Tensor) -> None:
        """Writes the nearest code of each element [O] and the value that it stands for."""
        scale = self.scales[group]
        torch.div(current, scale, out=code)
        code.round_()
        if self.zeros is None:
            code.clamp_(self.qmin, self.qmax)
            torch.mul(code, scale, out=value)
        else:
            zero = self.zeros[group]
            code.add_(zero).clamp_(self.qmin, self.qmax)
            torch.sub(code, zero, out=value).mul_(scale)


def _factorize(hessian: torch.Tensor, damping: float) -> torch.Tensor | None:
    """The upper Cholesky factor [I, I] fp32 of the inverse of the damped H, or None where every damping fails.

    A column that no token excited has a zero row and column in H; its diagonal is set to the mean, which makes it
    independent of the others: it takes no errors and is rounded to nearest.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    if mean <= 0:
        return None
    for strength, dtype in _LADDER:
        damped = hessian.to(dtype, copy=True)
        own = damped.diagonal()
        own[diagonal <= 0] = mean
        own += strength * damping * mean
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not int(failed) and bool(torch.isfinite(upper).all()):
            result: torch.Tensor = upper.float()
            return result
    return None


def _fall_back(weights: Sequence[torch.Tensor], scheme: WeightScheme, reason: str) -> list[RoundedWeight]:
    return [RoundedWeight(weight=round_to_nearest(weight, scheme), fallback=reason) for weight in weights]
