"""RMSNorm in Triton, alone and with the residual sum before it. Twins: reference/rmsnorm.py. T tokens, E hidden size.

One program holds one row, so that a row is read once; its tile is the next power of two. bfloat16 is widened straight after
the load: Triton's interpreter computes it wrongly otherwise.
"""

import torch
import triton
import triton.language as tl

MAX_WIDTH = 65536
"""Elements of a row that one program can hold in registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, out_stride, width, eps, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, out_stride, width, eps, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    at = residual_ptr + row * residual_stride + columns
    # The sum is rounded as it is stored: the norm must see what the next layer will see.
    summed = (tl.load(at, mask=inside, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
    tl.store(at, summed, mask=inside)
    total = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (total * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps): [T, E] in x's dtype. Rows of x may be strided; E at most MAX_WIDTH."""
    tokens, width = x_TE.shape
    assert width <= MAX_WIDTH
    assert x_TE.stride(1) == 1
    out_TE = torch.empty(tokens, width, dtype=x_TE.dtype, device=x_TE.device)
    if tokens:
        tile = triton.next_power_of_2(width)
        _rms_norm_kernel[(tokens,)](x_TE, weight_E, out_TE, x_TE.stride(0), width, width, eps, TILE=tile)
    return out_TE


def add_rms_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Adds x to `residual_TE` in place and returns the RMSNorm of the sum: [T, E]. E at most MAX_WIDTH."""
    tokens, width = x_TE.shape
    assert width <= MAX_WIDTH
    assert x_TE.stride(1) == 1
    assert residual_TE.stride(1) == 1
    out_TE = torch.empty(tokens, width, dtype=x_TE.dtype, device=x_TE.device)
    if tokens:
        tile = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(tokens,)](
            x_TE, residual_TE, weight_E, out_TE, x_TE.stride(0), residual_TE.stride(0), width, width, eps, TILE=tile
        )
    return out_TE
