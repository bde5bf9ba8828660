"""The format is compared with the library of the same name: its compressors read ours and we read theirs."""

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    NaiveQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name

from narrowgauge.quant.formats.base import FormatError, QuantizedWeight, StoredTensor, dequantize_weight
from narrowgauge.quant.formats.compressed_tensors import CompressedTensors
from narrowgauge.quant.formats.scheme import ActivationScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest

FORMAT = CompressedTensors()
COMPRESSORS = {
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
    "naive-quantized": NaiveQuantizationCompressor,
}
INT8_TOKENS = ActivationScheme(bits=8, type="int")
FP8_TOKENS = ActivationScheme(bits=8, type="float")
FP8_STATIC = ActivationScheme(bits=8, type="float", granularity="tensor", dynamic=False)
FP8_GROUPS = ActivationScheme(bits=8, type="float", granularity="group", group=128)
W4 = Scheme(weights=WeightScheme(bits=4, group=32))
FP8 = WeightScheme(bits=8, type="float")
FP8_BLOCK = WeightScheme(bits=8, type="float", block=(128, 128))
SCHEMES = {
    "w2": Scheme(weights=WeightScheme(bits=2, group=32)),
    "w4": W4,
    "w4 asym": Scheme(weights=WeightScheme(bits=4, group=32, symmetric=False)),
    "w4 channel": Scheme(weights=WeightScheme(bits=4)),
    "w8 asym channel": Scheme(weights=WeightScheme(bits=8, symmetric=False)),
    "w8a8": Scheme(weights=WeightScheme(bits=8), activations=INT8_TOKENS),
    "w8a8 asym": Scheme(weights=WeightScheme(bits=8, symmetric=False), activations=INT8_TOKENS),
    "w8a8 group": Scheme(weights=WeightScheme(bits=8, group=32), activations=INT8_TOKENS),
    "w8a8 static": Scheme(
        weights=WeightScheme(bits=8),
        activations=ActivationScheme(bits=8, type="int", granularity="tensor", dynamic=False),
    ),
    "w4a8": Scheme(weights=WeightScheme(bits=4, group=32), activations=INT8_TOKENS),
    "fp8 weights": Scheme(weights=FP8),
    "fp8 static": Scheme(weights=WeightScheme(bits=8, type="float", per_tensor=True), activations=FP8_STATIC),
    "fp8 dynamic": Scheme(weights=FP8, activations=FP8_TOKENS),
    "fp8 block": Scheme(weights=FP8_BLOCK, activations=FP8_GROUPS),
    "fp8 block weights": Scheme(weights=FP8_BLOCK),
}


def _rounded(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rounded = round_to_nearest(weight, scheme.weights)
    static = scheme.activations is not None and not scheme.activations.dynamic
    return QuantizedWeight(
        codes=rounded.codes,
        scales=rounded.scales,
        zeros=rounded.zeros,
        block=rounded.block,
        input_scale=torch.tensor([0.125], dtype=dtype) if static else None,
    )


def _stored(modules: dict[str, dict[str, torch.Tensor]]) -> tuple[dict, dict[str, torch.Tensor]]:
    """What a reader hands to `layout`: headers by module, and the tensors themselves."""
    names = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}
    headers = {
        module: {
            local: StoredTensor(dtype=names.get(tensor.dtype, "BF16"), shape=tuple(tensor.shape))
            for local, tensor in tensors.items()
        }
        for module, tensors in modules.items()
    }
    return headers, {f"{m}.{local}": t for m, tensors in modules.items() for local, t in tensors.items()}


def _layout(config, modules: dict[str, dict[str, torch.Tensor]]):
    headers, tensors = _stored(modules)
    return FORMAT.layout(config, headers, tensors.__getitem__)


def _packed(scheme: Scheme = W4, shape: tuple[int, int] = (16, 64)) -> dict[str, torch.Tensor]:
    return FORMAT.pack(_rounded(scheme, shape), scheme)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(16, 128), (130, 256)])
