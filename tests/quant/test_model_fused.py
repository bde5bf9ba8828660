"""Which Linears engines stack: vLLM's rule, by name."""

from narrowgauge.quant.formats.scheme import Scheme, WeightScheme
from narrowgauge.quant.model.fused import split_units, units

FOUR, EIGHT = Scheme(weights=WeightScheme(bits=4, group=64)), Scheme(weights=WeightScheme(bits=8))
LAYER = [
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


def test_a_decoder_layer_has_four_units_in_the_order_they_run():
    names = [f"model.layers.{layer}.{name}" for layer in (0, 11) for name in LAYER]
    found = units(names)
    assert [len(members) for members in found.values()] == [3, 1, 2, 1] * 2
    assert found["model.layers.11.self_attn.{q_proj,k_proj,v_proj}"] == tuple(names[7:10])
    assert [name for members in found.values() for name in members] == names


def test_all_experts_of_a_layer_are_two_units_and_a_shared_expert_its_own():
    parent = "model.layers.3.block_sparse_moe"
    names = [f"{parent}.experts.{expert}.{name}" for expert in range(12) for name in ("w1", "w3", "w2")]
    found = units([*names, f"{parent}.shared_expert.gate_proj", f"{parent}.shared_expert.up_proj"])
    assert {unit: len(members) for unit, members in found.items()} == {
        f"{parent}.experts.*.{{w1,w3}}": 24,
        f"{parent}.experts.*.w2": 12,
        f"{parent}.shared_expert.{{gate_proj,up_proj}}": 2,
    }


def test_layers_stacked_already_stand_alone():
    names = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj")
    assert list(units(names)) == list(names)


def test_a_split_unit_is_told_once_for_all_layers_that_are_split_alike():
    schemes = {f"model.layers.{layer}.{name}": FOUR for layer in range(5) for name in LAYER}
    assert split_units(schemes) == ()
    for layer in range(4):
        schemes[f"model.layers.{layer}.self_attn.v_proj"] = EIGHT
    (told,) = split_units(schemes)
    assert told.startswith(
        "model.layers.*.self_attn.{q_proj,k_proj,v_proj} differ (q_proj W4A16 g64, k_proj W4A16 g64, v_proj W8A16) in 4 layers:"
    )
    schemes["model.layers.4.mlp.up_proj"] = None
    assert "up_proj 16 bits) in 1 layer: vLLM" in split_units(schemes)[1]
