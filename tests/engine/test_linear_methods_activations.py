"""Layers whose inputs are rounded: the answer is the float64 product of the rounded input and the dequantized weight."""

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.engine.linear_methods.base import LinearOptions, StoredLinear, make_linear
from narrowgauge.quant.formats.base import QuantizedWeight, dequantize_weight
from narrowgauge.quant.formats.checkpoint import LinearTensors
from narrowgauge.quant.formats.scheme import ActivationScheme, Scheme, WeightScheme

OPTIONS = LinearOptions(dtype=torch.float32, device=torch.device("cpu"))
W8A8 = Scheme(weights=WeightScheme(bits=8), activations=ActivationScheme(bits=8, type="int"))
FP8_STATIC = Scheme(
    weights=WeightScheme(bits=8, type="float", per_tensor=True),
    activations=ActivationScheme(bits=8, type="float", granularity="tensor", dynamic=False),
)
FP8_BLOCK = Scheme(
    weights=WeightScheme(bits=8, type="float", block=(16, 32)),
    activations=ActivationScheme(bits=8, type="float", granularity="group", group=32),
)
W4A16 = Scheme(weights=WeightScheme(bits=4, group=32))


class MemoryReader:
    """What StoredLinear asks of a CheckpointReader."""

    folder = Path("memory")

    def __init__(self, schemes: dict[str, Scheme | None], weights: dict[str, QuantizedWeight]) -> None:
        self._schemes, self._weights = schemes, weights

    def linear(self, name: str) -> LinearTensors:
        tensors: Any = {"name": name}
        return LinearTensors(scheme=self._schemes[name], tensors=tensors, bias=None)

    def unpack(self, name: str) -> QuantizedWeight:
        return self._weights[name]

    def weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_weight(self._weights[name], dtype)


def _weight(scheme: Scheme | None, input_scale: float | None) -> QuantizedWeight:
    weights = W4A16.weights if scheme is None else scheme.weights
    rows, columns = 32, 64
    codes = (
        torch.randn(rows, columns).clamp(-4, 4).to(torch.float8_e4m3fn)
        if weights.type == "float"
        else torch.randint(weights.qmin, weights.qmax + 1, (rows, columns), dtype=torch.int8)
    )
    block = None if weights.block is None else (weights.block[0], weights.block[1])
    return QuantizedWeight(
        codes=codes,
        scales=torch.rand(weights.grid(rows, columns)) / 10 + 0.01,
        block=block,
        input_scale=None if input_scale is None else torch.tensor([input_scale]),
    )


def _oracle(x: torch.Tensor, scheme: Scheme | None, input_scale: float | None) -> torch.Tensor:
    """Rounding spelled out row by row in float32: the largest of a row lies on a tie, which float64 would break otherwise."""
    if scheme is None or scheme.activations is None:
        return x.double()
    top = 448.0 if scheme.activations.type == "float" else 127.5
    rows = []
    for row in x:
        for part in row.split(scheme.activations.group or len(row)):
            scale = part.abs().max() / top if input_scale is None else torch.tensor(input_scale)
            scaled = part / scale
            if scheme.activations.type == "float":
                rows.append(scaled.clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale)
            else:
                rows.append(scaled.round().clamp(-128, 127).double() * scale)
    return torch.cat(rows).view_as(x)


@pytest.mark.parametrize(
    "parts",
    [
        [(W8A8, None), (W8A8, None)],
        [(FP8_STATIC, 0.01), (FP8_STATIC, 0.01)],
        [(FP8_STATIC, 0.01), (FP8_STATIC, 0.02), (FP8_STATIC, 0.02)],
        [(FP8_BLOCK, None)],
        [(W8A8, None), (W4A16, None), (None, None)],
    ],
    ids=["int8", "fp8 static", "scales differ", "fp8 block", "mixed"],
)
def test_inputs_are_rounded_as_each_parts_scheme_says(
    parts: list[tuple[Scheme | None, float | None]],
) -> None:
    torch.manual_seed(0)
    names = tuple(f"part{index}" for index in range(len(parts)))
    schemes = dict(zip(names, (scheme for scheme, _ in parts), strict=True))
    weights = {name: _weight(scheme, scale) for name, (scheme, scale) in zip(names, parts, strict=True)}
    reader: Any = MemoryReader(schemes, weights)
    method = make_linear(StoredLinear(reader, names), "auto", OPTIONS)
    assert method.name == "dequantize"
    x = torch.randn(5, 64)
    wanted = [
        _oracle(x, scheme, scale) @ dequantize_weight(weights[name], torch.float32).double().t()
        for name, (scheme, scale) in zip(names, parts, strict=True)
    ]
    torch.testing.assert_close(method(x).double(), torch.cat(wanted, -1), atol=2e-4, rtol=1e-4)
