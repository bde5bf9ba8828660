"""Walking a model block by block is compared with transformers' own forward of the whole model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.blocks import Skeleton, UnsupportedModel, run_block
from narrowgauge.quant.formats.checkpoint import CheckpointReader

IDS = torch.randint(0, 258, (3, 24), generator=torch.Generator().manual_seed(0))


def _on_meta(skeleton: Skeleton) -> bool:
    return all(parameter.device.type == "meta" for parameter in skeleton.model.parameters())


def test_block_after_block_gives_the_hidden_states_of_the_whole_model(tiny_llama):
    folder = tiny_llama(num_hidden_layers=3)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = whole(IDS, output_hidden_states=True).hidden_states
    skeleton = Skeleton(CheckpointReader(folder))
    assert _on_meta(skeleton)
    calls, (hidden,) = skeleton.calls(IDS.shape[1]), skeleton.enter(IDS, batch=len(IDS))
    assert torch.equal(hidden, expected[0])
    assert _on_meta(skeleton)
    for index in range(2):  # the last of transformers' hidden states is taken after the final norm
        with skeleton.loaded(index) as block:
            hidden = run_block(block, hidden, calls[index])
        torch.testing.assert_close(hidden, expected[index + 1], rtol=1e-5, atol=1e-5)
        assert _on_meta(skeleton)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"model_type": "no_such_model"}, "transformers cannot build this model"), ({}, "transformers cannot build")],
)
def test_a_model_that_transformers_does_not_know_is_one_line(tiny_llama, config, message):
    folder = tiny_llama()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message) as caught:
        Skeleton(CheckpointReader(folder))
    assert "\n" not in str(caught.value)
