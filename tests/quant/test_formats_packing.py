"""Packing is compared with compressed-tensors' own."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.quant.formats.packing import pack_int32, unpack_int32


def _codes(bits: int, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, dtype=torch.int8, generator=generator)


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([2, 4, 8]), rows=st.integers(1, 9), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_packed_words_are_those_of_compressed_tensors_and_come_back(bits, rows, columns, seed):
    codes = _codes(bits, (rows, columns), seed)
    packed = pack_int32(codes, bits)
    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert torch.equal(unpack_int32(packed, bits, columns), codes)
    assert torch.equal(unpack_int32(packed, bits, columns), unpack_from_int32(packed, bits, codes.shape))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stacked_experts_are_packed_each_as_it_would_be_alone(bits):
    codes = torch.stack([_codes(bits, (6, 20), seed) for seed in range(3)])
    packed = pack_int32(codes, bits)
    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert all(torch.equal(packed[expert], pack_int32(codes[expert], bits)) for expert in range(3))
    assert torch.equal(unpack_int32(packed, bits, 20), codes)


def test_the_first_code_takes_the_lowest_bits():
    row = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int8)
    assert pack_int32(row, 4).item() & 0xFFFFFFFF == 0xF6543210


@pytest.mark.parametrize("bits", [1, 3, 5, 6, 7, 16])
def test_widths_that_other_releases_lay_out_differently_are_refused(bits):
    with pytest.raises(ValueError, match="use 2, 4 or 8"):
        pack_int32(torch.zeros(1, 8, dtype=torch.int8), bits)


def test_words_that_cannot_hold_the_columns_are_refused():
    with pytest.raises(ValueError, match="17 codes of 4 bits take 3 words, not 2"):
        unpack_int32(torch.zeros(1, 2, dtype=torch.int32), 4, 17)
