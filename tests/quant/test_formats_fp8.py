"""Native FP8 is compared with transformers' dequantizer where that is right: blocks that divide the weight."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from narrowgauge.quant.formats.base import FormatError, KVScales, QuantizedWeight, StoredTensor
from narrowgauge.quant.formats.fp8 import NativeFP8
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest

FORMAT = NativeFP8()
GROUPS = ActivationScheme(bits=8, type="float", granularity="group", group=128)
BLOCK = Scheme(weights=WeightScheme(bits=8, type="float", block=(128, 128)), activations=GROUPS)
TENSOR = WeightScheme(bits=8, type="float", per_tensor=True)
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
}


def _rounded(rows: int, columns: int, scheme: WeightScheme = BLOCK.weights) -> QuantizedWeight:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    return round_to_nearest(weight * torch.linspace(0.1, 3, columns), scheme)


def _layout(config, tensors: dict[str, torch.Tensor]):
    headers = {"a": {k: StoredTensor(dtype=DTYPES[t.dtype], shape=tuple(t.shape)) for k, t in tensors.items()}}
    return FORMAT.layout(config, headers, lambda name: tensors[name.removeprefix("a.")])


def _config(**changes):
    return {**FORMAT.config({"a": BLOCK}, ("lm_head",)), **changes}


def test_the_config_has_the_keys_of_transformers_and_of_vllm():
    assert _config() == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
        "ignored_layers": ["lm_head"],
    }


def test_whole_blocks_are_read_as_transformers_reads_them():
    tensors = FORMAT.pack(_rounded(256, 384), BLOCK)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "weight": torch.float8_e4m3fn,
        "weight_scale_inv": torch.float32,
    }
    theirs = Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
    assert torch.equal(FORMAT.dequantize(tensors, BLOCK, torch.float32), theirs)
    assert _layout(_config(), tensors).linears == {"a": BLOCK}


def test_ragged_blocks_are_cut_by_the_size_in_the_config_not_by_the_shape():
    rounded = _rounded(576, 448)
    tensors = FORMAT.pack(rounded, BLOCK)
    assert tensors["weight"].shape == (576, 448)
    assert tensors["weight_scale_inv"].shape == (5, 4)
    assert _layout(_config(), tensors).linears == {"a": BLOCK}
    expected = torch.empty(576, 448)
    for row in range(5):
        for column in range(4):
            cut = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
            expected[cut] = tensors["weight"][cut].float() * tensors["weight_scale_inv"][row, column]
    assert torch.equal(FORMAT.dequantize(tensors, BLOCK, torch.float32), expected)
    by_shape = tensors["weight_scale_inv"].repeat_interleave(128, 0)[:576].repeat_interleave(448 // 4, 1)
    assert not torch.equal(tensors["weight"].float() * by_shape, expected), "the input tells the two apart"


def test_ragged_layers_are_not_offered_for_writing_since_loaders_misread_them():
    assert FORMAT.refusal((256, 384), BLOCK) is None
    assert FORMAT.refusal((256, 448), BLOCK).startswith("in_features 448 is not a multiple of the block's 128")
    assert FORMAT.refusal((576, 256), BLOCK).startswith("out_features 576 is not a multiple of the block's 128")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(weights=WeightScheme(bits=8, type="float")), "FP8 weights with one scale a block"),
        (Scheme(weights=WeightScheme(bits=4, group=32)), "FP8 weights with one scale a block"),
        (Scheme(weights=BLOCK.weights), "round activations by token in groups of 128"),
        (
            Scheme(weights=BLOCK.weights, activations=ActivationScheme(bits=8, type="float")),
            "round activations by token in groups of 128",
        ),
    ],
)
def test_schemes_that_loaders_would_run_otherwise_are_refused(scheme, message):
    assert message in FORMAT.refusal((256, 256), scheme)
    with pytest.raises(FormatError, match="a: .*" + message):
        FORMAT.config({"a": scheme}, ())


def test_kv_scales_and_two_block_sizes_have_no_place():
    with pytest.raises(FormatError, match="no KV scales"):
        FORMAT.config({"a": BLOCK}, (), KVCacheScheme(bits=8, type="float"))
    with pytest.raises(FormatError, match="no KV scales"):
        FORMAT.kv_tensors("a", KVScales(key=torch.ones(1), value=torch.ones(1)))
    small = Scheme(
        weights=WeightScheme(bits=8, type="float", block=(64, 64)),
        activations=ActivationScheme(bits=8, type="float", granularity="group", group=64),
    )
    with pytest.raises(FormatError, match="one block size for the whole model"):
        FORMAT.config({"a": BLOCK, "b": small}, ())


@pytest.mark.parametrize(
    ("tensors", "activations"),
    [
        (("weight_scale_inv", "activation_scale"), "static"),
        (("weight_scale", "input_scale"), "static"),
        (("weight_scale",), "dynamic"),
    ],
    ids=["transformers", "vllm", "vllm dynamic"],
)
def test_one_scale_a_tensor_is_read_under_both_names(tensors, activations):
    rounded = _rounded(64, 96, TENSOR)
    stored = {"weight": rounded.codes, tensors[0]: rounded.scales.reshape(()).float()}
    stored |= {name: torch.tensor(0.25) for name in tensors[1:]}
    layout = _layout({"quant_method": "fp8", "activation_scheme": activations}, stored)
    static = activations == "static"
    assert layout.linears["a"] == Scheme(
        weights=TENSOR,
        activations=ActivationScheme(
            bits=8, type="float", granularity="tensor" if static else "token", dynamic=not static
        ),
    )
    back = FORMAT.unpack(stored, layout.linears["a"])
    assert torch.equal(
        FORMAT.dequantize(stored, layout.linears["a"], torch.float32), rounded.codes.float() * rounded.scales
    )
    assert (back.input_scale is None) == (not static)
    assert not static or back.input_scale.tolist() == [0.25]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.bfloat16])
def test_scales_that_are_powers_of_two_are_read_in_each_dtype_they_are_stored_in(dtype):
    powers = torch.tensor([[2.0**-5, 2.0**-7]])
    stored = (powers.log2() + 127).to(torch.uint8) if dtype == torch.uint8 else powers.to(dtype)
    tensors = {"weight": _rounded(128, 256).codes, "weight_scale_inv": stored}
    assert _layout(_config(), tensors).linears == {"a": BLOCK}
    expected = tensors["weight"].float() * powers.repeat_interleave(128, 1)
    assert torch.equal(FORMAT.dequantize(tensors, BLOCK, torch.float32), expected)


def test_a_layer_that_the_config_leaves_out_but_the_file_quantizes_is_told():
    for key in ("modules_to_not_convert", "ignored_layers"):
        config = {**_config(modules_to_not_convert=None, ignored_layers=None), key: ["a"]}
        layout = _layout(config, FORMAT.pack(_rounded(128, 128), BLOCK))
        assert layout.linears == {"a": BLOCK}
        assert layout.warnings == ("a: config.json says it is not quantized, but it is stored as FP8; it is read so",)


def test_kept_names_that_name_nothing_are_told():
    layout = _layout(_config(ignored_layers=["lm_head", "visual.gate"]), FORMAT.pack(_rounded(128, 128), BLOCK))
    assert layout.warnings == ("modules that config.json keeps: 'visual.gate' match no module of the checkpoint",)


def test_what_cannot_be_read_is_named():
    tensors = FORMAT.pack(_rounded(256, 256), BLOCK)
    with pytest.raises(FormatError, match=r"a.weight_scale_inv has \[2, 2\] scales, but .* no weight_block_size"):
        _layout(_config(weight_block_size=None), tensors)
    with pytest.raises(FormatError, match=r"does not fit a weight \[256, 256\] in blocks of \[64, 64\]"):
        _layout(_config(weight_block_size=[64, 64]), tensors)
    with pytest.raises(FormatError, match="must be two positive numbers, not '128x128'"):
        _layout(_config(weight_block_size="128x128"), tensors)
    with pytest.raises(FormatError, match=r"a\.weight is stored as I8; native fp8 is read as F8_E4M3"):
        _layout(_config(), tensors | {"weight": torch.zeros(256, 256, dtype=torch.int8)})
    with pytest.raises(FormatError, match="weight_scale_inv holds NaN"):
        FORMAT.unpack(tensors | {"weight_scale_inv": torch.full((2, 2), float("nan"))}, BLOCK)
    with pytest.raises(FormatError, match="do not fit W8A8-fp8-block"):
        FORMAT.unpack(tensors | {"weight_scale_inv": torch.ones(3, 3)}, BLOCK)
    dead = QuantizedWeight(codes=tensors["weight"], scales=torch.zeros(2, 2), block=(128, 128))
    with pytest.raises(FormatError, match="not finite and above zero"):
        FORMAT.pack(dead, BLOCK)
