"""SmoothQuant: moves the spread of activation channels into the weights, so that both round well to 8 bits.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (ICML 2023):
s = max|x| ** alpha / max|w| ** (1 - alpha) for each input channel.
Shapes: O out_features, I in_features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, Rounder, Site, Smoothing

_SMALLEST, _LARGEST = 1e-5, 1e5
"""Bounds of s: beyond them a 16-bit norm weight would lose what is divided out of it."""


@dataclass(frozen=True, kw_only=True)
class SmoothQuant:
    """`{name: smoothquant, alpha: 0.8, sites: [norm]}` in a recipe.

    alpha: how much of the activations' spread the weights take on; 0.8 is usual for Llama-like models. sites: "norm" moves
    scale into norms before q, k, v and gate, up; "linear" also into v before o and up before down.
    """

    name: Literal["smoothquant"]
    alpha: float = 0.8
    sites: tuple[Site, ...] = ("norm",)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: must be between 0 and 1, not {self.alpha}")
        if not self.sites:
            raise ValueError("sites: name at least one of norm, linear; or leave smoothquant out")

    @property
    def needs(self) -> frozenset[Literal["hessian", "heldout", "range"]]:
        """The largest |x| of each channel."""
        return frozenset({"range"})

    def smooth(
        self,
        weights: Sequence[torch.Tensor],
        scheme: WeightScheme,
        inputs: InputStatistics,
        *,
        rounder: Rounder | None = None,
    ) -> Smoothing:
        """Scales for weights [O, I]; 1 for a channel whose inputs or whose weights are all zero: nothing to balance."""
        if inputs.tokens == 0:
            return Smoothing(scales=None, note="no calibration token reached the layers")
        spread = inputs.absmax.float()
        reach = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
        if not bool(torch.isfinite(spread).all() & torch.isfinite(reach).all()):
            return Smoothing(scales=None, note="the calibration inputs or the weights hold NaN or infinity")
        alive = (spread > 0) & (reach > 0)
        if not bool(alive.any()):
            return Smoothing(scales=None, note="all calibration inputs or all weights are zero")
        # By logarithms: a quotient of two powers can leave float32 where the scale itself does not.
        scales = torch.exp(self.alpha * spread.log() - (1 - self.alpha) * reach.log())
        return Smoothing(scales=torch.where(alive, scales.clamp(_SMALLEST, _LARGEST), 1.0))
