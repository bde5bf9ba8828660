"""torch's packed product against the eager twin."""

import pytest
import torch

from narrowgauge.kernels.int4_gemm import int4_gemm, pack_int4, packs
from narrowgauge.kernels.reference.int4_gemm import int4_gemm as twin


@pytest.mark.parametrize("rows", [1, 2, 8, 15, 16, 17])
@pytest.mark.parametrize(("out_features", "in_features", "group"), [(16, 128, 128), (48, 576, 64), (1008, 96, 32)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_packed_product_agrees_with_its_twin(
    rows: int, out_features: int, in_features: int, group: int, asymmetric: bool
) -> None:
    torch.manual_seed(rows)
    shape = (out_features, in_features // group)
    codes = torch.randint(-8, 8, (out_features, in_features), dtype=torch.int8)
    scales = (torch.rand(shape) / 10 + 0.01).bfloat16()
    zeros = torch.randint(-4, 4, shape, dtype=torch.int8) if asymmetric else None
    x = torch.randn(rows, in_features).bfloat16()
    assert packs(out_features=out_features, in_features=in_features, group=group)
    answer = int4_gemm(x, pack_int4(codes, scales, zeros))
    expected = twin(x, codes, scales, zeros_OG=zeros)
    error = (answer.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < 1e-2  # two roundings to bfloat16


def test_shapes_that_the_operator_does_not_take_are_known() -> None:
    assert not packs(out_features=17, in_features=128, group=64)
    assert not packs(out_features=16, in_features=96, group=64)
    assert not packs(out_features=16, in_features=128, group=16)
