"""Round to nearest: the baseline. No calibration; each weight becomes the nearest code of its group's grid."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, RoundedWeight
from narrowgauge.quant.observers import round_to_nearest


@dataclass(frozen=True, kw_only=True)
class RTN:
    """`{name: rtn}` in a recipe."""

    name: Literal["rtn"]

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """Nothing: the weights alone decide."""
        return frozenset()

    def round(
        self,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        inputs: InputStatistics | None,
        *,
        limits: Sequence[torch.Tensor] | None = None,
    ) -> list[RoundedWeight]:
        """Rounds each weight [O, I] on its own. Raises WeightNotFinite."""
        return [RoundedWeight(weight=round_to_nearest(weight, scheme)) for weight in weights]
