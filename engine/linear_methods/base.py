"""How a Linear (or several packed into one) runs: chosen once, when the model is built, from what is stored and where it runs.

T tokens, O out_features, I in_features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from narrowgauge.quant.formats.base import FormatError, QuantizedWeight
from narrowgauge.quant.formats.checkpoint import CheckpointReader, LinearTensors
from narrowgauge.quant.formats.read import lookup
from narrowgauge.quant.formats.scheme import Scheme

LINEAR_METHODS: Mapping[str, str] = {
    "dense": "narrowgauge.engine.linear_methods.dense:DenseLinear",
    "dequantize": "narrowgauge.engine.linear_methods.dequantize:DequantizedLinear",
    "int4": "narrowgauge.engine.linear_methods.int4:Int4Linear",
}
FAST = ("int4",)
"""Methods that run the stored codes, in order of preference; "dequantize" takes what is left."""


class LinearMethodError(ValueError):
    """A method was forced that cannot run this layer; the message says why."""

    exit_code = 2


class LinearMethod(Protocol):
    """y = x W^T + b, whatever W is stored as."""

    name: str

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O] in the model's dtype."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights take."""


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Where and how: `blocked` allows oneDNN's weight order, `dense_copy` a second, dequantized weight for wide batches."""

    dtype: torch.dtype
    device: torch.device
    blocked: bool = True
    dense_copy: bool = True


class StoredLinear:
    """One or more Linears of a checkpoint with the same input, to be run as one: their outputs side by side."""

    def __init__(self, reader: CheckpointReader, names: tuple[str, ...]) -> None:
        self.names = names
        self._reader = reader

    @cached_property
    def permuted(self) -> bool:
        """Whether some part's groups are not runs of neighbouring columns (activation order stored on disk)."""
        return any(weight is not None and weight.column_groups is not None for weight in self._unpacked)

    @cached_property
    def parts(self) -> tuple[LinearTensors, ...]:
        """The stored tensors of each part."""
        return tuple(self._reader.linear(name) for name in self.names)

    @property
    def quantized(self) -> bool:
        """Whether any part is."""
        return any(part.scheme is not None for part in self.parts)

    @property
    def scheme(self) -> Scheme | None:
        """The one Scheme of all parts, or None where they differ (or are in full precision)."""
        schemes = {part.scheme for part in self.parts}
        return next(iter(schemes)) if len(schemes) == 1 else None

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[O, I] dequantized, parts stacked."""
        weights = [self._reader.weight(name, dtype) for name in self.names]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def subset(self, start: int, stop: int) -> "StoredLinear":
        """The parts from `start` to before `stop`."""
        return StoredLinear(self._reader, self.names[start:stop])

    def input_scale(self, index: int) -> torch.Tensor:
        """The calibrated scale [1] of a part's input; only where its scheme has static activations. Raises FormatError."""
        weight = self._unpacked[index]
        if weight is None or weight.input_scale is None:
            raise FormatError(f"{self._reader.folder}: {self.names[index]}.input_scale is not stored")
        return weight.input_scale.reshape(1)

    @cached_property
    def _unpacked(self) -> tuple[QuantizedWeight | None, ...]:
        return tuple(
            None if part.scheme is None else self._reader.unpack(name)
            for name, part in zip(self.names, self.parts, strict=True)
        )

    @cached_property
    def codes(self) -> QuantizedWeight:
        """Codes, scales and zeros of all parts, stacked; only where `scheme` is not None and groups are plain columns."""
        assert self.scheme is not None
        parts = [weight for weight in self._unpacked if weight is not None]
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return QuantizedWeight(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat(zeros) if zeros else None,
        )

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[O], or None where no part has one; a part without gets zeros."""
        if all(part.bias is None for part in self.parts):
            return None
        rows = [self._rows(name, part) for name, part in zip(self.names, self.parts, strict=True)]
        return torch.cat(
            [
                torch.zeros(count, dtype=dtype) if part.bias is None else part.bias.to(dtype)
                for part, count in zip(self.parts, rows, strict=True)
            ]
        )

    def _rows(self, name: str, part: LinearTensors) -> int:
        first: Any = part.tensors.get("weight")
        return int(first.shape[0]) if first is not None else int(self._reader.weight(name, torch.float32).shape[0])


def make_linear(stored: StoredLinear, choice: str, options: LinearOptions) -> LinearMethod:
    """The quickest method that can run it ("auto"), or the one asked for. Raises LinearMethodError.

    Full-precision layers are always "dense"; forcing "int4" is an error only for a layer that is quantized otherwise.
    """
    if not stored.quantized:
        name = "dense"
    elif choice == "auto":
        name = next(
            (fast for fast in FAST if lookup(LINEAR_METHODS, fast).refusal(stored, options) is None), "dequantize"
        )
    else:
        name = choice
        reason = lookup(LINEAR_METHODS, choice).refusal(stored, options)
        if reason is not None:
            raise LinearMethodError(f"--linear {choice}: {' + '.join(stored.names)}: {reason}; use --linear auto")
    method: LinearMethod = lookup(LINEAR_METHODS, name).load(stored, options)
    return method
