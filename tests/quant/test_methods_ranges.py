"""The range search against trying every range on real inputs, cell by cell."""

import pytest
import torch

from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.ranges import output_range
from narrowgauge.quant.observers import round_to_nearest

SHRINKS = [1 - step / 20 for step in range(10)]


def _inputs(tokens: int, columns: int, seed: int = 10) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    gains = torch.exp(torch.randn(columns, generator=generator))
    return torch.randn(tokens, columns, generator=generator) @ mixing * gains


def _weight(rows: int, columns: int, seed: int = 11) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _lost(weight: torch.Tensor, scheme: WeightScheme, limits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """‖x d‖² [R, C] of each cell on its own, by running x through what rounding takes away."""
    rounded = dequantize_weight(round_to_nearest(weight, scheme, limits=limits), torch.float32)
    tall, wide = scheme.block or (1, scheme.group or weight.shape[1])
    rows = [
        torch.stack(
            [(x[:, c : c + wide] @ d[:, c : c + wide].t()).square().sum() for c in range(0, weight.shape[1], wide)]
        )
        for d in torch.split(rounded - weight, tall)
    ]
    return torch.stack(rows)


def _whole(weight: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    steps = 448 if scheme.type == "float" else (2**scheme.bits - 1) / 2
    return round_to_nearest(weight, scheme).scales.float() * steps


@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(bits=4, group=32),
        WeightScheme(bits=2, group=16),
        WeightScheme(bits=4),
        WeightScheme(bits=8, type="float", block=(32, 64)),
    ],
)
def test_each_cell_gets_the_range_that_loses_least_on_the_inputs(scheme):
    weight, x = _weight(40, 160), _inputs(600, 160)
    found = output_range(weight, scheme, x.t() @ x)
    whole = _whole(weight, scheme)
    tried = torch.stack([_lost(weight, scheme, whole * shrink, x) for shrink in SHRINKS])
    torch.testing.assert_close(_lost(weight, scheme, found, x), tried.amin(0), rtol=1e-3, atol=1e-6)
    assert bool((found <= whole * 1.001).all())
    assert float(tried.amin(0).sum()) < 0.98 * float(tried[0].sum())


def test_a_range_is_narrowed_only_where_samples_held_out_lose_less_too():
    scheme, weight = WeightScheme(bits=4, group=32), _weight(40, 160)
    x, other = _inputs(600, 160), _inputs(50, 160, seed=12)
    whole = _whole(weight, scheme)
    checked = output_range(weight, scheme, x.t() @ x, heldout=other.t() @ other)
    narrowed = checked < whole * 0.999
    before, after = (_lost(weight, scheme, limits, other) for limits in (whole, checked))
    assert bool((after[narrowed] < before[narrowed]).all())
    unchecked = output_range(weight, scheme, x.t() @ x)
    assert 0 < int(narrowed.sum()) <= int((unchecked < whole * 0.999).sum())


def test_asymmetric_ranges_are_capped_on_both_sides_and_lose_less():
    scheme, weight, x = WeightScheme(bits=4, group=32, symmetric=False), _weight(40, 160), _inputs(600, 160)
    found = output_range(weight, scheme, x.t() @ x)
    before, after = (_lost(weight, scheme, limits, x) for limits in (weight.abs().amax().expand(40, 5), found))
    assert bool((after <= before * 1.001).all())
    assert float(after.sum()) < 0.95 * float(before.sum())


def test_rows_taken_a_few_at_a_time_give_what_they_give_alone():
    scheme = WeightScheme(bits=4, group=64)
    weight, x = _weight(700, 512), _inputs(600, 512)
    hessian = x.t() @ x
    rows = [output_range(weight[start : start + 50], scheme, hessian) for start in range(0, 700, 50)]
    assert torch.isclose(output_range(weight, scheme, hessian), torch.cat(rows)).float().mean() > 0.999


def test_a_wide_cell_is_judged_by_the_diagonal():
    scheme, weight, x = WeightScheme(bits=4), _weight(16, 512), _inputs(2000, 512)
    diagonal = torch.diag((x.t() @ x).diagonal())
    assert torch.equal(output_range(weight, scheme, x.t() @ x), output_range(weight, scheme, diagonal))


def test_cells_of_zeros_and_one_scale_a_tensor_keep_the_whole_range():
    weight, x = _weight(8, 64), _inputs(100, 64)
    weight[:, :32] = 0
    found = output_range(weight, WeightScheme(bits=4, group=32), x.t() @ x)
    assert bool((found[:, 0] == 0).all())
    tensor = output_range(weight, WeightScheme(bits=8, per_tensor=True), x.t() @ x)
    assert torch.equal(tensor, weight.abs().amax().view(1, 1))
