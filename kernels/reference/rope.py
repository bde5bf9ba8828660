"""Eager twin of rotary position embedding. T tokens, H heads (queries and keys side by side), D head size."""

import torch


def apply_rope(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
    """Rotates `x_THD` *in place*: x * cos + rotate(x) * sin, halves convention (Su et al. 2021; Llama's order in transformers).

    The tables repeat their D/2 angles twice; the first half of `sin_TD` is negated, so that rotate() is a plain swap of halves.
    """
    half = x_THD.shape[-1] // 2
    swapped = torch.roll(x_THD, half, -1)
    x_THD.mul_(cos_TD.unsqueeze(1)).addcmul_(swapped, sin_TD.unsqueeze(1))
