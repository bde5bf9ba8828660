"""Round to nearest: the baseline. No calibration; each weight becomes the nearest code of its cell's grid."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, RoundedWeight
from narrowgauge.quant.observers import Search, encode, find_scales


@dataclass(frozen=True, kw_only=True)
class RTN:
    """`{name: rtn, search: none}` in a recipe.

    search: "mse" takes for each scale the range with the least rounding error instead of the whole range.
    """

    name: Literal["rtn"]
    search: Search = "none"

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """Nothing: the weights alone decide."""
        return frozenset()

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
        """Rounds each weight [O, I] to its nearest codes. Raises WeightNotFinite."""
        found = find_scales(weights, scheme, search=self.search, limits=limits)
        return [RoundedWeight(weight=encode(weight, scheme, own)) for weight, own in zip(weights, found, strict=True)]
