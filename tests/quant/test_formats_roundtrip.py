"""Every format over awkward shapes and weights: what it takes comes back bit for bit, what it cannot take it refuses."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from narrowgauge.quant.formats.base import FORMATS, CheckpointFormat, FormatError, QuantizedWeight, get_format
from narrowgauge.quant.formats.scheme import ActivationScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest

ROWS, COLUMNS, GROUPS = (8, 60, 128, 576), (32, 64, 252, 448, 512), (None, 32, 128)
KINDS = ("gaussian", "zero group", "all positive", "outlier")
INT8 = ActivationScheme(bits=8, type="int")
FP8 = ActivationScheme(bits=8, type="float")
FP8_GROUPS = ActivationScheme(bits=8, type="float", granularity="group", group=128)
OTHERS = {
    "w8a8": Scheme(weights=WeightScheme(bits=8), activations=INT8),
    "w8a8 asym": Scheme(weights=WeightScheme(bits=8, symmetric=False), activations=INT8),
    "fp8 tensor": Scheme(weights=WeightScheme(bits=8, type="float", per_tensor=True), activations=FP8),
    "fp8 channel": Scheme(weights=WeightScheme(bits=8, type="float"), activations=FP8),
    "fp8 block": Scheme(weights=WeightScheme(bits=8, type="float", block=(128, 128)), activations=FP8_GROUPS),
}


def _weight(rows: int, columns: int, kind: str) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    if kind == "zero group":
        weight[:, : min(128, columns)] = 0
    if kind == "all positive":
        weight = weight.abs() + 0.5
    if kind == "outlier":
        weight[0, 0] = 1e4
    return weight.to(torch.bfloat16)


def _product(weight: QuantizedWeight) -> torch.Tensor:
    """w = (q - z) s in float64, spelled out by rows and columns of scales."""
    rows, columns = weight.codes.shape
    height, width = weight.block or (-(-rows // weight.scales.shape[0]), -(-columns // weight.scales.shape[1]))
    row, column = torch.arange(rows) // height, torch.arange(columns) // width
    codes = weight.codes.double()
    if weight.zeros is not None:
        codes = codes - weight.zeros.double()[row][:, column]
    return codes * weight.scales.double()[row][:, column]


def _cases() -> Iterator[tuple[int, int, int | None]]:
    return itertools.product(ROWS, COLUMNS, GROUPS)


def _fits(name: str, rows: int, columns: int, group: int | None) -> bool:
    """By the formats' definitions: whole groups everywhere; GPTQ packs along both sides, AWQ along rows."""
    whole = columns % (group or columns) == 0
    if name == "awq":
        return whole and rows % 8 == 0
    return whole and (name == "compressed-tensors" or (rows % 8 == 0 and columns % 8 == 0))


def _check(checkpoint_format: CheckpointFormat, rounded: QuantizedWeight, scheme: Scheme) -> None:
    tensors = checkpoint_format.pack(rounded, scheme)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    back = checkpoint_format.unpack(tensors, scheme)
    assert torch.equal(back.codes.view(torch.int8), rounded.codes.view(torch.int8))
    assert torch.equal(back.scales.double(), rounded.scales.double())
    assert bool((torch.isfinite(back.scales.float()) & (back.scales > 0)).all())
    assert (back.zeros is None) == (rounded.zeros is None)
    assert rounded.zeros is None or torch.equal(back.zeros, rounded.zeros)
    dequantized = checkpoint_format.dequantize(tensors, scheme, torch.float32)
    assert torch.equal(dequantized.double(), _product(rounded).float().double())
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    rows, columns = rounded.codes.shape
    assert checkpoint_format.stored_bytes((rows, columns), scheme, 2) == stored


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["compressed-tensors", "gptq", "gptq_v2", "awq"])
def test_four_bit_weights_come_back_bit_for_bit_or_are_refused(name, symmetric, kind):
    checkpoint_format = get_format(name)
    taken = 0
    for rows, columns, group in _cases():
        scheme = Scheme(weights=WeightScheme(bits=4, group=group, symmetric=symmetric))
        if not _fits(name, rows, columns, group):
            assert "multiple of" in str(checkpoint_format.refusal((rows, columns), scheme)), (rows, columns, group)
            continue
        rounded = round_to_nearest(_weight(rows, columns, kind), scheme.weights)
        zero = rounded.zeros is not None and bool((rounded.zeros == -8).any())
        if name == "gptq" and zero:
            with pytest.raises(FormatError, match="a zero point is 0, which gptq cannot hold"):
                checkpoint_format.pack(rounded, scheme)
            continue
        assert checkpoint_format.refusal((rows, columns), scheme, rounded) is None
        _check(checkpoint_format, rounded, scheme)
        if kind == "zero group":
            dead = checkpoint_format.dequantize(checkpoint_format.pack(rounded, scheme), scheme, torch.float32)
            assert not bool(dead[:, : min(group or 128, 128, columns)].any()), "zeros stay zeros"
        taken += 1
    assert taken or (name == "gptq" and not symmetric)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_eight_bit_weights_come_back_bit_for_bit_from_compressed_tensors(name, kind):
    checkpoint_format, scheme = get_format("compressed-tensors"), OTHERS[name]
    for rows, columns in itertools.product(ROWS, COLUMNS):
        refusal = checkpoint_format.refusal((rows, columns), scheme)
        assert (refusal is None) == (name != "fp8 block" or columns % 128 == 0)
        if refusal is None:
            _check(checkpoint_format, round_to_nearest(_weight(rows, columns, kind), scheme.weights), scheme)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_come_back_bit_for_bit_from_native_fp8_ragged_ones_too(kind):
    checkpoint_format, scheme = get_format("fp8"), OTHERS["fp8 block"]
    for rows, columns in itertools.product(ROWS, COLUMNS):
        _check(checkpoint_format, round_to_nearest(_weight(rows, columns, kind), scheme.weights), scheme)
        refusal = checkpoint_format.refusal((rows, columns), scheme)
        assert (refusal is None) == (rows % 128 == 0 and columns % 128 == 0), "loaders give ragged blocks wrong scales"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_refuses_what_it_cannot_hold_with_the_scheme_in_the_words(name):
    checkpoint_format = get_format(name)
    wrong = {"awq": WeightScheme(bits=8), "fp8": WeightScheme(bits=4)}.get(name, WeightScheme(bits=3))
    scheme = Scheme(weights=wrong)
    reason = checkpoint_format.refusal((128, 128), scheme)
    assert reason.startswith(f"{scheme.name}: ")
    with pytest.raises(FormatError, match=f"model.x: {scheme.name}: "):
        checkpoint_format.config({"model.x": scheme}, ())
    with pytest.raises(FormatError, match="no Linear is quantized"):
        checkpoint_format.config({}, ("model.x",))
