"""Eager twin of the 4-bit matrix product. T tokens, O out_features, I in_features, G groups of input columns."""

import torch


def int4_gemm(
    x_TI: torch.Tensor, codes_OI: torch.Tensor, scales_OG: torch.Tensor, *, zeros_OG: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ ((codes - zeros) * scales)^T with fp32 arithmetic: [T, O] in x's dtype. Codes and zeros are int8 in -8..7."""
    rows, columns = codes_OI.shape
    groups = scales_OG.shape[1]
    codes = codes_OI.float().view(rows, groups, columns // groups)
    if zeros_OG is not None:
        codes = codes - zeros_OG.float().unsqueeze(-1)
    weight_OI = (codes * scales_OG.float().unsqueeze(-1)).view(rows, columns)
    return (x_TI.float() @ weight_OI.t()).to(x_TI.dtype)
