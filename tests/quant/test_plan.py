"""The plan says before any work what the checkpoint will be; the checkpoint itself is the oracle."""

import pytest

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sequential import plan, quantize
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
