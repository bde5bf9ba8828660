"""Walking a model block by block is compared with transformers' own forward of the whole model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.blocks import Skeleton, UnsupportedModel, run_block

IDS = torch.randint(0, 258, (3, 24), generator=torch.Generator().manual_seed(0))


def _on_meta(skeleton: Skeleton) -> bool:
    return all(parameter.device.type == "meta" for parameter in skeleton.model.parameters())


FAMILIES = "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 mixtral qwen2_moe qwen3_moe cohere".split()  # noqa: SIM905


@pytest.mark.parametrize("family", FAMILIES)
def test_block_after_block_gives_the_hidden_states_of_the_whole_model(tiny_model, family):
    """24 tokens under windows of 8: also blocks that differ in mask and rotary table get what is theirs."""
    folder = tiny_model(family)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = whole(IDS, output_hidden_states=True)
    skeleton = Skeleton(CheckpointReader(folder))
    assert _on_meta(skeleton)
    calls, batches = skeleton.calls(IDS.shape[1]), list(skeleton.enter(IDS, batch=2))
    assert torch.equal(torch.cat(batches), expected.hidden_states[0])
    assert _on_meta(skeleton)
    for index in range(len(skeleton.blocks)):
        with skeleton.loaded(index) as block:
            batches = [run_block(block, batch, calls[index]) for batch in batches]
        assert _on_meta(skeleton)
        if index + 1 < len(skeleton.blocks):  # the last of transformers' hidden states is taken after the final norm
            torch.testing.assert_close(torch.cat(batches), expected.hidden_states[index + 1], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        whole.model.layers = torch.nn.ModuleList()
        whole.model.config.num_hidden_layers = 0
        logits = whole(inputs_embeds=torch.cat(batches)).logits
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_are_the_matrices_of_the_files(tiny_model, family):
    """All but the embedding and the routers, which transformers multiplies without a Linear; lm_head also where it is tied."""
    folder = tiny_model(family)
    skeleton, reader = Skeleton(CheckpointReader(folder)), CheckpointReader(folder)
    stored = {
        name.removesuffix(".weight"): reader.shape(name) for name in reader.names() if len(reader.shape(name)) == 2
    }
    embedding = stored.pop("model.embed_tokens")
    stored.setdefault("lm_head", embedding)
    routers = {name for name in skeleton.routers() if name.endswith(".gate")}
    assert skeleton.linears() == {name: shape for name, shape in stored.items() if name not in routers}
    assert routers == {name for name in stored if name.endswith((".mlp.gate", ".block_sparse_moe.gate"))}
    inside = [name for index in range(len(skeleton.blocks)) for name in skeleton.block_linears(index)]
    assert inside == [name for name in skeleton.linears() if name != "lm_head"]
    for name in inside:
        assert torch.equal(skeleton.weight(name), reader.tensor(f"{name}.weight"))


def test_gates_of_shared_experts_are_among_the_routers(tiny_model):
    skeleton = Skeleton(CheckpointReader(tiny_model("qwen2_moe")))
    assert skeleton.routers() == ("model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate")
    assert "model.layers.1.mlp.shared_expert_gate" in skeleton.linears()


def test_a_block_computes_in_the_dtype_that_was_asked_for(tiny_llama):
    folder = tiny_llama()
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = whole(IDS, output_hidden_states=True).hidden_states[1]
    skeleton = Skeleton(CheckpointReader(folder), dtype=torch.bfloat16)
    (hidden,) = skeleton.enter(IDS, batch=len(IDS))
    with skeleton.loaded(0) as block:
        assert {parameter.dtype for parameter in block.parameters()} == {torch.bfloat16}
        assert torch.equal(run_block(block, hidden, skeleton.calls(IDS.shape[1])[0]), expected)


def test_a_failure_inside_a_block_leaves_no_weights(tiny_llama):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    with pytest.raises(KeyError), skeleton.loaded(0):
        raise KeyError
    batches = skeleton.enter(IDS)
    next(batches)
    batches.close()
    assert _on_meta(skeleton)


def test_blocks_that_are_given_what_depends_on_the_tokens_are_refused(tiny_llama, monkeypatch):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    base = skeleton.model.base_model
    plain = type(base).forward

    def forward(input_ids, **named):
        return plain(base, input_ids=input_ids, per_layer=input_ids * 2, **named)

    monkeypatch.setattr(base, "forward", forward)
    with pytest.raises(
        UnsupportedModel, match="LlamaForCausalLM: its decoder blocks are given more than hidden states"
    ):
        skeleton.calls(8)


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
