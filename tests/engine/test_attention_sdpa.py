"""The SDPA backend against the eager twin, and the twin against torch's own attention."""

import pytest
import torch

from narrowgauge.engine.attention.base import AttentionError, BatchLayout, make_attention
from narrowgauge.kernels.reference.paged_attention import paged_attention

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 6, 2, 8, 4, 64
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ((1,), (1,)),
        ((1,), (17,)),
        ((1, 1, 1), (16, 15, 1)),
        ((1, 1, 1, 1), (40, 33, 7, 4)),
        ((5,), (5,)),
        ((3,), (17,)),
        ((1, 1, 4, 16, 2), (23, 4, 4, 31, 18)),
    ],
)
@pytest.mark.parametrize("scattered", [True, False])
def test_sdpa_agrees_with_the_eager_twin(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], scattered: bool
) -> None:
    torch.manual_seed(3)
    cache = torch.randn(BLOCKS, BLOCK, 2, KV_HEADS, SIZE)
    tables = make_tables(context_lens, scattered=scattered)
    q = torch.randn(sum(query_lens), HEADS, SIZE)
    layout = BatchLayout(query_lens, context_lens, tables, BLOCK)
    results = {}
    for name in ("sdpa", "reference"):
        backend = make_attention(name, dtype=torch.float32, device=CPU)
        results[name] = backend.attend(q, cache, backend.plan(layout), scale=0.3)
    torch.testing.assert_close(results["sdpa"], results["reference"], atol=1e-5, rtol=1e-5)


def test_the_eager_twin_is_causal_attention() -> None:
    torch.manual_seed(4)
    context, queries = 19, 7
    k, v = torch.randn(2, context, KV_HEADS, SIZE)
    cache = torch.zeros(BLOCKS, BLOCK, 2, KV_HEADS, SIZE)
    (table,) = make_tables((context,), scattered=True)
    for position in range(context):
        cache[table[position // BLOCK], position % BLOCK, 0] = k[position]
        cache[table[position // BLOCK], position % BLOCK, 1] = v[position]
    q = torch.randn(queries, HEADS, SIZE)
    whole_q = torch.cat((torch.randn(context - queries, HEADS, SIZE), q))
    expected = torch.nn.functional.scaled_dot_product_attention(
        whole_q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True, scale=0.3
    ).transpose(0, 1)[-queries:]
    answer = paged_attention(q, cache, torch.tensor([table]), query_lens=[queries], context_lens=[context], scale=0.3)
    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttentionError, match="reference, sdpa"):
        make_attention("flash9", dtype=torch.float32, device=CPU)


def make_tables(context_lens: tuple[int, ...], *, scattered: bool) -> tuple[list[int], ...]:
    ids = torch.randperm(BLOCKS).tolist() if scattered else list(range(BLOCKS))
    tables = []
    for context in context_lens:
        count = -(-context // BLOCK)
        tables.append(ids[:count])
        ids = ids[count:]
    return tuple(tables)
