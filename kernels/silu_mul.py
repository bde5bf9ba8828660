"""The gated activation silu(gate) * up in Triton. Twin: reference/silu_mul.py. T tokens, I intermediate size."""

import torch
import triton
import triton.language as tl

TILE = 1024
"""Columns a program: 2 KiB a stream in 16 bits, so that two rows of loads are in flight for each of four warps. A prior:
no sweep stands behind it yet."""


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(gate_up_ptr, out_ptr, in_stride, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    at = gate_up_ptr + row * in_stride + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    # Rounded between the two steps, as the eager twin rounds.
    activated = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of packed [T, 2 I] = (gate | up): [T, I] in the same dtype. Rows may be strided."""
    tokens, doubled = gate_up_TI2.shape
    width = doubled // 2
    assert gate_up_TI2.stride(1) == 1
    out_TI = torch.empty(tokens, width, dtype=gate_up_TI2.dtype, device=gate_up_TI2.device)
    if tokens and width:
        grid = (tokens, triton.cdiv(width, TILE))
        _silu_mul_kernel[grid](gate_up_TI2, out_TI, gate_up_TI2.stride(0), width, TILE=TILE)
    return out_TI
