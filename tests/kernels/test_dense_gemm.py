"""The blocked product against torch's own linear."""

import pytest
import torch

from narrowgauge.kernels.dense_gemm import block_weight, blocked_linear, can_block


@pytest.mark.parametrize("rows", [1, 15, 16, 17])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 15), (17, 16), (1023, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_blocked_product_agrees_with_torchs_linear(
    rows: int, out_features: int, in_features: int, with_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(out_features, in_features, dtype=dtype)
    if not can_block(weight):
        pytest.skip(f"this CPU or torch has no blocked product in {dtype}")
    bias = torch.randn(out_features, dtype=dtype) if with_bias else None
    x = torch.randn(rows, in_features, dtype=dtype)
    answer = blocked_linear(x, block_weight(weight, rows=8), bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert float((answer.double() - expected).abs().max() / expected.abs().max()) < tolerance
