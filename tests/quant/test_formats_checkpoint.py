"""CheckpointReader: plain and sharded folders, and every way in which a folder is not a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.quant.formats.base import FormatError, KVScales, QuantizedWeight, dequantize_weight, get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest


def _model(**options: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **options))


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_every_tensor_of_a_saved_model_is_read_back_from_one_file_or_several(tmp_path, shard):
    model = _model()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    reader = CheckpointReader(tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    assert reader.layout is None
    assert set(reader.names()) == set(model.state_dict())
    for name, expected in model.state_dict().items():
        assert torch.equal(reader.tensor(name), expected)
        assert reader.shape(name) == tuple(expected.shape)
        assert reader.size_of(name) == expected.numel() * 4
    assert reader.size_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_a_linear_comes_with_its_bias_and_in_the_dtype_asked_for(tmp_path):
    model = _model(attention_bias=True)
    model.save_pretrained(tmp_path)
    reader, name = CheckpointReader(tmp_path), "model.layers.1.self_attn.q_proj"
    linear = reader.linear(name)
    assert linear.scheme is None
    assert torch.equal(linear.bias, model.get_submodule(name).bias)
    assert torch.equal(reader.weight(name, torch.bfloat16), model.get_submodule(name).weight.to(torch.bfloat16))


def test_a_name_that_is_not_stored_is_named(tmp_path):
    _model().save_pretrained(tmp_path)
    reader = CheckpointReader(tmp_path)
    with pytest.raises(FormatError, match=r"model\.layers\.9\.x is not stored"):
        reader.tensor("model.layers.9.x")
    with pytest.raises(FormatError, match=r"no tensor of a module model\.layers\.9"):
        reader.linear("model.layers.9")


def test_folders_that_are_no_models_are_refused_in_one_line(tmp_path):
    with pytest.raises(FormatError, match="there is no such folder"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(FormatError, match=r"has no config\.json: not a model folder"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="cannot be read as JSON"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": "gptq"}')
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="quantization_config must be an object"):
        CheckpointReader(tmp_path)


def test_an_unknown_quantization_and_a_claim_without_weights_are_refused(tmp_path):
    plain = {"a.weight": torch.zeros(4, 4)}
    with pytest.raises(
        FormatError, match="unknown checkpoint format 'bitsandbytes'; known: awq, compressed-tensors, fp8"
    ):
        CheckpointReader(_write(tmp_path, {"quantization_config": {"quant_method": "bitsandbytes"}}, plain))
    with pytest.raises(FormatError, match="no quantized weight is stored"):
        CheckpointReader(_write(tmp_path, {"quantization_config": {"quant_method": "compressed-tensors"}}, plain))


def _rounded(scheme: Scheme) -> QuantizedWeight:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    return round_to_nearest(weight, scheme.weights)


def _checkpoint(folder: Path, name: str, scheme: Scheme, **changes: object) -> Path:
    """A checkpoint of one quantized Linear "m.a" in the format of that name, its config changed."""
    checkpoint_format = get_format(name)
    tensors = {f"m.a.{local}": tensor for local, tensor in checkpoint_format.pack(_rounded(scheme), scheme).items()}
    config = {**checkpoint_format.config({"m.a": scheme}, ("lm_head",)), **changes}
    return _write(folder, {"quantization_config": config}, {**tensors, "m.norm.weight": torch.ones(4)})


W4 = Scheme(weights=WeightScheme(bits=4, group=32))
W4_ASYM = Scheme(weights=WeightScheme(bits=4, group=32, symmetric=False))
FP8 = Scheme(
    weights=WeightScheme(bits=8, type="float", block=(128, 128)),
    activations=ActivationScheme(bits=8, type="float", granularity="group", group=128),
)
FORMATS_AND_SCHEMES = [("compressed-tensors", W4), ("gptq", W4), ("gptq_v2", W4_ASYM), ("awq", W4_ASYM), ("fp8", FP8)]


@pytest.mark.parametrize(("name", "scheme"), FORMATS_AND_SCHEMES)
def test_every_format_is_read_on_one_code_path_without_a_warning(tmp_path, name, scheme, caplog):
    reader = CheckpointReader(_checkpoint(tmp_path, name, scheme))
    assert (reader.layout.format, reader.layout.linears, reader.layout.warnings) == (name, {"m.a": scheme}, ())
    assert caplog.records == []
    rounded = _rounded(scheme)
    assert torch.equal(reader.weight("m.a", torch.float32), dequantize_weight(rounded, torch.float32))
    back = reader.unpack("m.a")
    assert torch.equal(back.codes.view(torch.int8), rounded.codes.view(torch.int8))
    assert torch.equal(back.scales.float(), rounded.scales.float())
    assert torch.equal(reader.tensor("m.norm.weight"), torch.ones(4))


WRONG_LABELS = [
    (name, scheme, label)
    for name, scheme in FORMATS_AND_SCHEMES
    for label in ("gptq", "awq", "compressed-tensors", "modelopt", None)
    if label != name.removesuffix("_v2")
]


@pytest.mark.parametrize(("name", "scheme", "label"), WRONG_LABELS)
def test_the_tensors_decide_whatever_the_label_says(tmp_path, name, scheme, label, caplog):
    family = name.removesuffix("_v2")
    reader = CheckpointReader(_checkpoint(tmp_path, name, scheme, quant_method=label))
    assert reader.layout.format == name
    assert reader.layout.linears["m.a"].weights == scheme.weights
    assert torch.equal(reader.weight("m.a", torch.float32), dequantize_weight(_rounded(scheme), torch.float32))
    says = "no quantization_config" if label is None else f"quant_method {label!r}"
    told = f"config.json says {says}, the tensors are {family}; the tensors are right"
    assert told in reader.layout.warnings
    CheckpointReader(tmp_path)
    assert [record.message for record in caplog.records].count(f"{tmp_path}: {told}") == 1


@pytest.mark.parametrize(("name", "beside"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_what_older_writers_kept_beside_the_config_is_read(tmp_path, name, beside):
    scheme = W4 if name == "gptq" else W4_ASYM
    folder = _checkpoint(tmp_path, name, scheme)
    config = json.loads((folder / "config.json").read_text()).pop("quantization_config")
    (folder / "config.json").write_text("{}")
    (folder / beside).write_text(json.dumps({**config, "group_size": 64}))
    reader = CheckpointReader(folder)
    assert reader.layout.linears == {"m.a": scheme}
    assert any("says group_size 64, the tensors 32" in warning for warning in reader.layout.warnings)


def test_tensors_of_two_formats_and_a_kernels_own_layout_are_refused(tmp_path):
    folder = _checkpoint(tmp_path / "two", "gptq", W4)
    tensors = load_file(folder / "model.safetensors")
    packed = {f"m.b.{local}": t for local, t in get_format("compressed-tensors").pack(_rounded(W4), W4).items()}
    with pytest.raises(FormatError, match=r"m\.a is stored as gptq but m\.b as compressed-tensors"):
        CheckpointReader(_write(folder, {}, tensors | packed))
    gemv = {"m.a.qweight": torch.zeros(128, 16).int(), "m.a.scales": torch.ones(128, 8)}
    with pytest.raises(FormatError, match=r"m\.a\.qweight \[128, 16\] is neither GPTQ nor AWQ GEMM"):
        CheckpointReader(_write(tmp_path / "gemv", {"quantization_config": {"quant_method": "awq"}}, gemv))
    fp4 = {"m.a.weight_packed": torch.zeros(8, 8, dtype=torch.uint8), "m.a.weight_scale": torch.ones(8, 1)}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}
    with pytest.raises(FormatError, match="NVFP4 weights are not read"):
        CheckpointReader(_write(tmp_path / "fp4", config, fp4))


def test_a_config_that_says_a_key_twice_is_read_as_others_read_it(tmp_path):
    _write(tmp_path, {}, {"a.weight": torch.zeros(1)})
    (tmp_path / "config.json").write_text('{"dtype": "float16", "dtype": "bfloat16"}')
    assert CheckpointReader(tmp_path).config == {"dtype": "bfloat16"}


def test_a_damaged_scale_and_a_missing_tensor_are_told_with_the_file_and_the_layer(tmp_path):
    folder = _checkpoint(tmp_path / "nan", "compressed-tensors", W4)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tensors["m.a.weight_scale"][3, 1] = float("nan")
    reader = CheckpointReader(_write(folder, config, tensors))
    for read in (reader.unpack, lambda name: reader.weight(name, torch.float32)):
        with pytest.raises(FormatError, match=r"nan: m\.a: weight_scale holds NaN or infinity: the file is damaged"):
            read("m.a")
    del tensors["m.a.weight_scale"]
    with pytest.raises(FormatError, match=r"nan: m\.a\.weight_scale is missing"):
        CheckpointReader(_write(folder, config, tensors))


KV_FP8 = KVCacheScheme(bits=8, type="float")


def _with_kv(folder: Path, scheme: KVCacheScheme | None, scales: dict[str, torch.Tensor], *, weights: bool) -> Path:
    checkpoint_format = get_format("compressed-tensors")
    linears = {"m.0.self_attn.k_proj": W4} if weights else {}
    packed = checkpoint_format.pack(_rounded(W4), W4) if weights else {"weight": torch.ones(4, 4)}
    tensors = {f"m.0.self_attn.k_proj.{local}": tensor for local, tensor in packed.items()} | scales
    config = checkpoint_format.config(linears, (), scheme or KV_FP8)
    return _write(folder, {"quantization_config": config | ({} if scheme else {"kv_cache_scheme": None})}, tensors)


@pytest.mark.parametrize("weights", [True, False], ids=["with weights", "kv only"])
def test_kv_scales_come_with_their_scheme_with_or_without_quantized_weights(tmp_path, weights):
    scales = get_format("compressed-tensors").kv_tensors(
        "m.0.self_attn", KVScales(key=torch.tensor([0.5]), value=torch.tensor([0.25]))
    )
    reader = CheckpointReader(_with_kv(tmp_path, KV_FP8, scales, weights=weights))
    assert (reader.layout.kv_cache, reader.layout.warnings) == (KV_FP8, ())
    assert len(reader.layout.linears) == weights
    found = reader.kv_scales("m.0.self_attn")
    assert (found.key.tolist(), found.value.tolist()) == ([0.5], [0.25])
    assert reader.kv_scales("m.1.self_attn") is None
    assert reader.attentions == ("m.0.self_attn",)


def test_a_kv_scheme_is_what_the_stored_scales_bear_out(tmp_path):
    pair = {"m.0.self_attn.k_scale": torch.ones(2, 1, 1), "m.0.self_attn.v_scale": torch.ones(2, 1, 1)}
    heads = CheckpointReader(_with_kv(tmp_path / "heads", KV_FP8, pair, weights=True)).layout
    assert heads.kv_cache == KVCacheScheme(bits=8, type="float", granularity="head")
    assert "one scale a head is stored" in heads.warnings[0]
    dropped = CheckpointReader(_with_kv(tmp_path / "dropped", None, pair, weights=True)).layout
    assert dropped.kv_cache is None
    assert "m.0.self_attn has KV scales, but kv_cache_scheme is null" in dropped.warnings[0]
    none = CheckpointReader(_with_kv(tmp_path / "none", KV_FP8, {}, weights=True)).layout
    assert none.kv_cache is None
    assert "no KV scale is stored" in none.warnings[0]
    other = {name.replace("m.0", "m.1"): tensor for name, tensor in pair.items()}
    partly = CheckpointReader(_with_kv(tmp_path / "partly", KV_FP8, other, weights=True)).layout
    assert "m.0.self_attn (1 in all) has no KV scales" in partly.warnings[-1]


def test_a_kv_scale_of_zero_is_refused_before_anything_is_served(tmp_path):
    zero = {"m.0.self_attn.k_scale": torch.zeros(1), "m.0.self_attn.v_scale": torch.ones(1)}
    with pytest.raises(FormatError, match=r"m\.0\.self_attn\.k_scale is not finite and above zero"):
        CheckpointReader(_with_kv(tmp_path, KV_FP8, zero, weights=True))


def test_a_quantized_head_is_not_tied_to_the_embedding_whatever_the_flag_says(tmp_path, caplog):
    packed = get_format("compressed-tensors").pack(_rounded(W4), W4)
    tensors = {f"lm_head.{local}": tensor for local, tensor in packed.items()}
    config = {"quantization_config": get_format("compressed-tensors").config({"lm_head": W4}, ())}
    reader = CheckpointReader(_write(tmp_path, {**config, "tie_word_embeddings": True}, tensors))
    assert reader.config["tie_word_embeddings"] is False
    assert "config.json ties lm_head to the embedding" in caplog.text
    assert reader.layout.linears == {"lm_head": W4}


def test_what_is_said_of_many_layers_is_said_once(tmp_path):
    checkpoint_format = get_format("compressed-tensors")
    packed = checkpoint_format.pack(_rounded(W4_ASYM), W4_ASYM)
    tensors = {f"m.{index}.{local}": tensor.clone() for index in range(5) for local, tensor in packed.items()}
    config = {"quantization_config": checkpoint_format.config({f"m.{index}": W4 for index in range(5)}, ())}
    layout = CheckpointReader(_write(tmp_path, config, tensors)).layout
    assert layout.warnings == (
        "m.0 and 4 more: config.json says symmetric True, the tensors False; the tensors are right",
    )
