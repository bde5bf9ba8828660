"""AWQ GEMM is compared with compressed-tensors' own converter of AutoAWQ files."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

from narrowgauge.quant.formats.awq import AWQ
from narrowgauge.quant.formats.base import FormatError, KVScales, QuantizedWeight, StoredTensor
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest

FORMAT = AWQ()
SYM = Scheme(weights=WeightScheme(bits=4, group=32))
ASYM = Scheme(weights=WeightScheme(bits=4, group=32, symmetric=False))


def _rounded(scheme: Scheme, rows: int = 24, columns: int = 64) -> QuantizedWeight:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(torch.float16)
    return round_to_nearest(weight, scheme.weights)


def _layout(config, modules: dict[str, dict[str, torch.Tensor]]):
    headers = {
        module: {k: StoredTensor(dtype="I32", shape=tuple(t.shape)) for k, t in tensors.items()}
        for module, tensors in modules.items()
    }
    return FORMAT.layout(config, headers, lambda name: modules[name.rpartition(".")[0]][name.rpartition(".")[2]])


@pytest.mark.parametrize("scheme", [ASYM, SYM], ids=["asym", "sym"])
@pytest.mark.parametrize("shape", [(24, 64), (128, 448)])
def test_the_librarys_converter_gives_back_codes_scales_and_zero_points(scheme, shape):
    rounded = _rounded(scheme, *shape)
    tensors = FORMAT.pack(rounded, scheme)
    converter = AutoAWQConverter.from_autoawq_config(FORMAT.config({"model.a": scheme}, ("lm_head",)))
    theirs = converter.process({f"model.a.{name}": tensor for name, tensor in tensors.items()})
    codes = unpack_from_int32(theirs["model.a.weight_packed"], 4, torch.Size(shape))
    groups = rounded.scales.shape[1]
    zeros = unpack_from_int32(theirs["model.a.weight_zero_point"], 4, torch.Size((shape[0], groups)), packed_dim=0)
    assert torch.equal(codes, rounded.codes)
    assert torch.equal(zeros, torch.zeros_like(zeros) if rounded.zeros is None else rounded.zeros)
    assert torch.equal(theirs["model.a.weight_scale"], rounded.scales)


def test_fields_hold_rows_in_the_order_of_the_gemm_kernel():
    codes = torch.arange(-8, 0, dtype=torch.int8).view(8, 1)
    weight = QuantizedWeight(codes=codes.repeat(1, 32), scales=torch.ones(8, 1, dtype=torch.float16))
    word = FORMAT.pack(weight, SYM)["qweight"][0, 0].item() & 0xFFFFFFFF
    assert [word >> 4 * field & 15 for field in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_the_config_is_what_autoawq_writes():
    assert FORMAT.config({"a": ASYM}, ("lm_head",)) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    assert FORMAT.extra_files({}) == {}


@pytest.mark.parametrize(
    ("linears", "kept", "message"),
    [
        ({"m.gate_proj": ASYM}, ("m.gate",), "'m.gate', which is kept, names it as well"),
        ({"lm_head": ASYM}, (), "never quantize the output head"),
        ({"a": ASYM, "b": Scheme(weights=WeightScheme(bits=4, group=64))}, (), "one group size for the whole model"),
        ({"a": Scheme(weights=WeightScheme(bits=8, group=32))}, (), "a: W8A16: awq files hold int weights of 4 bits"),
        (
            {"a": Scheme(weights=WeightScheme(bits=8), activations=ActivationScheme(bits=8, type="int"))},
            (),
            "a: W8A8: awq files hold weights only",
        ),
    ],
)
def test_what_awq_loaders_would_take_otherwise_is_refused(linears, kept, message):
    with pytest.raises(FormatError, match=message):
        FORMAT.config(linears, kept)


def test_kv_scales_have_no_place():
    with pytest.raises(FormatError, match="no KV scales"):
        FORMAT.config({"a": ASYM}, (), KVCacheScheme(bits=8, type="float"))
    with pytest.raises(FormatError, match="no KV scales"):
        FORMAT.kv_tensors("a", KVScales(key=torch.ones(1), value=torch.ones(1)))


@pytest.mark.parametrize("scheme", [ASYM, SYM], ids=["asym", "sym"])
def test_zero_points_all_in_the_middle_are_read_as_symmetric(scheme):
    modules = {"a": FORMAT.pack(_rounded(scheme), scheme)}
    config = FORMAT.config({"a": scheme}, ())
    layout = _layout(config, modules)
    assert (layout.linears, layout.warnings) == ({"a": scheme}, ())
    without = {"a": {name: tensor for name, tensor in modules["a"].items() if name != "qzeros"}}
    assert _layout(config, without).linears == {"a": SYM}


def test_kept_names_that_name_nothing_are_told():
    modules = {"model.a": FORMAT.pack(_rounded(ASYM), ASYM)}
    layout = _layout(FORMAT.config({"model.a": ASYM}, ("lm_head", "visual.gate")), modules)
    assert layout.warnings == ("modules that config.json keeps: 'visual.gate' match no module of the checkpoint",)


def test_the_group_is_that_of_the_tensors():
    modules = {"a": FORMAT.pack(_rounded(ASYM), ASYM)}
    layout = _layout({"quant_method": "awq", "group_size": 128, "version": "GEMM"}, modules)
    assert layout.linears == {"a": ASYM}
    assert layout.warnings == ("a: config.json says group_size 128, the tensors 32; the tensors are right",)
    channel = Scheme(weights=WeightScheme(bits=4, symmetric=False))
    modules = {"a": FORMAT.pack(_rounded(channel), channel)}
    layout = _layout(FORMAT.config({"a": channel}, ()), modules)
    assert (layout.linears, layout.warnings) == ({"a": channel}, ())


@pytest.mark.parametrize("version", ["gemv", "GEMV_FAST", "marlin", "llm-awq"])
def test_a_kernels_own_layout_is_refused_with_what_to_do(version):
    with pytest.raises(FormatError, match=r"is a kernel's own layout.*get the GEMM version"):
        _layout({"quant_method": "awq", "version": version}, {"a": FORMAT.pack(_rounded(ASYM), ASYM)})


def test_tensors_that_do_not_fit_one_another_are_named():
    tensors = FORMAT.pack(_rounded(ASYM), ASYM)
    with pytest.raises(FormatError, match=r"a: qweight \[64, 3\] and scales \[3, 24\] are not AWQ GEMM"):
        _layout({}, {"a": tensors | {"scales": torch.ones(3, 24)}})
    with pytest.raises(FormatError, match=r"a\.scales is missing"):
        _layout({}, {"a": {"qweight": tensors["qweight"]}})
    with pytest.raises(FormatError, match="the tensor qzeros is missing"):
        FORMAT.unpack({name: t for name, t in tensors.items() if name != "qzeros"}, ASYM)
    with pytest.raises(FormatError, match="do not fit W4A16 with group 64"):
        FORMAT.unpack(tensors, Scheme(weights=WeightScheme(bits=4, group=64)))
    with pytest.raises(FormatError, match="scales holds NaN"):
        FORMAT.unpack(tensors | {"scales": tensors["scales"] * float("nan")}, ASYM)
