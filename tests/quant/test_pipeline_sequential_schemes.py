"""Every method and scheme from recipe to checkpoint on random models; transformers loads it with our weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.quant.calibration import build_calibration
from narrowgauge.quant.evaluate.reference import ReferenceModel
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.formats.rounding import round_activations
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.pipeline.export import REPORT
from narrowgauge.quant.pipeline.results import QuantizeError
from narrowgauge.quant.pipeline.sequential import RunOptions, quantize
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import LocalModel, resolve

pytestmark = pytest.mark.filterwarnings(
    "ignore:You passed `quantization_config`:UserWarning"
)  # transformers, dequantize

FP8 = {"bits": 8, "type": "float"}
INT8 = {"bits": 8, "type": "int"}
W8A8 = {"weights": {"bits": 8}, "activations": INT8}
STATIC = {"weights": {**FP8, "per_tensor": True}, "activations": {**FP8, "granularity": "tensor", "dynamic": False}}
BLOCK = {"weights": {**FP8, "block": [32, 32]}, "activations": {**FP8, "granularity": "group", "group": 32}}
W4 = {"weights": {"bits": 4, "group": 32}}
RUNS = {
    "awq": (["awq"], W4),
    "awq + gptq": (["awq", "gptq"], W4),
    "smoothquant + gptq W8A8": (["smoothquant", "gptq"], W8A8),
    "rtn W8A8": (["rtn"], W8A8),
    "fp8 static": (["fp8"], STATIC),
    "smoothquant + fp8 dynamic": (["smoothquant", "fp8"], {"weights": FP8, "activations": FP8}),
    "fp8 block": (["fp8"], BLOCK),
}


def _recipe(methods: list[object], scheme: dict[str, object] | None, **changes: object) -> Recipe:
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"samples": 6, "length": 48},
        "methods": [{"name": one} if isinstance(one, str) else one for one in methods],
        "scheme": scheme,
        **changes,
    }
    return build(Recipe, mapping, registries={QuantMethod: METHODS})


def _base(folder: Path) -> LocalModel:
    return resolve(str(folder), cache=folder.parent / "cache")


def _load(folder: Path) -> tuple[torch.nn.Module, dict[str, object]]:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
    model(torch.tensor([[1, 2, 3]]))  # the first forward makes compressed-tensors write out plain weights
    return model, report


@pytest.mark.parametrize("name", RUNS)
def test_transformers_loads_it_with_the_weights_that_we_dequantize(tiny_llama, tmp_path, name):
    methods, scheme = RUNS[name]
    base = _base(tiny_llama())
    result = quantize(_recipe(methods, scheme), base, tmp_path / "out")
    assert [layer.fallback for layer in result.layers] == [None] * 14
    model, report = _load(result.path)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    reader = CheckpointReader(result.path)
    for layer in reader.layout.linears:
        ours, theirs = reader.weight(layer, torch.bfloat16), model.get_submodule(layer).weight.to(torch.bfloat16)
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0, msg=lambda text, layer=layer: f"{layer}: {text}")
    for tensor in reader.names():
        if "layernorm" in tensor:
            assert torch.equal(reader.tensor(tensor), model.state_dict()[tensor])
    smoothed = json.loads((result.path / REPORT).read_text()).get("smoothing", [])
    assert bool(smoothed) == (methods[0] in ("awq", "smoothquant"))


@pytest.mark.parametrize("methods", [["awq", "gptq"], ["smoothquant", "gptq"]])
def test_smoothed_models_with_many_bits_compute_what_the_base_does(tiny_llama, tmp_path, methods):
    folder = tiny_llama()
    smoother = {"name": methods[0], "clip": False} if methods[0] == "awq" else {"name": methods[0]}
    recipe = _recipe([smoother, "gptq"], {"weights": {"bits": 8, "group": 32}})
    result = quantize(recipe, _base(folder), tmp_path / "out", options=RunOptions(dtype=torch.float32))
    before, after = CheckpointReader(folder), CheckpointReader(result.path)
    scales = [one for one in json.loads((result.path / REPORT).read_text())["smoothing"] if one["largest"]]
    assert max(one["largest"] / one["smallest"] for one in scales) > 1.1
    if methods[0] == "smoothquant":  # AWQ may find no use for this site
        name = "model.layers.1.input_layernorm.weight"
        assert not torch.equal(before.tensor(name), after.tensor(name))
    ids = torch.randint(0, 258, (2, 32), generator=torch.Generator().manual_seed(0))
    models = []
    for reader in (before, after):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                module = key.removesuffix(".weight")
                quantized = reader.layout is not None and module in reader.layout.linears
                parameter.copy_(reader.weight(module, torch.float32) if quantized else reader.tensor(key).float())
            models.append(model(ids).logits)
    # Eight bits move the answers by 3 %; scales that reach one side only, by several times that.
    assert float((models[0] - models[1]).norm() / models[0].norm()) < 0.06


def test_static_scales_are_those_of_the_inputs_that_the_rounded_model_sees(tiny_llama, tmp_path):
    folder = tiny_llama()
    recipe = _recipe(["fp8"], STATIC)
    result = quantize(recipe, _base(folder), tmp_path / "out", options=RunOptions(dtype=torch.float32))
    reader = CheckpointReader(result.path)
    ids = build_calibration(recipe.calibration, AutoTokenizer.from_pretrained(folder)).ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, float] = {}
    for layer, scheme in reader.layout.linears.items():
        module, value = model.get_submodule(layer), reader.unpack(layer)
        module.weight.data = reader.weight(layer, torch.float32)

        def hook(_, args, layer=layer, scheme=scheme, value=value):
            seen[layer] = float(args[0].abs().max())
            return (round_activations(args[0], scheme.activations, value.input_scale),)

        module.register_forward_pre_hook(hook)
    with torch.no_grad():
        model(ids)
    for layer, absmax in seen.items():
        # Hidden states go from block to block in bfloat16 here, as production's do.
        assert float(reader.unpack(layer).input_scale) == pytest.approx(absmax / 448, rel=0.03), layer
    shared = [float(reader.unpack(f"model.layers.0.self_attn.{part}_proj").input_scale) for part in "qkv"]
    assert len(set(shared)) == 1


@pytest.mark.parametrize("method", ["fp8", "rtn"])
def test_linears_that_engines_stack_get_one_scale_a_tensor_without_calibration_too(tiny_llama, tmp_path, method):
    scheme = {"weights": {**FP8, "per_tensor": True}, "activations": FP8}
    result = quantize(_recipe([method], scheme), _base(tiny_llama()), tmp_path / "out")
    reader = CheckpointReader(result.path)
    scales = {name: float(reader.unpack(name).scales) for name in reader.layout.linears}
    for layer in ("model.layers.0", "model.layers.1"):
        assert len({scales[f"{layer}.self_attn.{part}_proj"] for part in "qkv"}) == 1
        assert scales[f"{layer}.mlp.gate_proj"] == scales[f"{layer}.mlp.up_proj"] != scales[f"{layer}.mlp.down_proj"]


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("weights", [None, {"bits": 4, "group": 32}])
def test_kv_scales_are_those_of_the_keys_and_values_themselves(tiny_llama, tmp_path, granularity, weights):
    folder = tiny_llama()
    scheme = {"weights": weights, "kv_cache": {**FP8, "granularity": granularity}}
    recipe = _recipe(["gptq"] if weights else [], scheme)
    result = quantize(recipe, _base(folder), tmp_path / "out", options=RunOptions(dtype=torch.float32))
    reader = CheckpointReader(result.path)
    assert len(reader.layout.linears) == (14 if weights else 0)
    ids = build_calibration(recipe.calibration, AutoTokenizer.from_pretrained(folder)).ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in reader.layout.linears:
        model.get_submodule(layer).weight.data = reader.weight(layer, torch.float32)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for index in range(2):
        scales = reader.kv_scales(f"model.layers.{index}.self_attn")
        for stored, states in ((scales.key, cache.layers[index].keys), (scales.value, cache.layers[index].values)):
            absmax = states.abs().amax((0, 2, 3)) if granularity == "head" else states.abs().amax().view(1)
            torch.testing.assert_close(stored.float(), absmax / 448, rtol=0.03, atol=0)
    _, report = _load(result.path)
    assert not report["missing_keys"]
    assert all(key.endswith(("k_scale", "v_scale")) for key in report["unexpected_keys"])
    told = json.loads((result.path / REPORT).read_text())["kv_cache"]
    assert [one["name"] for one in told] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_values_that_are_all_zero_give_an_error_that_names_the_layer(tiny_llama, tmp_path):
    folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    recipe = _recipe(["rtn"], {**W4, "kv_cache": FP8})
    with pytest.raises(QuantizeError, match=r"^model\.layers\.1\.self_attn: calibration saw no values, or only zeros"):
        quantize(recipe, _base(folder), tmp_path / "out")


def test_memory_that_runs_out_halves_batches_and_changes_next_to_nothing(tiny_llama, tmp_path, monkeypatch):
    from narrowgauge.quant.model.runner import BlockRunner

    base, recipe = (
        _base(tiny_llama()),
        _recipe(["gptq"], {**W4, "kv_cache": FP8}, calibration={"samples": 6, "length": 48}),
    )
    options = RunOptions(dtype=torch.float32)
    roomy = quantize(recipe, base, tmp_path / "roomy", options=options)
    original, sizes = BlockRunner._pass, []

    def limited(self, hidden, *others):
        if len(hidden) > 2:  # what the CPU's allocator says
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"
            )
        sizes.append(len(hidden))
        return original(self, hidden, *others)

    monkeypatch.setattr(BlockRunner, "_pass", limited)
    tight = quantize(recipe, base, tmp_path / "tight", options=options)
    assert {1, 2} >= set(sizes)
    assert 2 in sizes
    for one, other in zip(roomy.layers, tight.layers, strict=True):
        assert one.output_error == pytest.approx(other.output_error, rel=0.01)

    def full(self, hidden, *others):
        return original(self, hidden, *others) if hidden.shape[1] < 48 else torch.empty(1 << 60)

    monkeypatch.setattr(BlockRunner, "_pass", full)
    with pytest.raises(QuantizeError, match=r"^model\.layers\.0: one sample of 48 tokens does not fit into memory"):
        quantize(recipe, base, tmp_path / "none", options=options)


def test_activations_beyond_the_limit_come_from_disk_with_the_same_bits(tiny_llama, tmp_path):
    base = _base(tiny_llama())
    held = quantize(_recipe(["awq", "gptq"], W4), base, tmp_path / "held")
    spilled = quantize(_recipe(["awq", "gptq"], W4), base, tmp_path / "spilled", options=RunOptions(activation_bytes=0))
    assert held.digest == spilled.digest


def test_awq_leaves_out_what_a_norm_follows_and_says_so(tiny_model, tmp_path):
    result = quantize(_recipe(["awq"], W4), _base(tiny_model("qwen3", dtype=torch.bfloat16)), tmp_path / "out")
    smoothing = json.loads((result.path / REPORT).read_text())["smoothing"]
    (attention,) = (one for one in smoothing if one["linears"][0] == "model.layers.0.self_attn.q_proj")
    assert (attention["largest"], attention["note"][:14]) == (None, "a norm follows")
    _, report = _load(result.path)
    assert not report["missing_keys"]


@pytest.mark.parametrize(
    "family", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen2_moe", "qwen3_moe", "cohere"]
)
def test_every_family_goes_through_and_answers_nearly_as_its_base(tiny_model, tmp_path, family):
    folder = tiny_model(family, dtype=torch.bfloat16)
    scheme = {"weights": {"bits": 8, "group": 32}, "kv_cache": INT8}
    result = quantize(_recipe(["awq", "gptq"], scheme), _base(folder), tmp_path / "out")
    routers = set(Skeleton(CheckpointReader(folder)).routers())
    linears = {name for name in Skeleton(CheckpointReader(folder)).linears() if not name.endswith("lm_head")} - routers
    assert set(CheckpointReader(result.path).layout.linears) == linears
    ids = torch.randint(0, 258, (2, 32), generator=torch.Generator().manual_seed(0))
    base, ours = (ReferenceModel(one, dtype=torch.float32).logits(ids) for one in (folder, result.path))
    assert float((base - ours).norm() / base.norm()) < 0.1


def _route_to_two(folder: Path) -> Path:
    """Makes the router of block 0 choose between experts 0 and 1 alone: logits (a, -a, 0, 0)."""
    tensors = load_file(folder / "model.safetensors")
    (name,) = (key for key in tensors if key.startswith("model.layers.0.") and key.endswith("gate.weight"))
    gate = tensors[name]
    tensors[name] = torch.cat([gate[:1], -gate[:1], torch.zeros_like(gate[2:])])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("scheme", [W4, STATIC], ids=["gptq", "fp8 static"])
def test_every_expert_is_quantized_and_those_that_saw_no_token_say_so(tiny_model, tmp_path, scheme):
    folder = _route_to_two(tiny_model("mixtral", dtype=torch.bfloat16, num_experts_per_tok=1))
    method = "gptq" if scheme is W4 else "fp8"
    result = quantize(_recipe([method], scheme), _base(folder), tmp_path / "out")
    reader = CheckpointReader(result.path)
    experts = [name for name in reader.layout.linears if ".layers.0." in name and ".experts." in name]
    assert len(experts) == 4 * 3
    fallbacks = {layer.name: layer.fallback for layer in result.layers}
    for name in experts:
        unseen = int(name.split(".experts.")[1][0]) >= 2
        told = "only 0 of 288 calibration tokens reached it" if unseen and method == "gptq" else None
        assert fallbacks[name] == told, name
        assert bool(torch.isfinite(reader.weight(name, torch.float32)).all())
    if method == "fp8":
        for part in ("w1", "w2", "w3"):
            names = [name for name in experts if name.endswith(part)]
            scales = [float(reader.unpack(name).input_scale) for name in names]
            assert scales[2] == scales[3] == max(scales[:2]), part


def test_a_budget_is_allotted_and_what_became_of_it_is_told(tiny_llama, tmp_path):
    base = _base(tiny_llama(tie_word_embeddings=False))
    candidates = [{"weights": {"bits": bits, "group": 32}} for bits in (2, 4, 8)]
    recipe = _recipe(["gptq"], None, target_bits=5.5, candidates=candidates)
    stages: list[str] = []
    result = quantize(recipe, base, tmp_path / "out", progress=lambda step: stages.append(step.stage))
    told = json.loads((result.path / REPORT).read_text())["allocation"]
    assert told["bits"] <= 5.5
    assert len(set(CheckpointReader(result.path).layout.linears.values())) > 1
    assert told["predicted_kl"] > 0
    assert told["measured_kl"] > 0
    assert stages[-1] == "divergence of the whole"
    assert quantize(recipe, base, tmp_path / "again").digest == result.digest
