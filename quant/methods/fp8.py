"""FP8 (E4M3): each weight becomes the nearest 8-bit float of its cell's scale. No calibration.

One scale for each output row, for each block of 128 x 128 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024), or for the
tensor; then Linears that share an input get a common one, since engines run them as one matrix product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, RoundedWeight, SchemeRefused
from narrowgauge.quant.methods.rtn import RTN


@dataclass(frozen=True, kw_only=True)
class FP8:
    """`{name: fp8}` in a recipe, with a scheme whose weights are floats: {bits: 8, type: float}."""

    name: Literal["fp8"]

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """Nothing: the weights alone decide."""
        return frozenset()

    def refusal(self, scheme: WeightScheme) -> str | None:
        """Only floats."""
        if scheme.type == "float":
            return None
        return f"fp8 rounds to floats, not to {scheme.bits}-bit ints; set type: float and bits: 8, or use rtn or gptq"

    def round(
        self,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        inputs: InputStatistics | None,
        *,
        limits: Sequence[torch.Tensor] | None = None,
    ) -> list[RoundedWeight]:
        """Rounds each weight [O, I] to its nearest floats. Raises WeightNotFinite and SchemeRefused."""
        if refused := self.refusal(scheme):
            raise SchemeRefused(refused)
        return RTN(name="rtn").round(weights, scheme, inputs, limits=limits)
