"""Scales and rounding are compared with compressed-tensors' calculate_qparams and quantize."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.observers import WeightNotFinite, find_scales, round_to_nearest


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_zeros_and_codes_are_those_of_compressed_tensors(bits, symmetric):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    if symmetric:  # for a group of zeros the library's asymmetric zero point is 0, ours the lowest code: both mean 0.0
        weight[3, :32] = 0
    weight[5] = weight[5].abs() + 1
    scheme = WeightScheme(bits=bits, group=32, symmetric=symmetric)
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=32)
    grouped = weight.view(16, 4, 32)
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    ours = round_to_nearest(weight, scheme)
    torch.testing.assert_close(ours.scales, scales, rtol=1e-6, atol=0)
    if not symmetric:
        assert torch.equal(ours.zeros, zeros.to(torch.int8))
    theirs = quantize(x=weight, scale=ours.scales, zero_point=zeros, args=args, dtype=torch.int8)
    assert torch.equal(ours.codes, theirs)


@pytest.mark.parametrize(
    ("scheme", "columns", "expected"),
    [
        (WeightScheme(bits=4, group=128), 1024, 0.1108),
        (WeightScheme(bits=4, group=128, symmetric=False), 1024, 0.1005),
        (WeightScheme(bits=8), 4096, 0.0087),
    ],
)
def test_the_relative_error_on_gaussian_weights_is_the_known_one(scheme, columns, expected):
    weight = torch.randn(512, columns, generator=torch.Generator().manual_seed(3))
    error = (weight - dequantize_weight(round_to_nearest(weight, scheme), torch.float32)).norm() / weight.norm()
    assert float(error) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_group_of_zeros_gets_a_tiny_scale_and_stays_zero(dtype):
    weight = torch.zeros(2, 64, dtype=dtype)
    for symmetric in (True, False):
        quantized = round_to_nearest(weight, WeightScheme(bits=4, group=32, symmetric=symmetric))
        assert quantized.scales.dtype == dtype
        assert bool((quantized.scales == torch.finfo(dtype).eps).all())
        assert bool((dequantize_weight(quantized, torch.float32) == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad):
    weight = torch.zeros(2, 64)
    weight[1, 7] = bad
    with pytest.raises(WeightNotFinite, match="NaN or infinity"):
        find_scales([weight], WeightScheme(bits=4, group=32))
