"""KV scales under every name that writers have used; a scale that servers would take for 1.0 is refused."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from narrowgauge.quant.formats.base import FormatError, KVScales
from narrowgauge.quant.formats.kv_cache import (
    attentions_with_scales,
    find_kv_scales,
    kv_arguments,
    kv_tensors,
    read_kv_scales,
    read_kv_scheme,
)
from narrowgauge.quant.formats.scheme import KVCacheScheme

ATTENTION = "model.layers.3.self_attn"
SPELLINGS = [
    ("k_scale", "v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("kv_scale", "kv_scale"),
]


@pytest.mark.parametrize(("key", "value"), SPELLINGS)
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)])
def test_every_spelling_is_found(key, value, shape):
    stored = {f"{ATTENTION}.{key}": torch.full(shape, 0.5), f"{ATTENTION}.{value}": torch.full(shape, 0.25)}
    names = find_kv_scales(ATTENTION, stored.__contains__)
    scales = read_kv_scales(names, stored.__getitem__)
    assert scales.value.tolist() == [0.25] * max(1, len(shape) and shape[0])
    assert scales.key.tolist() == [0.25 if key == value else 0.5] * len(scales.value)
    others = [
        f"{ATTENTION}.k_proj.weight_scale",
        f"{ATTENTION}.k_proj.weight",
        "model.layers.4.self_attn.q_proj.weight",
    ]
    assert attentions_with_scales([*stored, *others]) == (ATTENTION,)
    assert find_kv_scales("model.layers.4.self_attn", stored.__contains__) is None


def test_half_a_pair_is_named():
    with pytest.raises(FormatError, match=r"self_attn\.k_scale is stored but .*self_attn\.v_scale is not"):
        find_kv_scales(ATTENTION, {f"{ATTENTION}.k_scale"}.__contains__)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("local", ["k_scale", "v_scale"])
def test_a_scale_that_was_never_observed_is_neither_written_nor_read(bad, local):
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    scales[local] = torch.tensor([1.0, bad])
    with pytest.raises(FormatError, match=rf"self_attn\.{local} is not finite and above zero"):
        kv_tensors(ATTENTION, KVScales(key=scales["k_scale"], value=scales["v_scale"]))
    stored = {f"{ATTENTION}.{name}": tensor for name, tensor in scales.items()}
    with pytest.raises(FormatError, match=rf"self_attn\.{local} is not finite and above zero"):
        read_kv_scales(find_kv_scales(ATTENTION, stored.__contains__), stored.__getitem__)


@pytest.mark.parametrize(("heads", "shape"), [(1, (1,)), (3, (3, 1, 1))])
def test_scales_are_written_as_the_library_shapes_them(heads, shape):
    written = kv_tensors(ATTENTION, KVScales(key=torch.ones(heads), value=torch.ones(heads).bfloat16()))
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == {
        f"{ATTENTION}.k_scale": shape,
        f"{ATTENTION}.v_scale": shape,
    }
    assert written[f"{ATTENTION}.v_scale"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_the_scheme_is_what_the_library_accepts_and_comes_back(kind, granularity):
    scheme = KVCacheScheme(bits=8, type=kind, granularity=granularity)
    arguments = kv_arguments(scheme)
    accepted = QuantizationConfig.model_validate({"config_groups": {}, "kv_cache_scheme": arguments}).kv_cache_scheme
    assert (accepted.num_bits, accepted.type, accepted.symmetric, accepted.dynamic) == (8, kind, True, False)
    assert accepted.strategy == {"tensor": "tensor", "head": "attn_head"}[granularity]
    assert read_kv_scheme(arguments) == scheme


def test_no_scheme_and_the_word_of_autofp8_are_read():
    assert read_kv_scheme(None) is None
    assert kv_arguments(None) is None
    assert read_kv_scheme("static") == KVCacheScheme(bits=8, type="float")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dynamic", "it is 'dynamic'"),
        ({"num_bits": 4, "strategy": "tensor"}, "8 bits, not 4"),
        ({"num_bits": 8, "strategy": "token", "dynamic": True}, "only static symmetric scales"),
        ({"num_bits": 8, "strategy": "tensor", "symmetric": False}, "only static symmetric scales"),
    ],
)
def test_a_scheme_that_is_not_read_is_refused(value, message):
    with pytest.raises(FormatError, match=message):
        read_kv_scheme(value)
