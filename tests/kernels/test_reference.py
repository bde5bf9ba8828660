"""The eager twins against torch and transformers, on awkward shapes."""

import pytest
import torch
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from narrowgauge.kernels.reference.int4_gemm import int4_gemm
from narrowgauge.kernels.reference.kv_write import kv_write
from narrowgauge.kernels.reference.rmsnorm import add_rms_norm, rms_norm
from narrowgauge.kernels.reference.rope import apply_rope
from narrowgauge.kernels.reference.silu_mul import silu_mul

WIDTHS = (1, 15, 16, 17, 1023)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_transformers(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(2, 3, width, dtype=dtype)
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    torch.nn.init.uniform_(norm.weight)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), norm(x), atol=0, rtol=0)
        summed = residual + x
        torch.testing.assert_close(add_rms_norm(x, residual, norm.weight, eps=1e-5), norm(summed), atol=0, rtol=0)
        torch.testing.assert_close(residual, summed, atol=0, rtol=0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_the_product_of_its_halves(width: int, dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, width, dtype=dtype)
    packed = torch.cat((gate, up), -1)
    torch.testing.assert_close(silu_mul(packed), torch.nn.functional.silu(gate) * up, atol=1e-6, rtol=1e-6)


def test_rope_rotates_a_strided_view_in_place_as_transformers_does() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=64)
    positions = torch.tensor([[0, 5, 63]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    packed = torch.randn(3, 6 * 16 + 8)
    heads = packed[:, : 6 * 16].view(3, 6, 16)
    expected, _ = apply_rotary_pos_emb(
        heads.clone().transpose(0, 1)[None], heads.clone().transpose(0, 1)[None], cos, sin
    )
    tail = packed[:, 6 * 16 :].clone()
    signed = torch.cat((-sin[0][:, :8], sin[0][:, 8:]), -1)
    apply_rope(heads, cos[0], signed)
    torch.testing.assert_close(heads, expected[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(packed[:, 6 * 16 :], tail, atol=0, rtol=0)


def test_kv_write_touches_only_its_slots() -> None:
    cache = torch.zeros(5, 4, 2, 3, 2)
    kv = torch.arange(2 * 12, dtype=torch.float32).view(2, 12) + 1
    kv_write(kv, cache, torch.tensor([17, 3]))
    assert cache[4, 1].flatten().tolist() == kv[0].tolist()
    assert cache[0, 3].flatten().tolist() == kv[1].tolist()
    assert int((cache != 0).sum()) == 24


@pytest.mark.parametrize("asymmetric", [False, True])
def test_int4_gemm_is_a_product_with_the_dequantized_weight(asymmetric: bool) -> None:
    torch.manual_seed(2)
    codes = torch.randint(-8, 8, (17, 64), dtype=torch.int8)
    zeros = torch.randint(-8, 8, (17, 2), dtype=torch.int8) if asymmetric else None
    scales, x = torch.rand(17, 2), torch.randn(3, 64)
    weight = torch.empty(17, 64)
    for row in range(17):
        for column in range(64):
            zero = 0 if zeros is None else int(zeros[row, column // 32])
            weight[row, column] = (int(codes[row, column]) - zero) * scales[row, column // 32]
    torch.testing.assert_close(int4_gemm(x, codes, scales, zeros_OG=zeros), x @ weight.t(), atol=1e-4, rtol=1e-4)
