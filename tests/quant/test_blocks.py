"""Walking a model block by block is compared with transformers' own forward of the whole model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.blocks import Skeleton, UnsupportedModel, input_statistics, linear_sets, run_block
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
    hidden, calls = skeleton.enter(IDS)
    assert torch.equal(hidden, expected[0])
    assert _on_meta(skeleton)
    for index in range(2):  # the last of transformers' hidden states is taken after the final norm
        with skeleton.loaded(index) as block:
            hidden = run_block(block, hidden, calls[index])
        torch.testing.assert_close(hidden, expected[index + 1], rtol=1e-5, atol=1e-5)
        assert _on_meta(skeleton)


def test_linears_that_read_one_input_form_a_set_in_the_order_they_run(tiny_llama):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    hidden, calls = skeleton.enter(IDS)
    with skeleton.loaded(1) as block:
        names = {module: name.rpartition(".")[2] for name, module in skeleton.block_linears(1).items()}
        sets = [[names[module] for module in members] for members in linear_sets(block, hidden[:1], calls[1])]
    assert sets == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_a_linear_that_no_token_reaches_stands_alone_and_saw_nothing(tiny_llama):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    hidden, calls = skeleton.enter(IDS)
    with skeleton.loaded(0) as block:
        block.unused = torch.nn.Linear(64, 8)
        assert linear_sets(block, hidden[:1], calls[0])[-1] == (block.unused,)
        assert input_statistics(block, block.unused, [hidden], calls[0]).tokens == 0
        del block.unused


def test_statistics_are_the_sum_of_outer_products_over_all_batches(tiny_llama):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    hidden, calls = skeleton.enter(IDS)
    with skeleton.loaded(0) as block:
        seen: list[torch.Tensor] = []
        handle = block.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
        run_block(block, hidden, calls[0])
        handle.remove()
        inputs = input_statistics(block, block.mlp.down_proj, [hidden[:2], hidden[2:]], calls[0])
    expected = (seen[0].double().t() @ seen[0].double()).float()
    assert inputs.tokens == IDS.numel()
    torch.testing.assert_close(inputs.hessian, expected, rtol=1e-4, atol=1e-4)


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