def test_the_library_reads_the_same_weight_from_our_tensors(name, shape):
    scheme = SCHEMES[name]
    rounded = _rounded(scheme, shape)
    tensors = FORMAT.pack(rounded, scheme)
    group = QuantizationConfig.model_validate(FORMAT.config({"a": scheme}, ())).config_groups["group_0"]
    theirs = COMPRESSORS[group.format].decompress(dict(tensors), group)["weight"]
    assert torch.equal(FORMAT.dequantize(tensors, scheme, torch.bfloat16), theirs)
    back = FORMAT.unpack(tensors, scheme)
    assert torch.equal(back.codes.view(torch.int8), rounded.codes.view(torch.int8))
    assert torch.equal(back.scales, rounded.scales)
    assert (back.zeros is None) == scheme.weights.symmetric
    assert scheme.weights.symmetric or torch.equal(back.zeros, rounded.zeros)
    assert FORMAT.stored_bytes(shape, scheme, 2) == sum(t.numel() * t.element_size() for t in tensors.values())
    assert _layout(FORMAT.config({"a": scheme}, ()), {"a": tensors}).linears == {"a": scheme}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_stores_the_same_bytes_as_we_do(name):
    scheme = SCHEMES[name]
    rounded = _rounded(scheme, (130, 256), torch.float32)
    ours = FORMAT.pack(rounded, scheme)
    group = QuantizationConfig.model_validate(FORMAT.config({"a": scheme}, ())).config_groups["group_0"]
    state = {"weight": dequantize_weight(rounded, torch.float32), "weight_scale": ours["weight_scale"]}
    if rounded.zeros is not None:
        state["weight_zero_point"] = rounded.zeros
    theirs = COMPRESSORS[group.format].compress(state, group)
    assert set(ours) - {"input_scale"} == set(theirs)
    for local, tensor in theirs.items():
        assert ours[local].dtype == tensor.dtype
        assert torch.equal(ours[local].double(), tensor.double()), local


def test_only_keys_that_old_and_new_releases_accept_are_written():
    static = FORMAT.config({"a": SCHEMES["fp8 block"], "b": SCHEMES["fp8 static"], "c": W4}, ("lm_head",))
    assert static["format"] == "mixed-precision"
    weights = {"dynamic", "num_bits", "strategy", "symmetric", "type"}
    by_strategy = {"block": {"block_structure"}, "group": {"group_size"}, "tensor": set()}
    for group in static["config_groups"].values():
        assert set(group) == {"format", "input_activations", "output_activations", "targets", "weights"}
        for arguments in (group["weights"], group["input_activations"] or group["weights"]):
            assert set(arguments) == weights | by_strategy[arguments["strategy"]]


def test_one_scheme_targets_every_linear_and_several_name_their_layers():
    eight = SCHEMES["w8a8"]
    assert FORMAT.config({"a": W4}, ("lm_head",))["config_groups"]["group_0"]["targets"] == ["Linear"]
    config = FORMAT.config({"a": W4, "b": eight, "c": W4}, ("lm_head",))
    assert [group["targets"] for group in config["config_groups"].values()] == [["a", "c"], ["b"]]
    modules = {"a": _packed(), "b": _packed(eight), "c": _packed()}
    layout = _layout(config, modules)
    assert layout.linears == {"a": W4, "b": eight, "c": W4}
    assert layout.warnings == ()


def test_layers_that_vllm_fuses_resolve_to_the_one_group_of_their_parts():
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    schemes = {f"{attention}{part}_proj": SCHEMES["w8a8"] for part in "qkvo"}
    schemes |= {f"{mlp}{part}_proj": W4 for part in ("gate", "up", "down")}
    groups = FORMAT.config(schemes, ("lm_head",))["config_groups"].values()
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for name, expected in ((f"{attention}qkv_proj", [True, False]), (f"{mlp}gate_up_proj", [False, True])):
        assert [any(match_name(name, target, fused) for target in group["targets"]) for group in groups] == expected


