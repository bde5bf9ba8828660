"""4-bit codes by torch's packed CPU product for few rows, and a dequantized copy for many."""

import torch

from narrowgauge.engine.linear_methods.base import LinearOptions, StoredLinear
from narrowgauge.engine.linear_methods.dense import DenseLinear
from narrowgauge.kernels.int4_gemm import GROUPS, MAX_ROWS, PackedInt4, int4_gemm, pack_int4, packs


class Int4Linear:
    """W4A16: symmetric or not, groups of 32, 64 or 128, bfloat16 activations, on a CPU."""

    name = "int4"

    def __init__(self, weight: PackedInt4, bias_O: torch.Tensor | None, wide: DenseLinear | None) -> None:
        self._weight = weight
        self._bias = bias_O
        self._wide = wide

    @classmethod
    def load(cls, stored: StoredLinear, options: LinearOptions) -> "Int4Linear":
        """Repacks the codes; with `dense_copy` the dequantized weight is kept as well."""
        codes = stored.codes
        return cls(
            pack_int4(codes.codes, codes.scales, codes.zeros),
            stored.bias(options.dtype),
            DenseLinear.load(stored, options) if options.dense_copy else None,
        )

    @staticmethod
    def refusal(stored: StoredLinear, options: LinearOptions) -> str | None:
        """Why it cannot run this layer, or None."""
        scheme = stored.scheme
        if scheme is None:
            return "its parts are quantized differently"
        if scheme.weights.bits != 4 or scheme.weights.type != "int" or scheme.activations is not None:
            return f"it is {scheme.name}, not W4A16"
        if options.device.type != "cpu" or options.dtype != torch.bfloat16:
            return "the packed 4-bit product runs on a CPU with bfloat16 activations"
        if stored.permuted:
            return "its groups are permuted columns (activation order on disk)"
        codes = stored.codes.codes
        group = scheme.weights.group or codes.shape[1]
        if not packs(out_features=codes.shape[0], in_features=codes.shape[1], group=group):
            return f"group {group} or the shape {list(codes.shape)} does not suit it (groups: {', '.join(map(str, GROUPS))})"
        return None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        if self._wide is not None and x_TI.shape[0] > MAX_ROWS:
            return self._wide(x_TI)
        out_TO = int4_gemm(x_TI.contiguous(), self._weight)
        return out_TO if self._bias is None else out_TO.add_(self._bias)

    @property
    def nbytes(self) -> int:
        """Memory that the weights take, the second copy included."""
        return self._weight.nbytes + (self._wide.nbytes if self._wide else 0)
