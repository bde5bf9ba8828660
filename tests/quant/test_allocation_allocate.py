"""Allocations: the budget kept, the sensitive layer protected, engines' rule of fused layers kept, figures that add up."""

import itertools
from pathlib import Path

import pytest
import torch

from narrowgauge.quant.allocation.allocate import Allocation, allocate, average_bits, measure_total_kl
from narrowgauge.quant.calibration import CalibrationSet
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.read import build, plain
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.pipeline.sequential import quantize
from narrowgauge.quant.plan import make_plan
from narrowgauge.quant.recipe import Recipe, RecipeError
from narrowgauge.quant.sources import resolve

FOUR, EIGHT = {"weights": {"bits": 4, "group": 32}}, {"weights": {"bits": 8}}


def _recipe(**changes: object) -> Recipe:
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"samples": 8, "length": 32},
        "methods": [{"name": "rtn"}],
        "candidates": [FOUR, EIGHT],
        **changes,
    }
    return build(Recipe, mapping, registries={QuantMethod: METHODS})


def _tokens() -> CalibrationSet:
    ids = torch.randint(2, 258, (8, 32), generator=torch.Generator().manual_seed(0))
    return CalibrationSet(ids=ids, digest="", sources=())


def _skeleton(folder: Path) -> Skeleton:
    return Skeleton(CheckpointReader(folder))


def test_no_other_choice_of_the_same_bits_is_predicted_to_lose_less_and_units_stay_whole(tiny_llama):
    skeleton = _skeleton(tiny_llama())
    found = allocate(_recipe(target_bits=5.2), skeleton, _tokens())
    assert found.bits == pytest.approx(average_bits(found.schemes, skeleton), abs=1e-6)
    assert len(found.schemes) == 14
    for unit in found.units:
        assert {found.schemes[layer] for layer in unit.layers} == {unit.scheme}
        assert unit.kl == next(choice.kl for choice in unit.choices if choice.scheme == unit.scheme)
    weights = sum(rows * columns for name, (rows, columns) in skeleton.linears().items() if name in found.schemes)
    every = itertools.product(*(unit.choices for unit in found.units))
    within = [row for row in every if 8 * sum(choice.size_bytes for choice in row) <= 5.2 * weights]
    best = min(sum(choice.kl for choice in row) for row in within)
    assert found.bits <= 5.2
    assert found.predicted_kl == pytest.approx(best, rel=1e-3)


def test_more_bits_are_never_predicted_to_lose_more(tiny_llama):
    skeleton = _skeleton(tiny_llama())
    predicted = [allocate(_recipe(target_bits=bits), skeleton, _tokens()).predicted_kl for bits in (4.5, 5.0, 6.0, 8.5)]
    assert predicted == sorted(predicted, reverse=True)
    assert predicted[-1] < 0.05 * predicted[0]


def test_an_allocation_survives_json(tiny_llama):
    found = allocate(_recipe(target_bits=5.0), _skeleton(tiny_llama()), _tokens())
    again = build(Allocation, plain(found))
    assert again == found
    assert again.schemes == found.schemes


def test_rules_are_kept_and_count_where_they_quantize(tiny_llama):
    rules = [
        {"match": r"re:.*layers\.0\.mlp\.down_proj$", "keep": True},
        {"match": r"re:.*layers\.1\.mlp\.down_proj$", "scheme": EIGHT},
    ]
    skeleton = _skeleton(tiny_llama())
    recipe = _recipe(target_bits=5.2, rules=rules)
    found = allocate(recipe, skeleton, _tokens())
    assert len(found.schemes) == 12
    planned = make_plan(recipe, skeleton, found.schemes)
    assert planned.schemes["model.layers.1.mlp.down_proj"] == Scheme(weights=WeightScheme(bits=8))
    assert "model.layers.0.mlp.down_proj" in planned.kept
    assert found.bits == pytest.approx(average_bits(planned.schemes, skeleton), abs=1e-6)
    assert found.bits <= 5.2


def test_candidates_that_a_width_refuses_are_left_to_the_other_layers(tiny_llama):
    wide, narrow = {"weights": {"bits": 4, "group": 128}}, {"weights": {"bits": 4, "group": 64}}
    found = allocate(_recipe(target_bits=4.23, candidates=[wide, narrow]), _skeleton(tiny_llama()), _tokens())
    groups = {name.rpartition(".")[2]: scheme.weights.group for name, scheme in found.schemes.items()}
    assert groups == dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 64) | {
        "down_proj": 128
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_bits": 4.2}, r"target_bits: 4\.2 is 0\.300 less than the smallest candidates take"),
        ({"max_bytes": 1000}, r"max_bytes: 1,000 is [\d,]+ less than the smallest candidates take"),
        ({"target_bits": 5.0, "candidates": [{"weights": {"bits": 4, "group": 48}}]}, "none of 1 fits; .* group 48"),
        ({"target_bits": 5.0, "rules": [{"match": "re:.*", "keep": True}]}, "nothing is left for the budget"),
    ],
)
def test_a_budget_that_cannot_be_spent_is_refused_with_the_reason(tiny_llama, changes, message):
    with pytest.raises(RecipeError, match=message):
        allocate(_recipe(**changes), _skeleton(tiny_llama()), _tokens())


def _by_rules(found: Allocation) -> list[dict[str, object]]:
    return [{"match": name, "scheme": plain(scheme)} for name, scheme in found.schemes.items()]


def test_the_written_checkpoint_keeps_a_budget_of_bytes_and_its_kl_is_near_the_sum(tiny_llama, tmp_path):
    folder = tiny_llama()
    skeleton = _skeleton(folder)
    least = quantize(_recipe(candidates=[], scheme=FOUR), resolve(str(folder), cache=tmp_path), tmp_path / "least")
    limit = least.size_bytes + 30_000
    found = allocate(_recipe(max_bytes=limit), skeleton, _tokens())
    written = quantize(
        _recipe(candidates=[], scheme=FOUR, rules=_by_rules(found)),
        resolve(str(folder), cache=tmp_path),
        tmp_path / "out",
    )
    assert limit - 20_000 <= written.size_bytes <= limit
    measured = measure_total_kl(found, skeleton, CheckpointReader(written.path), calibration=_tokens())
    assert measured == pytest.approx(found.predicted_kl, rel=0.5)