def test_experts_of_one_scheme_are_one_regex_that_catches_nothing_else():
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj": W4
        for layer in (0, 1)
        for expert in range(3)
        for kind in ("gate", "up")
    }
    other = {"model.layers.1.mlp.experts.2.up_proj": SCHEMES["w8a8"], "model.layers.0.mlp.shared.up_proj": W4}
    config = FORMAT.config(experts | other, ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate"))
    first, second = (group["targets"] for group in config["config_groups"].values())
    assert first == [
        "model.layers.0.mlp.shared.up_proj",
        "model.layers.1.mlp.experts.0.up_proj",
        "model.layers.1.mlp.experts.1.up_proj",
        r"re:model\.layers\.0\.mlp\.experts\.\d+\.gate_proj$",
        r"re:model\.layers\.0\.mlp\.experts\.\d+\.up_proj$",
        r"re:model\.layers\.1\.mlp\.experts\.\d+\.gate_proj$",
    ]
    assert second == ["model.layers.1.mlp.experts.2.up_proj"]
    modules = {name: _packed(scheme) for name, scheme in (experts | other).items()}
    assert _layout(config, modules).linears == experts | other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_status": "frozen"}, "is 'frozen', not 'compressed'"),
        ({"quantization_status": None}, "is None, not 'compressed'"),
        ({"config_groups": None}, "config_groups is missing"),
        ({"ignore": ["re:.*b"]}, "ab is stored in quantized form, but quantization_config leaves it out"),
        ({"format": "marlin-24"}, "stored sparse"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "stored sparse"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "rotates activations"),
        ({"kv_cache_scheme": {"num_bits": 8, "strategy": "tensor", "dynamic": True}}, "only static symmetric scales"),
    ],
)
def test_a_config_that_loaders_would_misread_is_refused(change, message):
    config = {**FORMAT.config({"ab": W4}, ()), **change}
    with pytest.raises(FormatError, match=message):
        _layout(config, {"ab": _packed()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "read are pack-quantized"),
        ({"output_activations": {"num_bits": 8}}, "rounded outputs are not read"),
        ({"targets": []}, "targets is missing"),
        ({"weights": None}, "weights is missing"),
        ({"input_activations": {"num_bits": 4, "strategy": "token", "dynamic": True}}, "activations have 8 bits"),
        (
            {"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False}},
            "asymmetric activations are not supported",
        ),
    ],
)
def test_a_group_that_cannot_be_read_is_refused(change, message):
    config = FORMAT.config({"a": W4}, ())
    config["config_groups"]["group_0"] |= change
    with pytest.raises(FormatError, match=message):
        _layout(config, {"a": _packed()})


@pytest.mark.parametrize(
    "change",
    [
        {"actorder": "group"},
        {"actorder": "static", "observer": "mse", "observer_kwargs": {}, "scale_dtype": None},
        {"strategy": None},
        {"strategy": "GROUP", "type": "INT"},
    ],
)
def test_spellings_of_older_writers_are_read(change):
    config = FORMAT.config({"a": W4}, ())
    config["config_groups"]["group_0"]["weights"] |= change
    assert _layout(config, {"a": _packed()}).linears == {"a": W4}


def test_a_block_in_words_is_read():
    config = FORMAT.config({"a": SCHEMES["fp8 block"]}, ())
    config["config_groups"]["group_0"]["weights"]["block_structure"] = "128x128"
    modules = {"a": _packed(SCHEMES["fp8 block"], (576, 256))}
    assert _layout(config, modules).linears == {"a": SCHEMES["fp8 block"]}


def test_a_regex_target_is_anchored_at_its_start_only():
    config = FORMAT.config({"x": W4}, ())
    config["config_groups"]["group_0"]["targets"] = ["re:model.*gate"]
    assert _layout(config, {"model.mlp.gate_proj": _packed()}).linears == {"model.mlp.gate_proj": W4}
    with pytest.raises(FormatError, match="leaves it out"):
        _layout(config, {"vision.model.gate": _packed()})


