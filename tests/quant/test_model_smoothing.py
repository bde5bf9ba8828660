"""Moving scale must leave the function: smoothed blocks against the same blocks before, in fp32."""

import pytest
import torch

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.blocks import Skeleton, origin, run_block
from narrowgauge.quant.model.smoothing import sites

IDS = torch.randint(0, 258, (3, 24), generator=torch.Generator().manual_seed(0))
FAMILIES = (
    "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 mixtral qwen2_moe qwen3_moe cohere".split()  # noqa: SIM905
)
QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _scales(count: int) -> torch.Tensor:
    return torch.empty(count).uniform_(0.3, 3.0, generator=torch.Generator().manual_seed(count))


def _local(name: str) -> str:
    return name.rpartition(".")[2]


def _found(skeleton: Skeleton, index: int) -> dict[str, tuple[str, ...]]:
    """Producer -> consumers of one block, by the last part of their names."""
    with skeleton.loaded(index) as block:
        return {
            _local(site.name): tuple(_local(origin(consumer).name) for consumer in site.consumers)
            for site in sites(block, *skeleton.probe(index))
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoothed_model_computes_what_it_did(tiny_model, family, dtype):
    """Also where norms are stored in bfloat16: their rounding goes into the columns."""
    skeleton = Skeleton(CheckpointReader(tiny_model(family, dtype=dtype)))
    calls, (hidden,) = skeleton.calls(IDS.shape[1]), skeleton.enter(IDS, batch=len(IDS))
    for index in range(len(skeleton.blocks)):
        with skeleton.loaded(index) as block:
            expected = run_block(block, hidden, calls[index])
            before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
            found = sites(block, *skeleton.probe(index))
            for site in found:
                site.apply(_scales(site.consumers[0].in_features))
            # A router that is stored at 16 bits is rounded once more, so its weights are left out of this comparison.
            routed = dtype is torch.bfloat16 and any(site.routers for site in found)
            if not routed:
                smoothed = run_block(block, hidden, calls[index])
                torch.testing.assert_close(smoothed, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
            changed = {f"{origin(block).name}.{name}" for name in _changed(skeleton, block, before)}
            assert changed <= {name for site in found for name in site.changed}
            hidden = expected
    assert found


def _changed(skeleton, block, before):
    prefix = origin(block).name
    for name, tensor in block.state_dict().items():
        if not torch.equal(tensor, before[name]):
            owner, _, local = name.rpartition(".")
            yield f"{origin(block.get_submodule(owner)).name}.{local}".removeprefix(f"{prefix}.")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_plain_block_has_four_sites(tiny_model, family):
    assert _found(Skeleton(CheckpointReader(tiny_model(family))), 1) == {
        "input_layernorm": QKV,
        "post_attention_layernorm": GATED,
        "v_proj": ("o_proj",),
        "up_proj": ("down_proj",),
    }


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_norms_after_attention_and_mlp_are_no_sites(tiny_model, family):
    found = _found(Skeleton(CheckpointReader(tiny_model(family))), 0)
    assert found["pre_feedforward_layernorm"] == GATED
    assert "post_attention_layernorm" not in found


def test_one_norm_before_attention_and_mlp_is_one_site(tiny_model):
    assert _found(Skeleton(CheckpointReader(tiny_model("cohere"))), 0)["input_layernorm"] == QKV + GATED


@pytest.mark.parametrize(("family", "expected"), [("llama", False), ("qwen3", True), ("gemma3_text", True)])
def test_a_site_says_that_a_norm_follows_its_consumers(tiny_model, family, expected):
    skeleton = Skeleton(CheckpointReader(tiny_model(family)))
    with skeleton.loaded(0) as block:
        normalized = {_local(site.name): site.normalized for site in sites(block, *skeleton.probe(0))}
    assert normalized.pop("input_layernorm") is expected
    assert not any(normalized.values())


def test_of_a_fused_qkv_only_the_rows_of_values_are_scaled(tiny_model):
    """llm-compressor PR#1451: queries and keys stand in the same weight, and qkv.out is not o.in."""
    skeleton = Skeleton(CheckpointReader(tiny_model("phi3")))
    with skeleton.loaded(0) as block:
        (site,) = [site for site in sites(block, *skeleton.probe(0)) if _local(site.name) == "qkv_proj"]
        before = block.self_attn.qkv_proj.weight.clone()
        site.apply(torch.full((64,), 2.0))
        after = block.self_attn.qkv_proj.weight
        assert torch.equal(after[:96], before[:96])  # 4 query and 2 key heads of 16
        assert torch.equal(after[96:], before[96:] / 2)


def test_of_a_fused_gate_up_only_the_rows_of_up_are_scaled(tiny_model):
    skeleton = Skeleton(CheckpointReader(tiny_model("phi3")))
    with skeleton.loaded(0) as block:
        (site,) = [site for site in sites(block, *skeleton.probe(0)) if _local(site.name) == "gate_up_proj"]
        assert torch.equal(site.rows, torch.arange(128, 256))


def test_channels_that_share_a_value_head_get_their_geometric_mean(tiny_model):
    skeleton = Skeleton(CheckpointReader(tiny_model("llama")))
    with skeleton.loaded(0) as block:
        (site,) = [site for site in sites(block, *skeleton.probe(0)) if _local(site.name) == "v_proj"]
        scales = _scales(64)
        tied = site.tie(scales).view(2, 2, 16)  # kv head, query head of it, channel
    expected = scales.view(2, 2, 16).log().mean(1, keepdim=True).exp().expand(2, 2, 16)
    torch.testing.assert_close(tied, expected)


def test_dense_and_mixed_layers_of_one_model_are_resolved_apart(tiny_model):
    """llm-compressor#2514: one mapping for all layers took the norms of both kinds at once."""
    skeleton = Skeleton(CheckpointReader(tiny_model("qwen2_moe")))
    dense, mixed = _found(skeleton, 0), _found(skeleton, 1)
    assert dense["post_attention_layernorm"] == GATED
    assert mixed["post_attention_layernorm"] == GATED * 5  # the shared expert and four others
    with skeleton.loaded(1) as block:
        (site,) = [s for s in sites(block, *skeleton.probe(1)) if _local(s.name) == "post_attention_layernorm"]
        assert [_local(origin(router).name) for router in site.routers] == ["gate", "shared_expert_gate"]
        assert all(origin(consumer).name.startswith("model.layers.1.") for consumer in site.consumers)


def test_a_channel_that_the_norm_sets_to_zero_stays(tiny_model):
    skeleton = Skeleton(CheckpointReader(tiny_model("llama", dtype=torch.bfloat16)))
    with skeleton.loaded(0) as block:
        block.input_layernorm.weight[3] = 0
        hidden, call = skeleton.probe(0)
        expected = run_block(block, hidden, call)
        (site,) = [site for site in sites(block, hidden, call) if _local(site.name) == "input_layernorm"]
        site.apply(_scales(64))
        assert block.input_layernorm.weight[3] == 0
        torch.testing.assert_close(run_block(block, hidden, call), expected, rtol=1e-5, atol=1e-4)


def test_a_norm_whose_output_is_also_the_residual_is_no_site(tiny_model):
    """As in a block that normalizes its input for good: dividing the norm would change what is added later."""
    skeleton = Skeleton(CheckpointReader(tiny_model("llama")))
    with skeleton.loaded(0) as block:
        block.mlp.register_forward_hook(lambda module, arguments, output: output + arguments[0])
        found = {_local(site.name) for site in sites(block, *skeleton.probe(0))}
        block.mlp._forward_hooks.clear()
    assert found == {"input_layernorm", "v_proj", "up_proj"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_in_bfloat16_finds_the_same_sites(tiny_model, family):
    folder = tiny_model(family, dtype=torch.bfloat16)
    here = Skeleton(CheckpointReader(folder))
    there = Skeleton(CheckpointReader(folder), device=torch.device("cuda"), dtype=torch.bfloat16)
    for index in range(len(here.blocks)):
        assert _found(there, index) == _found(here, index)
