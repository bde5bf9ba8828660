"""What a quantization method is: an options dataclass with plain functions on tensors. It knows neither files nor models.

A recipe lists methods in the order they are applied: smoothers move scale between a Linear's input channels and whatever
produces them (the function of the model stays), then one rounder turns weights into codes.
Shapes: O out_features, I in_features, G groups of input columns, T tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from narrowgauge.quant.formats.base import QuantizedWeight
from narrowgauge.quant.formats.read import Registry
from narrowgauge.quant.formats.scheme import WeightScheme

METHODS: Registry = {
    "rtn": "narrowgauge.quant.methods.rtn:RTN",
    "fp8": "narrowgauge.quant.methods.fp8:FP8",
    "gptq": "narrowgauge.quant.methods.gptq:GPTQ",
    "awq": "narrowgauge.quant.methods.awq:AWQ",
    "smoothquant": "narrowgauge.quant.methods.smoothquant:SmoothQuant",
}

Site = Literal["norm", "linear"]
"""What produces the inputs that a smoother scales: a norm's weight, or the rows of another Linear."""


class SchemeRefused(ValueError):
    """A scheme that a method cannot round to; the message follows the layer's name and says what to write instead."""


@dataclass(frozen=True, kw_only=True)
class InputStatistics:
    """What calibration saw at the input X [T, I] of a Linear, over `tokens` tokens.

    hessian  [I, I] fp32, sum of x xᵀ; None where no method asked for it
    absmax   [I] fp32, largest |x| of each channel
    absmean  [I] fp32, mean |x| of each channel
    heldout  [I, I] fp32, sum of x xᵀ over samples that `hessian` has not seen; None where no method asked for it
    """

    hessian: torch.Tensor | None
    tokens: int
    absmax: torch.Tensor
    absmean: torch.Tensor
    heldout: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """One rounded weight; `fallback` says why the method did something simpler than asked, None where it did not."""

    weight: QuantizedWeight
    fallback: str | None = None


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """What a smoother wants: input channels divided by `scales` [I] fp32 (all finite and > 0), weights multiplied.

    None leaves the Linears as they are. `note` says why something simpler than asked was done, None where it was not.
    """

    scales: torch.Tensor | None
    note: str | None = None


class QuantMethod(Protocol):
    """A method and its options, as a frozen dataclass with a `name` that the recipe writes."""

    @property
    def name(self) -> str:
        """The name in METHODS."""

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """What of InputStatistics it needs; empty: no calibration text has to be run through the model ("range": absmax
        and absmean alone)."""


@runtime_checkable
class Rounder(QuantMethod, Protocol):
    """Turns weights into codes."""

    def refusal(self, scheme: WeightScheme) -> str | None:
        """Why it cannot round to `scheme`, in words that follow a layer's name; None where it can. `round` then raises
        SchemeRefused, so whoever plans should ask before any work."""

    def round(
        self,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        inputs: InputStatistics | None,
        *,
        limits: Sequence[torch.Tensor] | None = None,
    ) -> list[RoundedWeight]:
        """Rounds weights [O, I] of Linears that share one input and one scheme, in order. Scales take their dtype.

        `limits` holds for each weight the largest |w| that its scales must reach, [R, C] as scheme.grid gives it ([O, G] with
        groups); larger weights are clipped.
        Linears that share an input are run as one: with one scale a tensor they get a common scale.
        """


@runtime_checkable
class Smoother(QuantMethod, Protocol):
    """Finds scales for the input channels of Linears that share one input."""

    @property
    def sites(self) -> Collection[Site]:
        """Which producers it moves scale into."""

    def smooth(
        self,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        inputs: InputStatistics,
        *,
        rounder: Rounder | None = None,
    ) -> Smoothing:
        """Scales for weights [O, I] (fp32) that share one input. Never worse than none where the method can tell.

        `rounder` is what will round the weights afterwards, for methods that judge their scales by the outcome.
        """


@runtime_checkable
class Clipper(QuantMethod, Protocol):
    """A smoother that also narrows the range of scales, just before rounding."""

    def limits(
        self, weights: Sequence[torch.Tensor], scheme: WeightScheme, inputs: InputStatistics
    ) -> list[torch.Tensor] | None:
        """For each weight [O, I] the largest |w| [R, C] that its scales should reach; None leaves all ranges whole."""


def scaled_inputs(inputs: InputStatistics, scales: torch.Tensor) -> InputStatistics:
    """What calibration would have seen with the input channels divided by `scales` [I]."""
    both = torch.outer(scales, scales)
    return InputStatistics(
        hessian=None if inputs.hessian is None else inputs.hessian / both,
        tokens=inputs.tokens,
        absmax=inputs.absmax / scales,
        absmean=inputs.absmean / scales,
        heldout=None if inputs.heldout is None else inputs.heldout / both,
    )


def unusable(inputs: InputStatistics | None) -> str | None:
    """Why H says nothing of a Linear's inputs, None where it does: the reason that a method falls back with."""
    if inputs is None or inputs.hessian is None or inputs.tokens == 0:
        return "no calibration token reached the layer"
    if not bool(torch.isfinite(inputs.hessian).all()):
        return "the calibration inputs hold NaN or infinity"
    if not bool((inputs.hessian.diagonal() > 0).any()):
        return "all calibration inputs are zero"
    return None
