"""The format is compared with the library of the same name: its compressor reads ours, its config classes accept ours."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

from narrowgauge.quant.formats.base import FormatError, QuantizedWeight, StoredTensor
from narrowgauge.quant.formats.compressed_tensors import CompressedTensors
from narrowgauge.quant.formats.scheme import ActivationScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest

FORMAT = CompressedTensors()


def _stored(*modules):
    """Modules that hold packed weights, as far as the layout looks at them."""
    tensor = StoredTensor(dtype="I32", shape=(8, 8))
    return {module: {"weight_packed": tensor} for module in modules}


def _never(name):
    raise AssertionError(f"{name} was read")


W4 = Scheme(weights=WeightScheme(bits=4, group=32))


def _scheme(bits: int, group: int | None, symmetric: bool) -> Scheme:
    return Scheme(weights=WeightScheme(bits=bits, group=group, symmetric=symmetric))


def _weight(rows: int, columns: int, kind: str = "gaussian") -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    if kind == "zero group":
        weight[:, : min(32, columns)] = 0
    if kind == "all positive":
        weight = weight.abs() + 0.5
    if kind == "outlier":
        weight[0, 0] = 1e4
    return weight.to(torch.bfloat16)


@pytest.mark.parametrize("kind", ["gaussian", "zero group", "all positive", "outlier"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "group"), [((8, 64), 32), ((60, 256), 128), ((13, 252), None), ((8, 448), 32)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_library_reads_the_same_weight_from_our_tensors(bits, shape, group, symmetric, kind):
    scheme = _scheme(bits, group, symmetric)
    quantized = round_to_nearest(_weight(*shape, kind), scheme.weights)
    tensors = FORMAT.pack(quantized, scheme)
    library = QuantizationConfig.model_validate(FORMAT.config({"a": scheme}, ())).config_groups["group_0"]
    theirs = PackedQuantizationCompressor.decompress(dict(tensors), library)["weight"]
    assert torch.equal(FORMAT.dequantize(tensors, scheme, torch.bfloat16), theirs)
    back = FORMAT.unpack(tensors, scheme)
    assert torch.equal(back.codes, quantized.codes)
    assert torch.equal(back.scales, quantized.scales)
    assert (back.zeros is None) == symmetric
    assert symmetric or torch.equal(back.zeros, quantized.zeros)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert FORMAT.stored_bytes(shape, scheme, 2) == stored


def test_one_scheme_targets_every_linear_and_several_name_their_layers():
    eight = _scheme(8, None, True)
    assert FORMAT.config({"a": W4}, ("lm_head",))["config_groups"]["group_0"]["targets"] == ["Linear"]
    config = FORMAT.config({"a": W4, "b": eight, "c": W4}, ("lm_head",))
    QuantizationConfig.model_validate(config)
    layout = FORMAT.layout(config, _stored("a", "b", "c"), _never)
    assert layout.linears == {"a": W4, "b": eight, "c": W4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_status": "frozen"}, "is 'frozen', not 'compressed'"),
        ({"quantization_status": None}, "is None, not 'compressed'"),
        ({"config_groups": None}, "config_groups is missing"),
        ({"ignore": ["re:.*b"]}, "ab is stored in quantized form, but quantization_config leaves it out"),
    ],
)
def test_a_config_that_loaders_would_misread_is_refused(change, message):
    config = {**FORMAT.config({"ab": W4}, ()), **change}
    with pytest.raises(FormatError, match=message):
        FORMAT.layout(config, _stored("ab"), _never)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "float-quantized"}, "this release reads 'pack-quantized'"),
        ({"input_activations": {"num_bits": 8}}, "quantizes activations"),
        ({"targets": []}, "targets is missing"),
    ],
)
def test_a_group_that_this_release_cannot_read_is_refused(change, message):
    config = FORMAT.config({"a": W4}, ())
    config["config_groups"]["group_0"] |= change
    with pytest.raises(FormatError, match=message):
        FORMAT.layout(config, _stored("a"), _never)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actorder": "group"}, "permutes columns"),
        ({"strategy": "tensor"}, "reads 'group' and 'channel'"),
        ({"num_bits": 3}, "2, 4 or 8 bits"),
        ({"num_bits": 99}, "cannot be read"),
    ],
)
def test_weight_arguments_that_this_release_cannot_read_are_refused(change, message):
    config = FORMAT.config({"a": W4}, ())
    config["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(FormatError, match=message):
        FORMAT.layout(config, _stored("a"), _never)


def test_a_regex_target_is_anchored_at_its_start_only():
    config = FORMAT.config({"x": W4}, ())
    config["config_groups"]["group_0"]["targets"] = ["re:model.*gate"]
    assert FORMAT.layout(config, _stored("model.mlp.gate_proj"), _never).linears == {"model.mlp.gate_proj": W4}
    with pytest.raises(FormatError, match="leaves it out"):
        FORMAT.layout(config, _stored("vision.model.gate"), _never)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_servers_would_answer_garbage_with_is_not_written(bad):
    weight = round_to_nearest(_weight(8, 64), W4.weights)
    scales = weight.scales.clone()
    scales[3, 1] = bad
    with pytest.raises(FormatError, match="not finite and above zero"):
        FORMAT.pack(QuantizedWeight(codes=weight.codes, scales=scales), W4)


def test_a_missing_tensor_and_a_wrong_shape_are_named():
    tensors = FORMAT.pack(round_to_nearest(_weight(8, 64), W4.weights), W4)
    with pytest.raises(FormatError, match="weight_scale is missing"):
        FORMAT.unpack({name: t for name, t in tensors.items() if name != "weight_scale"}, W4)
    with pytest.raises(FormatError, match="do not fit W4A16 with group 16"):
        FORMAT.unpack(tensors, Scheme(weights=WeightScheme(bits=4, group=16)))


def test_quantized_activations_are_not_written_yet():
    scheme = Scheme(weights=WeightScheme(bits=8), activations=ActivationScheme(bits=8, type="int"))
    with pytest.raises(FormatError, match="set them to null"):
        FORMAT.config({"a": scheme}, ())
