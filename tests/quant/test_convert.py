"""Conversions: the same codes, zero points and scales, or a refusal that names the layer and the reason; nothing in between."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgauge.quant.convert import ConvertError, convert
from narrowgauge.quant.formats.base import KVScales, QuantizedWeight, get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import Base, CheckpointDamaged, read_manifest, verify, write_manifest
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest
from narrowgauge.quant.pipeline.export import ExportError

W4 = Scheme(weights=WeightScheme(bits=4, group=32))
W4_ASYM = Scheme(weights=WeightScheme(bits=4, group=32, symmetric=False))
W8 = Scheme(weights=WeightScheme(bits=8, group=32))
FP8_TOKENS = ActivationScheme(bits=8, type="float")
FP8_GROUPS = ActivationScheme(bits=8, type="float", granularity="group", group=128)
FP8_BLOCK = Scheme(weights=WeightScheme(bits=8, type="float", block=(128, 128)), activations=FP8_GROUPS)
FP8_CHANNEL = Scheme(weights=WeightScheme(bits=8, type="float"), activations=FP8_TOKENS)
W8A8 = Scheme(weights=WeightScheme(bits=8), activations=ActivationScheme(bits=8, type="int"))
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")


def _rounded(scheme: Scheme, shape: tuple[int, int], *, least_zero: int = -8) -> QuantizedWeight:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(torch.bfloat16)
    rounded = round_to_nearest(weight, scheme.weights)
    if rounded.zeros is None:
        return rounded
    return QuantizedWeight(codes=rounded.codes, scales=rounded.scales, zeros=rounded.zeros.clamp(least_zero))


def _checkpoint(
    folder: Path, scheme: Scheme, *, name: str = "compressed-tensors", shape: tuple[int, int] = (128, 256), **options
) -> Path:
    """Two quantized Linears, one with a bias, an embedding, a norm, a kept router, a tokenizer, a report and a manifest."""
    checkpoint_format, kv = get_format(name), options.pop("kv", None)
    tensors = {
        "model.embed_tokens.weight": torch.ones(16, 256).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.ones(4, 256).bfloat16(),
        "model.norm.weight": torch.ones(256).bfloat16(),
        f"{NAMES[0]}.bias": torch.arange(shape[0]).bfloat16(),
    }
    for linear in NAMES:
        weight = options.get("weight") or _rounded(scheme, shape, least_zero=options.get("least_zero", -8))
        tensors |= {f"{linear}.{local}": t.clone() for local, t in checkpoint_format.pack(weight, scheme).items()}
    if kv is not None:
        scales = KVScales(key=torch.tensor([0.5]), value=torch.tensor([0.25]))
        tensors |= checkpoint_format.kv_tensors("model.layers.0.self_attn", scales)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = checkpoint_format.config(dict.fromkeys(NAMES, scheme), ("lm_head", "model.layers.0.mlp.gate"), kv)
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(b'{"odd":  "spacing"}\n')
    (folder / "quantization.json").write_text('{"layers": []}')
    for file, value in checkpoint_format.extra_files(quantization).items():
        (folder / file).write_text(json.dumps(value))
    base = Base(source="hf:org/model", revision="abc", digest="d" * 64)
    write_manifest(folder, base=base, recipe_digest="r" * 64, calibration_digest="c" * 64)
    return folder


def _equal(one: Path, other: Path) -> None:
    first, second = CheckpointReader(one), CheckpointReader(other)
    assert first.layout.linears == second.layout.linears
    for name in first.layout.linears:
        left, right = first.unpack(name), second.unpack(name)
        assert torch.equal(left.codes.view(torch.int8), right.codes.view(torch.int8))
        assert torch.equal(left.scales.double(), right.scales.double())
        assert (left.zeros is None) == (right.zeros is None)
        assert left.zeros is None or torch.equal(left.zeros, right.zeros)
        assert torch.equal(first.weight(name, torch.float32), second.weight(name, torch.float32))


@pytest.mark.parametrize(
    ("scheme", "target"),
    [
        (W4, "gptq"),
        (W4, "gptq_v2"),
        (W4, "awq"),
        (W4_ASYM, "gptq_v2"),
        (W4_ASYM, "gptq"),
        (W4_ASYM, "awq"),
        (W8, "gptq"),
        (FP8_BLOCK, "fp8"),
    ],
)
def test_there_and_back_gives_the_same_files(tmp_path, scheme, target):
    source = _checkpoint(tmp_path / "source", scheme, least_zero=-7)
    there = convert(source, tmp_path / "there", target)
    assert (there.source_format, there.format, there.layers) == ("compressed-tensors", target, 2)
    assert CheckpointReader(there.path).layout.warnings == ()
    _equal(source, there.path)
    back = convert(there.path, tmp_path / "back", "compressed-tensors")
    one, other = (load_file(folder / "model.safetensors") for folder in (source, back.path))
    assert set(one) == set(other)
    assert all(torch.equal(one[name].double(), other[name].double()) for name in one)
    assert all(one[name].dtype == other[name].dtype for name in one), "scales return to the model's dtype"
    kept = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (source, back.path)]
    assert kept[0] == kept[1]


def test_gptq_versions_and_awq_convert_among_themselves(tmp_path):
    folder = _checkpoint(tmp_path / "gptq", W4_ASYM, name="gptq", least_zero=-7)
    for number, target in enumerate(("gptq_v2", "awq", "gptq")):
        folder = convert(folder, tmp_path / str(number), target).path
        _equal(tmp_path / "gptq", folder)
        assert (folder / "quantize_config.json").exists() == target.startswith("gptq")


def test_what_lies_beside_the_weights_goes_over_and_the_manifest_says_where_from(tmp_path):
    source = _checkpoint(tmp_path / "source", W4)
    result = convert(source, tmp_path / "out", "gptq")
    assert (result.path / "tokenizer.json").read_bytes() == b'{"odd":  "spacing"}\n'
    manifest = verify(result.path)
    before = read_manifest(source)
    assert (manifest.base, manifest.recipe_digest, manifest.calibration_digest) == (
        before.base,
        before.recipe_digest,
        before.calibration_digest,
    )
    assert manifest.digest == result.digest
    report = json.loads((result.path / "quantization.json").read_text())
    assert report == {"layers": [], "converted_from": {"format": "compressed-tensors", "digest": before.digest}}
    tensors = load_file(result.path / "model.safetensors")
    assert torch.equal(tensors[f"{NAMES[0]}.bias"], torch.arange(128).bfloat16())
    assert torch.equal(tensors["model.layers.0.mlp.gate.weight"], torch.ones(4, 256).bfloat16())
    assert convert(source, tmp_path / "again", "gptq").digest == result.digest


def test_full_precision_is_what_the_checkpoint_stands_for(tmp_path):
    source = _checkpoint(tmp_path / "source", FP8_BLOCK, kv=KVCacheScheme(bits=8, type="float"))
    result = convert(source, tmp_path / "out", "none")
    reader = CheckpointReader(result.path)
    assert reader.layout is None
    assert "quantization_config" not in reader.config
    for name in NAMES:
        assert torch.equal(reader.tensor(f"{name}.weight"), CheckpointReader(source).weight(name, torch.bfloat16))
    assert set(reader.names()) == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.norm.weight",
        f"{NAMES[0]}.bias",
        *(f"{name}.weight" for name in NAMES),
    }
    assert [note.partition(" ")[0] for note in result.notes] == ["the", "KV"]


def _small_scale(scheme: Scheme) -> QuantizedWeight:
    rounded = _rounded(scheme, (128, 256))
    scales = rounded.scales.clone()
    scales[5, 1] = 1.2345e-7
    return QuantizedWeight(codes=rounded.codes, scales=scales, zeros=rounded.zeros)


def _permuted(folder: Path) -> Path:
    source = _checkpoint(folder, W4, name="gptq")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{NAMES[0]}.g_idx"] = tensors[f"{NAMES[0]}.g_idx"].flip(0).contiguous()
    save_file(tensors, source / "model.safetensors")
    (source / "manifest.json").unlink()
    return source


REFUSED = {
    "scale not exact": (lambda f: _checkpoint(f, W4, weight=_small_scale(W4)), "gptq", r"has no equal in float16"),
    "zero point 0": (
        lambda f: _checkpoint(f, W4_ASYM, weight=_zero_point_0()),
        "gptq",
        r"a zero point is 0, which gptq cannot hold",
    ),
    "rows": (
        lambda f: _checkpoint(f, W4, shape=(60, 256)),
        "awq",
        r"out_features 60 is not a multiple of 8",
    ),
    "bits": (lambda f: _checkpoint(f, W8), "awq", r"W8A16: awq files hold int weights of 4 bits"),
    "order": (_permuted, "compressed-tensors", r"permuted columns"),
    "channel": (lambda f: _checkpoint(f, FP8_CHANNEL), "fp8", r"FP8 weights with one scale a block"),
    "ragged": (
        lambda f: _checkpoint(f, FP8_BLOCK, shape=(192, 256)),
        "fp8",
        r"out_features 192 is not a multiple of the block's 128",
    ),
    "activations": (lambda f: _checkpoint(f, W8A8), "gptq", r"W8A8: gptq files hold weights only"),
    "kv": (
        lambda f: _checkpoint(f, W4, kv=KVCacheScheme(bits=8, type="float")),
        "gptq",
        r"gptq files hold no KV scales",
    ),
}


def _zero_point_0() -> QuantizedWeight:
    rounded = _rounded(W4_ASYM, (128, 256))
    zeros = rounded.zeros.clone()
    zeros[7, 3] = -8
    return QuantizedWeight(codes=rounded.codes, scales=rounded.scales, zeros=zeros)


@pytest.mark.parametrize("name", REFUSED)
def test_where_the_numbers_do_not_allow_it_the_layer_and_the_reason_are_told_and_nothing_is_written(tmp_path, name):
    make, target, reason = REFUSED[name]
    source = make(tmp_path / "source")
    layer = "" if name == "kv" else r"model\.layers\.0\.mlp\.\w+_proj.*: "
    with pytest.raises(ConvertError, match=rf"source: cannot become {target}: {layer}.*{reason}") as raised:
        convert(source, tmp_path / "out", target)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_is_no_conversion_is_refused(tmp_path):
    source = _checkpoint(tmp_path / "source", W4)
    with pytest.raises(ConvertError, match=r"unknown format 'gguf'; known: awq, .*, none"):
        convert(source, tmp_path / "out", "gguf")
    with pytest.raises(ConvertError, match="is in the format compressed-tensors already"):
        convert(source, tmp_path / "out", "compressed-tensors")
    with pytest.raises(ExportError, match="is not empty"):
        convert(source, source, "gptq")
    full = convert(source, tmp_path / "full", "none").path
    with pytest.raises(ConvertError, match="is in full precision"):
        convert(full, tmp_path / "out", "gptq")
    (source / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(CheckpointDamaged, match=r"tokenizer\.json"):
        convert(source, tmp_path / "out", "gptq")