@pytest.mark.parametrize(
    ("said", "stored", "warning"),
    [
        ("w4", "w8 asym channel", "config.json says bits 4, the tensors 8"),
        ("w4", "w4 asym", "config.json says symmetric True, the tensors False"),
        ("w4 asym", "w4", "config.json says symmetric False, the tensors True"),
        ("w4 channel", "w4", "config.json says granularity channel, the tensors group"),
        ("w4", "fp8 dynamic", "config.json says type int, the tensors float"),
        ("fp8 dynamic", "fp8 static", "config.json says granularity channel, the tensors tensor"),
    ],
)
def test_where_the_config_differs_the_tensors_are_read_and_a_warning_says_so(said, stored, warning):
    modules = {"a": _packed(SCHEMES[stored])}
    layout = _layout(FORMAT.config({"a": SCHEMES[said]}, ()), modules)
    assert layout.linears["a"].weights == SCHEMES[stored].weights
    assert any(warning in text for text in layout.warnings)


def test_an_asymmetric_file_always_holds_zero_points_though_they_be_all_zero():
    scheme = SCHEMES["w4 asym"]
    rounded = _rounded(scheme, (60, 64))
    flat = QuantizedWeight(codes=rounded.codes, scales=rounded.scales, zeros=torch.zeros_like(rounded.zeros))
    tensors = FORMAT.pack(flat, scheme)
    assert tensors["weight_zero_point"].shape == (8, 2)  # ceil(60 / 8) words for each group
    assert torch.equal(FORMAT.unpack(tensors, scheme).zeros, flat.zeros)


