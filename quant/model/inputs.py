"""Sums over what reaches a Linear in calibration, kept as cheaply as the device allows.

Shapes: T tokens, I in_features.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Literal

import torch

from narrowgauge.kernels.hardware import has_native_bf16
from narrowgauge.quant.methods.base import InputStatistics

Need = Literal["hessian", "heldout", "range"]

_CHUNK = 8192
"""Tokens that are summed at a time: bounds what is turned to fp32."""
_CPU_TILE, _CUDA_TILE = 256, 2048
"""Columns of one product. Only tiles on and below the diagonal are computed. On one core with AVX512-BF16, for 4096 tokens
of bfloat16: I = 576 takes 18 ms where the whole square takes 49 in fp32 and 22 in bfloat16; I = 1536 takes 141, 425, 189.
On an H200, for 16384 tokens and I = 14336: 7.5, 124, 9.0; tiles of 512 to 2048 are alike."""


class InputsNotFinite(ValueError):
    """NaN or infinity reached a Linear in calibration; the message names it."""


class InputSums:
    """Running sums over x [T, I]; what `needs` does not name is not computed."""

    def __init__(self, columns: int, device: torch.device, needs: Collection[Need]) -> None:
        self._tokens = 0
        self._absmax = torch.zeros(columns, device=device)
        self._total = torch.zeros(columns, device=device, dtype=torch.float64)
        self._hessian = torch.zeros(columns, columns, device=device) if "hessian" in needs else None
        self._heldout = torch.zeros(columns, columns, device=device) if "heldout" in needs else None

    def add(self, x: torch.Tensor, *, heldout: bool) -> None:
        """Adds x [T, I]. `heldout` counts for the held-out Hessian only, and for absmax, which static scales must cover."""
        into = self._heldout if heldout else self._hessian
        for start in range(0, len(x), _CHUNK):
            part = x[start : start + _CHUNK]
            magnitude = part.float().abs_() if part.dtype != torch.float32 else part.abs()
            torch.maximum(self._absmax, magnitude.amax(0), out=self._absmax)
            if not heldout:
                self._total += magnitude.sum(0)
            if into is not None:
                _add_outer(into, part)
        self._tokens += 0 if heldout else len(x)

    @torch.inference_mode()
    def statistics(self, name: str) -> InputStatistics:
        """What was collected. Raises InputsNotFinite with the Linear's `name` where NaN or infinity was among it."""
        if not bool(torch.isfinite(self._absmax).all()):
            raise InputsNotFinite(
                f"{name}: NaN or infinity reaches it in calibration; the base model is damaged, or overflows in this dtype"
            )
        for hessian in (self._hessian, self._heldout):
            if hessian is not None:
                _mirror(hessian)
        return InputStatistics(
            hessian=self._hessian,
            tokens=self._tokens,
            absmax=self._absmax,
            absmean=(self._total / max(self._tokens, 1)).float(),
            heldout=self._heldout,
        )


def _add_outer(into: torch.Tensor, x: torch.Tensor) -> None:
    """Adds x xᵀ, summed over tokens in fp32, to the tiles of `into` [I, I] on and below the diagonal.

    Products of bfloat16 values are exact in fp32: only the order of the sum differs from fp32 operands.
    """
    short = x.dtype in (torch.bfloat16, torch.float16)
    if x.is_cuda and short:
        for left, right, below in _tiles(into, x):
            below += torch.mm(left, right, out_dtype=torch.float32)
        return
    with _bf16_products() if x.dtype == torch.bfloat16 else contextlib.nullcontext():
        for left, right, below in _tiles(into, x.float()):
            below.addmm_(left, right)


def _tiles(into: torch.Tensor, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    tile = _CUDA_TILE if x.is_cuda else _CPU_TILE
    for start in range(0, x.shape[1], tile):
        columns = slice(start, start + tile)
        yield x[:, start:].t(), x[:, columns], into[start:, columns]


@contextlib.contextmanager
def _bf16_products() -> Iterator[None]:
    """Inside, oneDNN multiplies fp32 operands as bfloat16, which those that come from bfloat16 lose nothing by.

    On a CPU with native bfloat16 that takes half the time. Elsewhere, and in a torch without the switch, nothing changes.
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None or not has_native_bf16():
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _mirror(hessian: torch.Tensor) -> None:
    tile = _CUDA_TILE if hessian.is_cuda else _CPU_TILE
    for start in range(0, len(hessian), tile):
        end = start + tile
        hessian[start:end, end:] = hessian[end:, start:end].t()
