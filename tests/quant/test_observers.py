"""Scales and rounding against compressed-tensors' calculate_qparams and quantize, torch's casts, and literal loops."""

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.observers import WeightNotFinite, encode, find_scales, nearest_values, round_to_nearest

FP8 = WeightScheme(bits=8, type="float")
BLOCKS = WeightScheme(bits=8, type="float", block=(128, 128))


def _gaussian(rows: int, columns: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_zeros_and_codes_are_those_of_compressed_tensors(bits, symmetric):
    weight = _gaussian(16, 128)
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
    ("scheme", "arguments", "cells"),
    [
        (FP8, {"strategy": "channel"}, (1, 1)),
        (WeightScheme(bits=8, type="float", per_tensor=True), {"strategy": "tensor"}, (1, 1)),
        (BLOCKS, {"strategy": "block", "block_structure": [128, 128]}, (2, 3)),
    ],
)
def test_floats_are_those_of_compressed_tensors(scheme, arguments, cells):
    weight = _gaussian(256, 384)
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **arguments)
    if scheme.block is not None:
        spans = weight.view(cells[0], 128, cells[1], 128)
        low, high = spans.amin((1, 3)), spans.amax((1, 3))
    elif scheme.per_tensor:
        low, high = weight.amin().view(1), weight.amax().view(1)
    else:
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scales, zeros = calculate_qparams(low, high, args)
    ours = round_to_nearest(weight, scheme)
    torch.testing.assert_close(ours.scales.view(-1), scales.view(-1), rtol=1e-6, atol=0)
    theirs = quantize(x=weight, scale=scales, zero_point=zeros, args=args, dtype=torch.float8_e4m3fn)
    assert ours.codes.dtype == torch.float8_e4m3fn
    assert (ours.codes.float() != theirs.float()).float().mean() < 1e-3  # a scale's last bit moves what lies between


@pytest.mark.parametrize(
    ("scheme", "search", "columns", "expected"),
    [
        (WeightScheme(bits=4, group=128), "none", 1024, 0.1108),
        (WeightScheme(bits=4, group=128), "mse", 1024, 0.1015),
        (WeightScheme(bits=4, group=128, symmetric=False), "none", 1024, 0.1005),
        (WeightScheme(bits=8), "none", 4096, 0.0087),
        (FP8, "none", 4096, 0.0265),
    ],
)
def test_the_relative_error_on_gaussian_weights_is_the_known_one(scheme, search, columns, expected):
    weight = _gaussian(512, columns)
    error = weight - dequantize_weight(round_to_nearest(weight, scheme, search=search), torch.float32)
    assert float(error.norm() / weight.norm()) == pytest.approx(expected, rel=0.03)


def _literal_search(cell: np.ndarray, symmetric: bool) -> tuple[np.float32, float]:
    """llm-compressor's MSE observer on one group of 4 bits: (scale, least error), by trying ranges one after another."""
    best, chosen = np.inf, np.float32(0)
    for step in range(20):
        shrink = np.float32(1 - step / 100)
        low, high = min(cell.min(), 0) * shrink, max(cell.max(), 0) * shrink
        scale = np.float32(max(-low, high) / 7.5 if symmetric else (high - low) / 15)
        zero = 0 if symmetric else np.clip(np.round(-8 - low / scale), -8, 7)
        codes = np.clip(np.round(cell / scale) + zero, -8, 7)
        error = float((np.abs((codes - zero) * scale - cell) ** 2.4).sum())
        if error < best:
            best, chosen = error, scale
    return chosen, best


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_finds_what_trying_each_range_on_each_group_finds(symmetric):
    weight, scheme = _gaussian(24, 96), WeightScheme(bits=4, group=32, symmetric=symmetric)
    ours = round_to_nearest(weight, scheme, search="mse")
    expected = [[_literal_search(weight[r, c : c + 32].numpy(), symmetric) for c in (0, 32, 64)] for r in range(24)]
    errors = (dequantize_weight(ours, torch.float32) - weight).abs().pow(2.4).view(24, 3, 32).sum(-1)
    torch.testing.assert_close(
        errors, torch.tensor([[least for _, least in row] for row in expected]), rtol=1e-4, atol=0
    )
    scales = torch.tensor(np.array([[scale for scale, _ in row] for row in expected]))
    assert torch.isclose(ours.scales, scales, rtol=1e-5).float().mean() > 0.98  # equal errors leave a choice


@pytest.mark.parametrize("shape", [(128, 128), (130, 448), (576, 1), (1, 300), (15, 129)])
def test_each_block_is_rounded_as_if_it_stood_alone(shape):
    weight = _gaussian(*shape)
    whole = round_to_nearest(weight, BLOCKS)
    assert whole.scales.shape == BLOCKS.grid(*shape)
    assert whole.block == (128, 128)
    alone = WeightScheme(bits=8, type="float", per_tensor=True)
    for row, rows in enumerate(torch.split(weight, 128)):
        for column, block in enumerate(torch.split(rows, 128, dim=1)):
            expected = round_to_nearest(block, alone)
            assert torch.equal(whole.scales[row, column], expected.scales[0, 0])
            part = whole.codes[row * 128 :, column * 128 :][: block.shape[0], : block.shape[1]]
            assert torch.equal(part.float(), expected.codes.float())


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("search", ["none", "mse"])
def test_with_one_scale_a_tensor_weights_that_share_an_input_share_it(kind, search):
    scheme = WeightScheme(bits=8, type=kind, per_tensor=True)
    small, large = _gaussian(8, 64), 5 * _gaussian(4, 64)
    first, second = find_scales([small, large], scheme, search=search)
    together = find_scales([torch.cat([small, large])], scheme, search=search)[0]
    assert torch.equal(first.scales, second.scales)
    assert torch.equal(first.scales, together.scales)


