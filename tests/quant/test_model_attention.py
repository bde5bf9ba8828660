"""Ranges of keys and values as attention gets them, against the cache that transformers fills."""

import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.attention import observe_kv
from narrowgauge.quant.model.blocks import Skeleton, run_block

IDS = torch.randint(0, 258, (3, 24), generator=torch.Generator().manual_seed(0))
FAMILIES = "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 mixtral qwen2_moe qwen3_moe cohere".split()  # noqa: SIM905


@pytest.mark.parametrize("family", FAMILIES)
def test_ranges_of_keys_and_values_are_those_of_a_cache(tiny_model, family):
    folder = tiny_model(family)
    cache = DynamicCache()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(IDS, use_cache=True, **{name: cache})
    skeleton = Skeleton(CheckpointReader(folder))
    calls, batches = skeleton.calls(IDS.shape[1]), list(skeleton.enter(IDS, batch=2))
    for index in range(len(skeleton.blocks)):
        part = skeleton.attention(index)
        assert part is not None
        assert (part.name, part.kv_heads) == (f"model.layers.{index}.self_attn", 2)
        with skeleton.loaded(index) as block, observe_kv(block) as seen:
            batches = [run_block(block, batch, calls[index]) for batch in batches]
        for mine, theirs in ((seen.key, cache.layers[index].keys), (seen.value, cache.layers[index].values)):
            torch.testing.assert_close(mine, theirs.abs().amax((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_watching_leaves_the_output_and_the_model_as_they_were(tiny_model):
    skeleton = Skeleton(CheckpointReader(tiny_model("gemma2")))
    with skeleton.loaded(0) as block:
        hidden, call = skeleton.probe(0)
        expected = run_block(block, hidden, call)
        with observe_kv(block):
            assert torch.equal(run_block(block, hidden, call), expected)
        assert block.self_attn.config._attn_implementation == "eager"
        assert torch.equal(run_block(block, hidden, call), expected)


def test_what_was_never_seen_or_is_all_zero_has_no_range(tiny_model):
    """llm-compressor#2853, #2117: a scale of zero must not come out of what was not observed."""
    skeleton = Skeleton(CheckpointReader(tiny_model("llama")))
    with skeleton.loaded(0) as block:
        hidden, call = skeleton.probe(0)
        with observe_kv(block) as seen:
            assert seen.key is None
            block.self_attn.v_proj.weight.zero_()
            run_block(block, hidden, call)
        assert seen.key is not None
        assert seen.value is None
