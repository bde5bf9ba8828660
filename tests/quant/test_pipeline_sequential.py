"""The whole way from a recipe to a checkpoint on random Llamas; transformers with compressed-tensors is the oracle."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from narrowgauge.quant.formats.base import FormatError
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import verify
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.pipeline.export import ExportError
from narrowgauge.quant.pipeline.resume import ResumeError
from narrowgauge.quant.pipeline.sequential import QuantizeError, RunOptions, quantize
from narrowgauge.quant.recipe import Recipe, RecipeError, load_recipe
from narrowgauge.quant.sources import LocalModel, resolve
from narrowgauge.quant.texts import TextError

RECIPES = Path(__file__).resolve().parents[2] / "flows" / "recipes"


def _recipe(**changes: object) -> Recipe:
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"samples": 6, "length": 48},
        "methods": [{"name": "gptq"}],
        "scheme": {"weights": {"bits": 4, "group": 32}},
        **changes,
    }
    return build(Recipe, mapping, registries={QuantMethod: METHODS})


def _base(folder: Path) -> LocalModel:
    return resolve(str(folder), cache=folder.parent / "cache")


def _damaged(folder: Path, tensor: str) -> LocalModel:
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return _base(folder)


def _load(folder: Path, *, dequantize: bool) -> tuple[torch.nn.Module, dict[str, object]]:
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.bfloat16, **options
    )
    model(torch.tensor([[1, 2, 3]]))  # the first forward makes compressed-tensors write out plain weights
    return model, report


def _assert_loads_with_our_weights(folder: Path, *, layers: int, dequantize: bool = False) -> None:
    model, report = _load(folder, dequantize=dequantize)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    reader = CheckpointReader(folder)
    assert len(reader.layout.linears) == layers
    for name in reader.layout.linears:
        theirs = model.get_submodule(name).weight
        ours = reader.weight(name, torch.bfloat16)
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    for name in reader.names():
        if "layernorm" in name or "embed" in name:
            assert torch.equal(reader.tensor(name), model.state_dict()[name])


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # transformers, with dequantize
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(
    "weights",
    [
        {"bits": 4, "group": 32},
        {"bits": 4, "group": 32, "symmetric": False},
        {"bits": 8},
        {"bits": 2, "group": 16},
    ],
)
def test_transformers_loads_the_checkpoint_with_the_weights_that_we_dequantize(tiny_llama, tmp_path, weights, method):
    base = _base(tiny_llama())
    recipe = _recipe(scheme={"weights": weights}, methods=[{"name": method}])
    result = quantize(recipe, base, tmp_path / "out")
    assert verify(result.path).digest == result.digest
    assert result.size_bytes == (result.path / "model.safetensors").stat().st_size
    # transformers 5.24 cannot load asymmetric files in packed form: it expects zero points that are not packed.
    _assert_loads_with_our_weights(result.path, layers=14, dequantize=not weights.get("symmetric", True))


def test_an_untied_model_with_biases_and_mixed_schemes_loads_too(tiny_llama, tmp_path):
    base = _base(tiny_llama(tie_word_embeddings=False, attention_bias=True, mlp_bias=True))
    rules = [
        {"match": r"re:.*\.v_proj$", "scheme": {"weights": {"bits": 8}}},
        {"match": "model.layers.1.mlp.down_proj", "keep": True},
    ]
    result = quantize(_recipe(rules=rules), base, tmp_path / "out")
    _assert_loads_with_our_weights(result.path, layers=13)
    reader = CheckpointReader(result.path)
    assert reader.layout.linears["model.layers.0.self_attn.v_proj"] == Scheme(weights=WeightScheme(bits=8))
    assert reader.config["quantization_config"]["ignore"] == ["lm_head", "model.layers.1.mlp.down_proj"]
    assert reader.has("lm_head.weight")
    assert reader.has("model.layers.0.self_attn.q_proj.bias")


def test_the_same_recipe_gives_the_same_digest_twice_and_another_seed_gives_another(tiny_llama, tmp_path):
    base = _base(tiny_llama())
    first, second = (quantize(_recipe(), base, tmp_path / name) for name in ("one", "two"))
    other = quantize(_recipe(calibration={"samples": 6, "length": 48, "seed": 1}), base, tmp_path / "three")
    assert first.digest == second.digest != other.digest


def test_gptq_output_errors_are_those_of_a_real_forward_and_below_round_to_nearest(tiny_llama, tmp_path):
    from transformers import AutoTokenizer

    from narrowgauge.quant.calibration import build_calibration

    folder, recipe = tiny_llama(), _recipe()
    result = quantize(recipe, _base(folder), tmp_path / "out")
    nearest = quantize(_recipe(methods=[{"name": "rtn"}]), _base(folder), tmp_path / "rtn")
    ids = build_calibration(recipe.calibration, AutoTokenizer.from_pretrained(folder)).ids
    base, quantized, rounded = CheckpointReader(folder), CheckpointReader(result.path), CheckpointReader(nearest.path)
    # With its weights put in, transformers' model sends each Linear the inputs that calibration should have seen.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs: dict[str, torch.Tensor] = {}
    for layer in result.layers:
        module = model.get_submodule(layer.name)
        module.weight.data = quantized.weight(layer.name, torch.float32)
        module.register_forward_pre_hook(lambda _, args, name=layer.name: inputs.update({name: args[0]}))
    with torch.no_grad():
        model(ids)
    for layer in result.layers:
        x, weight = inputs[layer.name].flatten(0, 1), base.weight(layer.name, torch.float32)
        errors = [
            float((x @ (weight - reader.weight(layer.name, torch.float32)).t()).norm() / (x @ weight.t()).norm())
            for reader in (quantized, rounded)
        ]
        assert layer.output_error == pytest.approx(errors[0], rel=0.01), layer.name
        assert errors[0] < errors[1], layer.name
        assert layer.fallback is None
    assert all(layer.output_error is None for layer in nearest.layers)
    assert [layer.weight_error for layer in nearest.layers] == pytest.approx(
        [
            float((base.weight(n.name, torch.float32) - rounded.weight(n.name, torch.float32)).norm())
            / float(base.weight(n.name, torch.float32).norm())
            for n in nearest.layers
        ],
        rel=1e-3,
    )


def test_a_finished_checkpoint_of_the_same_inputs_is_found_again(tiny_llama, tmp_path):
    base, output = _base(tiny_llama()), tmp_path / "out"
    first = quantize(_recipe(), base, output)
    again = quantize(_recipe(), base, output)
    assert (first.reused, again.reused) == (False, True)
    assert (again.digest, again.size_bytes) == (first.digest, first.size_bytes)
    assert [layer.name for layer in again.layers] == [layer.name for layer in first.layers]
    with pytest.raises(ExportError, match="another recipe or base model"):
        quantize(_recipe(methods=[{"name": "rtn"}]), base, output)


def test_what_lies_at_the_output_already_is_never_overwritten(tiny_llama, tmp_path):
    base, output = _base(tiny_llama()), tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="choose another output"):
        quantize(_recipe(), base, output)
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    (output / "thesis.txt").unlink()
    assert quantize(_recipe(methods=[{"name": "rtn"}]), base, output).path == output


def test_tokenizer_and_generation_files_are_copied_byte_for_byte(tiny_llama, tmp_path):
    folder = tiny_llama()
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n\xe2\x82\xac")
    (folder / "generation_config.json").write_bytes(b'{ "temperature":0.5 }')
    result = quantize(_recipe(methods=[{"name": "rtn"}]), _base(folder), tmp_path / "out")
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (result.path / name).read_bytes() == (folder / name).read_bytes()


def test_every_width_that_the_group_does_not_divide_is_listed_before_anything_is_done(tiny_llama, tmp_path):
    base = _base(tiny_llama(intermediate_size=112))
    stages: list[str] = []
    with pytest.raises(RecipeError) as caught:
        quantize(_recipe(), base, tmp_path / "out", progress=lambda step: stages.append(step.stage))
    assert str(caught.value).startswith(
        "model.layers.0.mlp.down_proj: in_features 112 is not a multiple of group 32; use 16"
    )
    assert str(caught.value).endswith("(and model.layers.1.mlp.down_proj)")
    assert caught.value.exit_code == 2
    assert stages == []
    assert not (tmp_path / "out").exists()


def test_a_rule_that_matches_nothing_and_a_scheme_for_the_head_are_refused(tiny_llama, tmp_path):
    base = _base(tiny_llama())
    with pytest.raises(RecipeError, match=r"'model\.layer\.0' match no Linear"):
        quantize(_recipe(rules=[{"match": "model.layer.0", "keep": True}]), base, tmp_path / "out")
    with pytest.raises(RecipeError, match="lm_head: is the embedding itself"):
        quantize(_recipe(rules=[{"match": "lm_head", "scheme": {"weights": {"bits": 8}}}]), base, tmp_path / "out")


def test_a_quantized_model_is_not_quantized_again(tiny_llama, tmp_path):
    first = quantize(_recipe(methods=[{"name": "rtn"}]), _base(tiny_llama()), tmp_path / "out")
    with pytest.raises(RecipeError, match="is quantized already"):
        quantize(_recipe(), _base(first.path), tmp_path / "twice")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("block", [0, 1])
def test_a_broken_weight_is_named_and_finished_blocks_are_kept(tiny_llama, tmp_path, method, block):
    base = _damaged(tiny_llama(), f"model.layers.{block}.mlp.up_proj.weight")
    output = tmp_path / "outputs" / "out"
    with pytest.raises(QuantizeError, match=rf"model\.layers\.{block}\.mlp\.up_proj: the weight holds NaN"):
        quantize(_recipe(methods=[{"name": method}]), base, output)
    assert [path.name for path in output.parent.iterdir()] == [".out.work"] * block


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.post_attention_layernorm.weight"]
)
def test_nan_in_what_is_only_taken_over_is_named_too(tiny_llama, tmp_path, tensor):
    for method in ("rtn", "gptq"):
        with pytest.raises(QuantizeError, match=rf"^{tensor}: holds NaN or infinity"):
            quantize(_recipe(methods=[{"name": method}]), _damaged(tiny_llama(), tensor), tmp_path / method)
        assert not (tmp_path / method).exists()


def test_activations_that_overflow_are_named_by_the_first_layer_they_reach(tiny_llama, tmp_path):
    folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e38
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^model\.layers\.0(\.mlp\.down_proj)?: .*NaN or infinity") as caught:
        quantize(_recipe(), _base(folder), tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.glob("*out*")) == []


def test_one_calibration_sample_is_enough(tiny_llama, tmp_path):
    result = quantize(_recipe(calibration={"samples": 1, "length": 48}), _base(tiny_llama()), tmp_path / "out")
    assert [layer.fallback for layer in result.layers] == [None] * 14


def test_a_run_that_ends_before_its_first_block_leaves_nothing_behind(tiny_llama, tmp_path):
    output = tmp_path / "outputs" / "out"

    def interrupt(step: object) -> None:
        if step.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(_recipe(), _base(tiny_llama()), output, progress=interrupt)
    assert list(output.parent.iterdir()) == []


def test_work_of_another_recipe_is_refused_until_it_is_discarded(tiny_llama, tmp_path):
    base, output = _base(tiny_llama()), tmp_path / "out"

    def interrupt(step: object) -> None:
        if step.done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(_recipe(), base, output, progress=interrupt)
    other = _recipe(scheme={"weights": {"bits": 8, "group": 32}})
    with pytest.raises(ResumeError, match=r"recipe\.scheme\.weights\.bits: 4 then, 8 now\); .*--fresh"):
        quantize(other, base, output)
    assert quantize(other, base, output, options=RunOptions(resume=False)).resumed == 0
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"]


def test_a_device_or_a_place_that_is_not_there_is_told_in_one_line(tiny_llama, tmp_path):
    base = _base(tiny_llama())
    for device in ("nonsense", "mps"):
        with pytest.raises(QuantizeError, match=f"^device '{device}': .+"):
            quantize(_recipe(), base, tmp_path / "out", options=RunOptions(device=device))
    (tmp_path / "file").write_text("")
    with pytest.raises(ResumeError, match="cannot be made: Not a directory; choose another output"):
        quantize(_recipe(), base, tmp_path / "file" / "out")


def test_progress_counts_every_layer_once_and_ends_with_nothing_left(tiny_llama, tmp_path):
    steps: list[object] = []
    quantize(_recipe(), _base(tiny_llama()), tmp_path / "out", progress=steps.append)
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert {step.done for step in steps} == set(range(15))
    assert {step.total for step in steps} == {14}
    assert steps[0].eta_s is None
    assert steps[-1].eta_s == 0
    assert list(dict.fromkeys(step.stage for step in steps)) == [
        "calibration text",
        "embedding",
        "model.layers.0",
        "model.layers.0: forward",
        "model.layers.1",
        "checkpoint",
    ]


def test_too_little_text_and_a_missing_tokenizer_are_said_before_the_work(tiny_llama, tmp_path):
    folder = tiny_llama()
    text = tmp_path / "short.txt"
    text.write_text("\n\n".join(f"Paragraph {number}." for number in range(20)))
    spec = {"sources": [{"text": str(text)}], "samples": 64, "length": 128}
    with pytest.raises(TextError, match="tokens for calibration; 64 samples of 128 need 8192"):
        quantize(_recipe(calibration=spec), _base(folder), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(QuantizeError, match="has no usable tokenizer"):
        quantize(_recipe(), _base(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_without_one_of_its_tensors_is_refused(tiny_llama, tmp_path):
    folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is not stored"):
        quantize(_recipe(), _base(folder), tmp_path / "out")


@pytest.mark.slow
def test_smollm2_in_four_bits_loads_in_transformers(smollm2, tmp_path):
    recipe = load_recipe(RECIPES / "smollm2-w4a16-gptq.yaml")
    recipe = dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, samples=2, length=256))
    result = quantize(recipe, resolve(str(smollm2), cache=tmp_path), tmp_path / "out")
    assert [layer.fallback for layer in result.layers] == [None] * 210
    _assert_loads_with_our_weights(result.path, layers=210)
    shutil.rmtree(result.path)
