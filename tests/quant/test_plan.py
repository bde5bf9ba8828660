"""The plan says before any work what the checkpoint will be; the checkpoint itself is the oracle."""

import re
from pathlib import Path

import pytest

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.pipeline.sequential import plan, quantize
from narrowgauge.quant.plan import Plan, make_plan
from narrowgauge.quant.recipe import Recipe, RecipeError
from narrowgauge.quant.sources import resolve

HEADER_BYTES = 20_000


@pytest.mark.parametrize("weights", [{"bits": 4, "group": 32, "symmetric": False}, {"bits": 8}])
def test_the_planned_layers_and_bytes_are_those_of_the_checkpoint(tiny_llama, tmp_path, weights):
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "methods": [{"name": "rtn"}],
        "scheme": {"weights": weights},
        "rules": [{"match": "re:.*o_proj", "keep": True}],
    }
    recipe = build(Recipe, mapping, registries={QuantMethod: METHODS})
    base = resolve(str(tiny_llama()), cache=tmp_path)
    planned = plan(recipe, base)
    result = quantize(recipe, base, tmp_path / "out")
    reader = CheckpointReader(result.path)
    assert planned.schemes == dict(reader.layout.linears)
    assert planned.kept == ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "lm_head")
    assert planned.blocks == 2
    assert planned.base_size_bytes == result.base_size_bytes
    assert planned.size_bytes == pytest.approx(result.size_bytes, abs=HEADER_BYTES)


W4 = {"weights": {"bits": 4, "group": 32}}
FP8_BLOCK = {
    "weights": {"bits": 8, "type": "float", "block": [128, 128]},
    "activations": {"bits": 8, "type": "float", "granularity": "group", "group": 128},
}


def _plan(folder: Path, **changes: object) -> Plan:
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"length": 32},
        "methods": [{"name": "rtn"}],
        **changes,
    }
    recipe = build(Recipe, mapping, registries={QuantMethod: METHODS})
    return make_plan(recipe, Skeleton(CheckpointReader(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scheme": {"weights": {"bits": 4, "group": 96}}},
            "model.layers.0.self_attn.q_proj: in_features 64 is not a multiple of group 96; use 64 or 32 or 16, or keep .* "
            r"\(and model.layers.0.self_attn.k_proj, .* 5 more\); model.layers.0.mlp.down_proj: in_features 128 is",
        ),
        (
            {"scheme": FP8_BLOCK, "methods": [{"name": "fp8"}]},
            "q_proj: in_features 64 is not a multiple of the activations' group 128, and loaders fail on the first token; use "
            "blocks and groups of 64 or 32, set activations to null",
        ),
        ({"scheme": W4, "methods": [{"name": "fp8"}]}, "q_proj: fp8 rounds to floats, not to 4-bit ints"),
        (
            {"scheme": W4, "rules": [{"match": "lm_head", "scheme": W4}]},
            r"lm_head: is the embedding itself \(tie_word_embeddings\), .* write keep: true",
        ),
        (
            {"scheme": W4, "rules": [{"match": "re:.*nothing", "keep": True}]},
            "'re:.*nothing' match no Linear of the model",
        ),
        (
            {"scheme": {"weights": {"bits": 8}}, "format": "awq"},
            r"q_proj: .*awq.*; a rule {match: 'model.layers.0.self_attn.q_proj', keep: true} keeps",
        ),
        (
            {"scheme": W4, "methods": [{"name": "gptq"}], "calibration": {"length": 512}},
            "calibration.length: 512 is more than the model's 256 positions",
        ),
        ({"target_bits": 3.0}, r"target_bits: 3 is less than the 4\.222 bits that the smallest candidates take"),
        ({"max_bytes": 10}, r"max_bytes: 10 is less than the [\d,]+ that the smallest candidates take"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work_with_all_layers_and_a_remedy(tiny_llama, changes, message):
    with pytest.raises(RecipeError, match=message) as caught:
        _plan(tiny_llama(), **changes)
    assert "\n" not in str(caught.value)


def test_a_head_of_its_own_is_refused_too(tiny_llama):
    with pytest.raises(RecipeError, match="lm_head: lies outside the decoder blocks and stays at 16 bits"):
        _plan(tiny_llama(tie_word_embeddings=False), scheme=W4, rules=[{"match": "lm_head", "scheme": W4}])


def test_ragged_blocks_of_weights_alone_are_taken_where_readers_slice_them_right(tiny_llama):
    folder = tiny_llama()
    options = {"scheme": {"weights": FP8_BLOCK["weights"]}, "methods": [{"name": "fp8"}]}
    assert len(_plan(folder, **options).layers) == 14
    with pytest.raises(RecipeError, match="not a multiple of the block's 128"):
        _plan(
            folder,
            format="fp8",
            scheme={**FP8_BLOCK, "activations": FP8_BLOCK["activations"]},
            methods=[{"name": "fp8"}],
        )


def test_a_rule_that_splits_what_vllm_stacks_is_told(tiny_llama):
    rules = [{"match": r"re:.*\.v_proj$", "scheme": {"weights": {"bits": 8}}}]
    (told,) = _plan(tiny_llama(), scheme=W4, rules=rules).warnings
    assert re.match(r"model\.layers\.\*\.self_attn\.\{q_proj,k_proj,v_proj\} differ .* in 2 layers: vLLM", told)


def test_routers_are_kept_and_named_as_kept_even_where_they_are_no_linears(tiny_model):
    planned = _plan(tiny_model("qwen2_moe"), scheme=W4)
    assert {"lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate"} <= set(planned.kept)
    assert "model.layers.1.mlp.experts.3.down_proj" in planned.schemes


def test_a_budget_is_planned_at_its_smallest_candidates_until_it_is_allotted(tiny_llama):
    folder = tiny_llama()
    candidates = [W4, {"weights": {"bits": 8}}]
    budget = _plan(folder, target_bits=5.0, candidates=candidates)
    least = _plan(folder, scheme=W4)
    assert not budget.allotted
    assert budget.schemes == least.schemes
    weights = sum(layer.out_features * layer.in_features for layer in least.layers)
    assert budget.size_bytes - least.size_bytes == weights // 16


def test_what_an_allocation_gave_is_taken_as_it_is(tiny_llama):
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"length": 32},
        "methods": [{"name": "rtn"}],
        "target_bits": 5.0,
    }
    recipe = build(Recipe, mapping, registries={QuantMethod: METHODS})
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    given = dict.fromkeys(make_plan(recipe, skeleton).schemes, Scheme(weights=WeightScheme(bits=8)))
    planned = make_plan(recipe, skeleton, given)
    assert planned.allotted
    assert planned.schemes == given
    with pytest.raises(RecipeError, match=r"allocation: model\.layers\.9\.mlp\.up_proj is no Linear"):
        make_plan(recipe, skeleton, {"model.layers.9.mlp.up_proj": Scheme(weights=WeightScheme(bits=8))})


def test_a_cache_needs_attention_with_heads_and_its_scales_are_counted(tiny_llama):
    folder = tiny_llama()
    planned = _plan(
        folder,
        methods=[],
        scheme={"weights": None, "kv_cache": {"bits": 8, "type": "float"}},
    )
    assert planned.attentions == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert planned.layers == ()
    assert planned.size_bytes == planned.base_size_bytes + 2 * 2 * 2
