"""Weights in full precision."""

import torch

from narrowgauge.engine.linear_methods.base import LinearOptions, StoredLinear
from narrowgauge.kernels.dense_gemm import block_weight, blocked_linear, can_block

TYPICAL_ROWS = 8
"""Rows for which oneDNN lays the weight out: decode is bound by reading it, prefill hardly minds."""


class DenseLinear:
    """y = x W^T + b; on a CPU with W in oneDNN's blocked order where torch has it."""

    name = "dense"

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, blocked: bool) -> None:
        self._bias = bias_O
        self._nbytes = weight_OI.nbytes
        self._blocked = blocked and can_block(weight_OI)
        self._weight = block_weight(weight_OI, rows=TYPICAL_ROWS) if self._blocked else weight_OI

    @classmethod
    def load(cls, stored: StoredLinear, options: LinearOptions) -> "DenseLinear":
        """From a checkpoint, dequantizing what is quantized."""
        bias = stored.bias(options.dtype)
        return cls(
            stored.weight(options.dtype).to(options.device),
            None if bias is None else bias.to(options.device),
            blocked=options.blocked,
        )

    @staticmethod
    def refusal(stored: StoredLinear, options: LinearOptions) -> str | None:
        """None: it runs everything."""
        return None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        if self._blocked:
            return blocked_linear(x_TI, self._weight, self._bias)
        return torch.nn.functional.linear(x_TI, self._weight, self._bias)

    @property
    def nbytes(self) -> int:
        """Memory that the weights take."""
        return self._nbytes
