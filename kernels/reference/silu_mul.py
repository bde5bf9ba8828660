"""Eager twin of the gated activation. T tokens, I intermediate size."""

import torch


def silu_mul(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (SwiGLU, Shazeer 2020) of packed [T, 2 I] = (gate | up): [T, I] in the same dtype."""
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