def test_permuted_columns_of_old_files_are_read_and_never_written():
    tensors = _packed()
    g_idx = torch.tensor([1, 0] * 32, dtype=torch.int32)
    back = FORMAT.unpack(tensors | {"weight_g_idx": g_idx}, W4)
    expected = back.codes.float() * back.scales.float()[:, g_idx.long()]
    assert torch.equal(dequantize_weight(back, torch.float32), expected)
    assert FORMAT.unpack(tensors | {"weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}, W4).column_groups is None
    assert FORMAT.unpack(tensors | {"weight_g_idx": torch.arange(64).int() // 32}, W4).column_groups is None
    with pytest.raises(FormatError, match="activation order on disk"):
        FORMAT.pack(back, W4)
    with pytest.raises(FormatError, match="does not fit 64 columns in 2 groups"):
        FORMAT.unpack(tensors | {"weight_g_idx": g_idx * 2}, W4)


def test_ignore_entries_that_name_nothing_are_told():
    config = FORMAT.config({"model.layers.0.mlp.up_proj": W4}, ("model.layers.0.mlp.gate", "lm_head"))
    config["ignore"] += ["re:.*vision.*", "language_model.gate", "LlamaAttention", "model.layers.0"]
    modules = {"model.layers.0.mlp.up_proj": _packed(), "model.layers.0.mlp.gate": {"weight": torch.zeros(2, 2)}}
    layout = _layout(config, modules)
    assert layout.warnings == (
        "quantization_config.ignore: 're:.*vision.*', 'language_model.gate' match no module of the checkpoint",
    )


@pytest.mark.parametrize("name", ["w4", "w8a8", "fp8 block", "fp8 static"])
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_servers_would_answer_garbage_with_is_not_written(name, bad):
    rounded = _rounded(SCHEMES[name], (16, 128))
    scales = rounded.scales.clone()
    scales[-1, -1] = bad
    with pytest.raises(FormatError, match="not finite and above zero"):
        FORMAT.pack(QuantizedWeight(codes=rounded.codes, scales=scales, block=rounded.block), SCHEMES[name])


def test_a_static_scheme_needs_the_input_scale_in_writing_and_in_reading():
    scheme = SCHEMES["fp8 static"]
    rounded = _rounded(scheme, (16, 128))
    tensors = FORMAT.pack(rounded, scheme)
    assert tensors["input_scale"].shape == (1,)
    assert torch.equal(FORMAT.unpack(tensors, scheme).input_scale, rounded.input_scale)
    for scale, message in ((None, "needs a calibrated input_scale"), (torch.zeros(1), "input_scale is not finite")):
        with pytest.raises(FormatError, match=message):
            FORMAT.pack(QuantizedWeight(codes=rounded.codes, scales=rounded.scales, input_scale=scale), scheme)
    with pytest.raises(FormatError, match="input_scale is missing"):
        FORMAT.unpack({name: t for name, t in tensors.items() if name != "input_scale"}, scheme)


def test_a_missing_tensor_a_wrong_shape_and_a_damaged_scale_are_named():
    tensors = _packed()
    with pytest.raises(FormatError, match="weight_scale is missing"):
        FORMAT.unpack({name: t for name, t in tensors.items() if name != "weight_scale"}, W4)
    with pytest.raises(FormatError, match="do not fit W4A16 with group 16"):
        FORMAT.unpack(tensors, Scheme(weights=WeightScheme(bits=4, group=16)))
    with pytest.raises(FormatError, match="weight_scale holds NaN or infinity"):
        FORMAT.unpack(tensors | {"weight_scale": tensors["weight_scale"] * float("nan")}, W4)
    with pytest.raises(FormatError, match=r"a: weight_scale \[16, 3\] does not fit a weight \[16, 64\]"):
        _layout(FORMAT.config({"a": W4}, ()), {"a": tensors | {"weight_scale": torch.ones(16, 3)}})
    with pytest.raises(FormatError, match="6 words for 64 columns: not 2, 4 or 8 bits"):
        _layout(FORMAT.config({"a": W4}, ()), {"a": tensors | {"weight_packed": torch.zeros(16, 6).int()}})
    with pytest.raises(FormatError, match=r"a\.weight_packed is stored as BF16"):
        _layout(FORMAT.config({"a": W4}, ()), {"a": tensors | {"weight_packed": torch.zeros(16, 8)}})
    with pytest.raises(FormatError, match="experts are read one by one"):
        _layout(FORMAT.config({"a": W4}, ()), {"a": tensors | {"weight_packed": torch.zeros(2, 16, 8).int()}})


@pytest.mark.parametrize(
    ("weights", "activations", "shape", "message"),
    [
        (WeightScheme(bits=3), None, (8, 64), "2, 4 or 8 bits"),
        (WeightScheme(bits=4, per_tensor=True), None, (8, 64), "not one for the whole tensor"),
        (WeightScheme(bits=4, group=128), None, (8, 448), "448 is not a multiple of group 128"),
        (FP8_BLOCK, FP8_GROUPS, (128, 448), "448 is not a multiple of the activations' group 128"),
    ],
)
def test_what_cannot_be_stored_is_told_before_anything_is_rounded(weights, activations, shape, message):
    assert message in FORMAT.refusal(shape, Scheme(weights=weights, activations=activations))


def test_ragged_blocks_are_stored_unpadded_with_one_scale_for_each_part():
    scheme = SCHEMES["fp8 block weights"]
    assert FORMAT.refusal((576, 448), scheme) is None
    tensors = FORMAT.pack(_rounded(scheme, (576, 448)), scheme)
    assert tensors["weight"].shape == (576, 448)
    assert tensors["weight_scale"].shape == (5, 4)
    weight = FORMAT.dequantize(tensors, scheme, torch.float32)
    for row, column in ((0, 0), (127, 127), (128, 383), (575, 447)):
        code, scale = tensors["weight"][row, column].float(), tensors["weight_scale"][row // 128, column // 128].float()
        assert weight[row, column] == code * scale
