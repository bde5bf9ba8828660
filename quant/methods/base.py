"""What a quantization method is: an options dataclass that rounds the weights of Linears which share one input.

Shapes: O out_features, I in_features, G groups of input columns, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from narrowgauge.quant.formats.base import QuantizedWeight
from narrowgauge.quant.formats.read import Registry
from narrowgauge.quant.formats.scheme import WeightScheme

METHODS: Registry = {
    "rtn": "narrowgauge.quant.methods.rtn:RTN",
    "gptq": "narrowgauge.quant.methods.gptq:GPTQ",
}


@dataclass(frozen=True, kw_only=True)
class InputStatistics:
    """What calibration saw at the input X [T, I] of a Linear: hessian [I, I] fp32 = sum of x xᵀ over `tokens` tokens."""

    hessian: torch.Tensor
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """One rounded weight; `fallback` says why the method did something simpler than asked, None where it did not."""

    weight: QuantizedWeight
    fallback: str | None = None


class QuantMethod(Protocol):
    """A method and its options, as a frozen dataclass with a `name` that the recipe writes."""

    @property
    def name(self) -> str:
        """The name in METHODS."""

    @property
    def needs_inputs(self) -> bool:
        """Whether `round` needs InputStatistics, so that calibration text must be run through the model."""

    def round(
        self, weights: Sequence[torch.Tensor], scheme: WeightScheme, inputs: InputStatistics | None
    ) -> list[RoundedWeight]:
        """Rounds weights [O, I] of Linears that share one input and one scheme, in order. Scales take their dtype."""
