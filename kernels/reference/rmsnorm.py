"""Eager twins of the RMSNorm kernels: the oracle, and what a CPU runs. T tokens, E hidden size."""

import torch


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang & Sennrich 2019): [T, E] in x's dtype.

    The quotient is taken in fp32 and rounded to x's dtype before the product with the weight, as transformers' Llama does.
    """
    x = x_TE.float()
    return weight_E * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(x_TE.dtype)


def add_rms_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Adds x to `residual_TE` *in place* (rounded to its dtype) and returns the RMSNorm of the sum: [T, E]."""
    residual_TE.add_(x_TE)
    return rms_norm(residual_TE, weight_E, eps)