def test_a_limit_caps_the_range_and_what_lies_beyond_takes_the_last_code():
    weight = torch.tensor([[-3.0, 3.0, 0.4, -0.2]])
    for scheme, codes in ((WeightScheme(bits=4), [-8, 7, 3, -2]), (FP8, [-448, 448, 176, -88])):
        rounded = round_to_nearest(weight, scheme, limits=torch.tensor([[1.0]]))
        assert float(rounded.scales) == pytest.approx(1 / (448 if scheme.type == "float" else 7.5))
        assert rounded.codes.float().tolist() == [codes]
    asymmetric = WeightScheme(bits=4, symmetric=False)
    rounded = round_to_nearest(weight.abs(), asymmetric, limits=torch.tensor([[1.5]]))
    assert float(rounded.scales) == pytest.approx(0.1)
    assert (rounded.codes - rounded.zeros).tolist() == [[15, 15, 4, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("search", ["none", "mse"])
@pytest.mark.parametrize("scheme", [WeightScheme(bits=4, group=32), WeightScheme(bits=4, symmetric=False), FP8, BLOCKS])
def test_a_cell_of_zeros_gets_a_tiny_scale_and_stays_zero(dtype, search, scheme):
    quantized = round_to_nearest(torch.zeros(2, 64, dtype=dtype), scheme, search=search)
    assert quantized.scales.dtype == dtype
    assert bool((quantized.scales == torch.finfo(dtype).eps).all())
    assert bool((dequantize_weight(quantized, torch.float32) == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad):
    weight = torch.zeros(2, 64)
    weight[1, 7] = bad
    with pytest.raises(WeightNotFinite, match="NaN or infinity"):
        find_scales([torch.zeros(2, 64), weight], WeightScheme(bits=4, group=32))


def test_scales_are_rounded_to_their_dtype_before_codes_are_chosen():
    weight = _gaussian(64, 128).to(torch.bfloat16)
    quantized = round_to_nearest(weight, WeightScheme(bits=8))
    assert quantized.scales.dtype == torch.bfloat16
    expected = torch.clamp(torch.round(weight.double() / quantized.scales.double()), -128, 127)
    assert torch.equal(quantized.codes.double(), expected)


SCHEMES = [
    WeightScheme(bits=2, group=16),
    WeightScheme(bits=4, group=32),
    WeightScheme(bits=4, group=32, symmetric=False),
    WeightScheme(bits=4),
    WeightScheme(bits=8, symmetric=False),
    WeightScheme(bits=8, per_tensor=True),
    FP8,
    WeightScheme(bits=8, type="float", group=32),
    BLOCKS,
]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 15, 16, 17, 130]),
    columns=st.integers(1, 16).map(lambda n: 32 * n),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    search=st.sampled_from(["none", "mse"]),
    exponent=st.integers(-45, 38),
    zeros=st.booleans(),
    seed=st.integers(0, 999),
)
def test_no_weight_makes_a_scale_that_is_not_finite_and_above_zero(
    rows, columns, scheme, dtype, search, exponent, zeros, seed
):
    weight = _gaussian(rows, columns, seed).clamp(-3, 3) * 10.0**exponent
    if zeros:
        weight[:, : columns // 2] = 0
    largest = torch.finfo(dtype).max
    weight = weight.clamp(-largest, largest).to(dtype)
    found = find_scales([weight], scheme, search=search)[0]
    quantized = encode(weight, scheme, found)
    assert quantized.scales.shape == scheme.grid(rows, columns)
    assert bool((torch.isfinite(quantized.scales) & (quantized.scales > 0)).all())
    assert bool(torch.isfinite(quantized.codes.float()).all())
    values = nearest_values(weight, scheme, found)
    assert bool(torch.isfinite(values).all())
    torch.testing.assert_close(dequantize_weight(quantized, torch.float32), values, rtol=1e-6, atol=0)
    if zeros:
        assert bool((values[:, : columns // 2] == 0).all())


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 15, 17]),
    columns=st.integers(1, 16).map(lambda n: 32 * n),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    group=st.sampled_from([None, 16, 32]),
    seed=st.integers(0, 999),
)
def test_no_number_of_an_unclipped_range_moves_more_than_half_a_step(rows, columns, bits, symmetric, group, seed):
    weight = _gaussian(rows, columns, seed)
    scheme = WeightScheme(bits=bits, group=group, symmetric=symmetric)
    quantized = round_to_nearest(weight, scheme)
    steps = (dequantize_weight(quantized, torch.float32) - weight).abs().view(rows, quantized.scales.shape[1], -1)
    # An asymmetric zero point is rounded too, so either end of the range may lie another half step outside.
    assert bool((steps <= (0.5 if symmetric else 1.0) * quantized.scales.unsqueeze(-1) * (1 + 1e-4)).all())
