"""GPTQ is compared with a literal transcription of AutoGPTQ's loops, and with the words that its three writers left."""

import re

import pytest
import torch

from narrowgauge.quant.formats.base import FormatError, KVScales, QuantizedWeight, StoredTensor, dequantize_weight
from narrowgauge.quant.formats.gptq import GPTQ, GPTQv2, recognize
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest

SYM = Scheme(weights=WeightScheme(bits=4, group=32))
ASYM = Scheme(weights=WeightScheme(bits=4, group=32, symmetric=False))
LAYER = "model.layers.0.mlp.up_proj"
WRITERS = {  # z = 0, 5, 8, 0, 3, 15, 1, 8 as three writers stored it
    "GPTQModel": (0x70E1F73F, [0, 5, 8, 0, 3, 15, 1, 8]),
    "per field": (0x70E2F74F, [0, 5, 8, 0, 3, 15, 1, 8]),
}


def _rounded(scheme: Scheme, rows: int = 16, columns: int = 64) -> QuantizedWeight:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(torch.float16)
    return round_to_nearest(weight, scheme.weights)


def _autogptq_words(weight: QuantizedWeight, bits: int, *, v1: bool) -> dict[str, list[list[int]]]:
    """AutoGPTQ's QuantLinear.pack, loop by loop, with Python integers."""
    middle, fields = 1 << (bits - 1), 32 // bits
    intweight = (weight.codes.to(torch.int64) + middle).t().tolist()  # [I][O]
    rows, groups = weight.scales.shape
    zeros = torch.zeros(rows, groups, dtype=torch.int64) if weight.zeros is None else weight.zeros.to(torch.int64)
    zeros = (zeros + middle - int(v1)).t().tolist()  # [G][O]
    qweight = [[0] * rows for _ in range(len(intweight) // fields)]
    for r in range(len(qweight)):
        for j in range(fields):
            for o in range(rows):
                qweight[r][o] |= intweight[r * fields + j][o] << (bits * j)
    qzeros = [[0] * (rows // fields) for _ in range(groups)]
    for g in range(groups):
        for c in range(rows // fields):
            for j in range(fields):
                qzeros[g][c] |= zeros[g][c * fields + j] << (bits * j)
    return {"qweight": qweight, "qzeros": qzeros}


def _unsigned(tensor: torch.Tensor) -> list[list[int]]:
    return (tensor.to(torch.int64) & 0xFFFFFFFF).tolist()


def _headers(modules: dict[str, dict[str, torch.Tensor]]) -> tuple[dict, dict[str, torch.Tensor]]:
    dtypes = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16"}
    headers = {
        module: {k: StoredTensor(dtype=dtypes[t.dtype], shape=tuple(t.shape)) for k, t in tensors.items()}
        for module, tensors in modules.items()
    }
    return headers, {f"{m}.{k}": t for m, tensors in modules.items() for k, t in tensors.items()}


def _read(config, modules):
    """Format, warnings and layout, as the checkpoint reader finds them."""
    headers, tensors = _headers(modules)
    version, warnings = recognize(config, headers, tensors.__getitem__)
    layout = version.layout(config, headers, tensors.__getitem__)
    return version, [*warnings, *layout.warnings], layout


def _word(value: int) -> torch.Tensor:
    return torch.tensor([[value - (1 << 32) if value >= 1 << 31 else value]], dtype=torch.int32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [GPTQ(), GPTQv2()], ids=["v1", "v2"])
def test_words_are_those_of_the_writer_that_defined_the_format(version, symmetric, bits):
    scheme = Scheme(weights=WeightScheme(bits=bits, group=32, symmetric=symmetric))
    rounded = _rounded(scheme)
    if rounded.zeros is not None:
        rounded = QuantizedWeight(
            codes=rounded.codes, scales=rounded.scales, zeros=rounded.zeros.clamp(scheme.weights.qmin + 1)
        )
    tensors = version.pack(rounded, scheme)
    words = _autogptq_words(rounded, bits, v1=version.name == "gptq")
    assert _unsigned(tensors["qweight"]) == words["qweight"]
    assert _unsigned(tensors["qzeros"]) == words["qzeros"]
    assert torch.equal(tensors["scales"], rounded.scales.t())
    assert tensors["scales"].dtype == torch.float16
    assert tensors["g_idx"].tolist() == [i // 32 for i in range(64)]
    assert {name: tensor.dtype for name, tensor in tensors.items() if name != "scales"} == dict.fromkeys(
        ("qweight", "qzeros", "g_idx"), torch.int32
    )


def test_the_middle_zero_point_is_sevens_in_version_1_and_eights_in_version_2():
    rounded = _rounded(SYM)
    assert {word for row in _unsigned(GPTQ().pack(rounded, SYM)["qzeros"]) for word in row} == {0x77777777}
    assert {word for row in _unsigned(GPTQv2().pack(rounded, SYM)["qzeros"]) for word in row} == {0x88888888}


@pytest.mark.parametrize("writer", WRITERS)
def test_each_writers_version_1_zero_points_are_read_as_it_meant_them(writer):
    word, zeros = WRITERS[writer]
    tensors = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "qzeros": _word(word),
        "scales": torch.ones(1, 8, dtype=torch.float16),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    config = {"bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    if writer == "GPTQModel":
        config["meta"] = {"quantizer": ["gptqmodel:2.2.0"]}
    version, warnings, layout = _read(config, {LAYER: tensors})
    read = version.unpack(tensors, layout.linears[LAYER]).zeros
    assert (read.flatten() + 8).tolist() == zeros
    assert any("zero point of 0" in warning for warning in warnings) == (writer != "GPTQModel")


def test_a_zero_point_of_0_is_not_written_in_version_1_and_is_in_version_2():
    rounded = _rounded(ASYM)
    zeros = rounded.zeros.clone()
    zeros[3, 1] = -8
    weight = QuantizedWeight(codes=rounded.codes, scales=rounded.scales, zeros=zeros)
    with pytest.raises(FormatError, match="a zero point is 0, which gptq cannot hold; use gptq_v2"):
        GPTQ().pack(weight, ASYM)
    assert "use gptq_v2" in GPTQ().refusal((16, 64), ASYM)
    assert torch.equal(GPTQv2().unpack(GPTQv2().pack(weight, ASYM), ASYM).zeros, zeros)


@pytest.mark.parametrize(("label", "told"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_symmetric_zero_points_tell_the_version_whatever_the_label(label, told):
    writer = GPTQ() if told == "gptq" else GPTQv2()
    modules = {LAYER: writer.pack(_rounded(SYM), SYM)}
    config = writer.config({LAYER: SYM}, ("lm_head",))
    version, warnings, layout = _read({**config, "checkpoint_format": label}, modules)
    assert version.name == layout.format == told
    assert warnings == [f"config.json says checkpoint_format {label}, the zero points {told}; the tensors are right"]
    assert layout.linears == {LAYER: SYM}
    assert _read(config, modules)[1] == []


def test_zero_points_of_a_file_that_calls_itself_symmetric_are_checked_before_they_are_ignored():
    modules = {LAYER: GPTQv2().pack(_rounded(ASYM), ASYM), "b": GPTQv2().pack(_rounded(SYM), SYM)}
    config = GPTQv2().config({LAYER: SYM, "b": SYM}, ())
    version, warnings, layout = _read(config, modules)
    assert layout.linears == {LAYER: ASYM, "b": SYM}
    assert warnings == [f"{LAYER}: config.json says sym, but its zero points are not all 8; they are used"]
    expected = dequantize_weight(_rounded(ASYM), torch.float32)
    assert torch.equal(version.dequantize(modules[LAYER], layout.linears[LAYER], torch.float32), expected)


def test_activation_order_on_disk_is_read_by_each_columns_group():
    rounded = _rounded(SYM)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    g_idx = (torch.arange(64) // 32)[order].to(torch.int32)
    tensors = GPTQ().pack(rounded, SYM) | {"g_idx": g_idx}
    back = GPTQ().unpack(tensors, SYM)
    expected = torch.stack(
        [rounded.codes[:, i].float() * rounded.scales[:, int(g_idx[i])].float() for i in range(64)], 1
    )
    assert torch.equal(dequantize_weight(back, torch.float32), expected)
    with pytest.raises(FormatError, match="read but not written"):
        GPTQ().pack(back, SYM)
    for wrong in (g_idx + 1, -g_idx, g_idx[:32]):
        with pytest.raises(FormatError, match="does not fit 64 columns in 2 groups"):
            GPTQ().unpack(tensors | {"g_idx": wrong}, SYM)


def test_a_file_without_g_idx_and_one_with_a_short_last_group_are_read():
    tensors = GPTQ().pack(_rounded(SYM), SYM)
    plain = {name: tensor for name, tensor in tensors.items() if name != "g_idx"}
    assert torch.equal(GPTQ().dequantize(plain, SYM, torch.float32), GPTQ().dequantize(tensors, SYM, torch.float32))
    ragged = Scheme(weights=WeightScheme(bits=4, group=48))
    config = {"bits": 4, "group_size": 48, "sym": True}
    version, warnings, layout = _read(config, {LAYER: plain})
    assert (layout.linears, warnings) == ({LAYER: ragged}, [])
    back = version.unpack(plain, ragged)
    assert back.column_groups.tolist() == [0] * 48 + [1] * 16


def test_bits_and_groups_are_those_of_the_tensors():
    eight = Scheme(weights=WeightScheme(bits=8))
    modules = {"a": GPTQ().pack(_rounded(eight), eight)}
    _, warnings, layout = _read({"bits": 4, "group_size": 32, "sym": True}, modules)
    assert layout.linears == {"a": eight}
    assert warnings == [
        "a: config.json says bits 4, the tensors 8; the tensors are right",
        "a: config.json says group_size 32, the tensors -1; the tensors are right",
    ]
    broken = {"a": modules["a"] | {"qzeros": torch.zeros(1, 6, dtype=torch.int32)}}
    with pytest.raises(FormatError, match="are not GPTQ of 2, 4 or 8 bits"):
        _read({"sym": True}, broken)


@pytest.mark.parametrize("label", ["marlin", "bitblas", "gptq_p"])
def test_a_kernels_own_layout_is_refused_with_what_to_do(label):
    modules = {LAYER: GPTQ().pack(_rounded(SYM), SYM)}
    with pytest.raises(FormatError, match=f"'{label}': a kernel's own layout; save it as gptq"):
        _read({"sym": True, "checkpoint_format": label}, modules)


def test_the_config_says_what_loaders_ask_and_lies_beside_it_as_a_file_too():
    eight = Scheme(weights=WeightScheme(bits=8, group=64))
    config = GPTQ().config({"a.b": SYM, "c": SYM, "d.0": eight}, ("lm_head", "m.gate"))
    assert {key: config[key] for key in ("quant_method", "bits", "group_size", "sym", "desc_act", "lm_head")} == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    }
    assert (config["checkpoint_format"], config["pack_dtype"]) == ("gptq", "int32")
    (changed, change), (skipped, _) = config["dynamic"].items()
    assert change == {"bits": 8, "group_size": 64, "sym": True}
    assert [re.match(changed.removeprefix("+:"), name) is not None for name in ("d.0", "d.01", "dx0")] == [1, 0, 0]
    assert [re.match(skipped.removeprefix("-:"), name) is not None for name in ("m.gate", "m.gate_proj")] == [1, 0]
    assert GPTQ().extra_files(config) == {"quantize_config.json": config}
    modules = {"a.b": SYM, "c": SYM, "d.0": eight}
    _, warnings, layout = _read(config, {name: GPTQ().pack(_rounded(s), s) for name, s in modules.items()})
    assert (layout.linears, warnings) == (modules, [])


def test_what_the_format_has_no_place_for_is_refused():
    with pytest.raises(FormatError, match="no KV scales; use compressed-tensors"):
        GPTQ().config({"a": SYM}, (), KVCacheScheme(bits=8, type="float"))
    with pytest.raises(FormatError, match="no KV scales"):
        GPTQ().kv_tensors("model.layers.0.self_attn", KVScales(key=torch.ones(1), value=torch.ones(1)))
    rounded = Scheme(weights=WeightScheme(bits=8), activations=ActivationScheme(bits=8, type="int"))
    assert "hold weights only" in GPTQ().refusal((16, 64), rounded)


def test_scales_become_float16_and_none_of_them_zero():
    rounded = _rounded(SYM)
    fine = QuantizedWeight(codes=rounded.codes, scales=torch.full((16, 2), 1e-30))
    assert bool((GPTQ().pack(fine, SYM)["scales"] > 0).all())
    assert "has no equal in float16" in GPTQ().refusal((16, 64), SYM, fine)
    assert GPTQ().refusal((16, 64), SYM, QuantizedWeight(codes=rounded.codes, scales=torch.full((16, 2), 0.75))) is None
    with pytest.raises(FormatError, match="does not fit float16"):
        GPTQ().pack(QuantizedWeight(codes=rounded.codes, scales=torch.full((16, 2), 1e6)), SYM)
    with pytest.raises(FormatError, match="not finite and above zero"):
        GPTQ().pack(QuantizedWeight(codes=rounded.codes, scales=torch.full((16, 2), float("nan"))), SYM)
    with pytest.raises(FormatError, match="scales holds NaN or infinity"):
        GPTQ().unpack(GPTQ().pack(rounded, SYM) | {"scales": torch.full((2, 16), float("inf"))}, SYM)
