"""Any format, by its own dequantize() at load: right for all of them, with the memory and speed of full precision.

Where a scheme quantizes activations they are rounded as formats/rounding.py defines it, so that a checkpoint answers here as
it would on kernels that multiply codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from narrowgauge.engine.linear_methods.base import LinearOptions, StoredLinear
from narrowgauge.engine.linear_methods.dense import DenseLinear
from narrowgauge.quant.formats.rounding import round_activations
from narrowgauge.quant.formats.scheme import ActivationScheme


@dataclass(frozen=True, kw_only=True)
class InputRounding:
    """How an input is rounded; `scale` [1] where it was calibrated."""

    scheme: ActivationScheme
    scale: torch.Tensor | None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, I]."""
        return round_activations(x_TI, self.scheme, self.scale)


class DequantizedLinear:
    """A quantized layer kept as full-precision weights: one product for neighbours whose inputs are rounded alike."""

    name = "dequantize"

    def __init__(self, parts: Sequence[tuple[InputRounding | None, DenseLinear]]) -> None:
        self._parts = tuple(parts)

    @classmethod
    def load(cls, stored: StoredLinear, options: LinearOptions) -> "DequantizedLinear":
        """From a checkpoint in any format."""
        roundings = [_input_rounding(stored, index, options.device) for index in range(len(stored.names))]
        runs: list[list[int]] = []
        for index, rounding in enumerate(roundings):
            if runs and _alike(roundings[runs[-1][-1]], rounding):
                runs[-1].append(index)
            else:
                runs.append([index])
        return cls([(roundings[run[0]], DenseLinear.load(stored.subset(run[0], run[-1] + 1), options)) for run in runs])

    @staticmethod
    def refusal(stored: StoredLinear, options: LinearOptions) -> str | None:
        """None: it runs everything."""
        return None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        outputs = [dense(x_TI if rounding is None else rounding(x_TI)) for rounding, dense in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @property
    def nbytes(self) -> int:
        """Memory that the weights take."""
        return sum(dense.nbytes for _, dense in self._parts)


def _input_rounding(stored: StoredLinear, index: int, device: torch.device) -> InputRounding | None:
    scheme = stored.parts[index].scheme
    if scheme is None or scheme.activations is None:
        return None
    scale = None if scheme.activations.dynamic else stored.input_scale(index).to(device)
    return InputRounding(scheme=scheme.activations, scale=scale)


def _alike(one: InputRounding | None, other: InputRounding | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.scheme != other.scheme or (one.scale is None) != (other.scale is None):
        return False
    return one.scale is None or other.scale is None or torch.equal(one.scale, other.scale)
