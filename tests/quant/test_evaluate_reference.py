"""The reference model: transformers' own logits, from plain and from quantized checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from narrowgauge.quant.evaluate.evaluate import evaluate, load_tokenizer
from narrowgauge.quant.evaluate.reference import ReferenceModel, ReferenceModelError
from narrowgauge.quant.evaluate.report import Subject
from narrowgauge.quant.evaluate.windows import Cut, named_ids
from narrowgauge.quant.formats.base import FormatError, QuantizedWeight, get_format
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme

IDS = torch.randint(258, (2, 33), generator=torch.Generator().manual_seed(3))
W4 = Scheme(weights=WeightScheme(bits=4, group=32))


def _transformers_logits(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_float32_logits_are_transformers_own(tiny_llama, tied):
    folder = tiny_llama(tie_word_embeddings=tied)
    source = ReferenceModel(folder, dtype=torch.float32)
    assert torch.equal(source.logits(IDS), _transformers_logits(folder, torch.float32))
    assert (source.name, source.dtype, source.attention) == ("reference", "float32", "sdpa")


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_logits_are_transformers_own_before_their_last_rounding(tiny_llama, tied):
    folder = tiny_llama(tie_word_embeddings=tied)
    logits = ReferenceModel(folder, dtype=torch.bfloat16).logits(IDS)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.bfloat16(), _transformers_logits(folder, torch.bfloat16), rtol=2**-7, atol=2**-9)
    assert not torch.equal(logits, logits.bfloat16().float()), "the head rounds to bfloat16"


def _quantize_by_hand(folder):
    """Stores one layer as W4 with known codes; returns the weight that those codes stand for, in float32."""
    name = "model.layers.1.mlp.down_proj"
    tensors = load_file(folder / "model.safetensors")
    shape = tensors.pop(f"{name}.weight").shape
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    scales = (torch.rand((shape[0], shape[1] // 32), generator=generator) * 0.02 + 0.01).bfloat16()
    written = get_format("compressed-tensors")
    packed = written.pack(QuantizedWeight(codes=codes, scales=scales), W4)
    tensors |= {f"{name}.{local}": tensor for local, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    linears = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")]
    config["quantization_config"] = written.config({name: W4}, tuple(part for part in linears if part != name))
    (folder / "config.json").write_text(json.dumps(config))
    return name, codes.float() * scales.float().repeat_interleave(32, dim=1)


def test_a_quantized_layer_counts_with_the_weight_that_its_codes_stand_for(tiny_llama):
    plain, quantized = tiny_llama("plain"), tiny_llama("quantized")
    name, weight = _quantize_by_hand(quantized)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        model.get_submodule(name).weight.copy_(weight)
        expected = model(IDS).logits
    assert torch.equal(ReferenceModel(quantized, dtype=torch.float32).logits(IDS), expected)


def test_each_window_is_scored_on_its_own(tiny_llama):
    source = ReferenceModel(tiny_llama(), dtype=torch.float32)
    together = source.logits(IDS)
    alone = torch.cat([source.logits(row[None]) for row in IDS])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_windows_beyond_the_context_are_refused(tiny_llama):
    source = ReferenceModel(tiny_llama(max_position_embeddings=32), dtype=torch.float32)
    with pytest.raises(ReferenceModelError, match="33 tokens are longer than the model's 32 positions"):
        source.logits(IDS)


def test_a_token_of_another_vocabulary_is_refused(tiny_llama):
    source = ReferenceModel(tiny_llama(vocab_size=200), dtype=torch.float32)
    with pytest.raises(ReferenceModelError, match=f"token {int(IDS.max())} lies outside the model's 200"):
        source.logits(IDS)


def test_a_missing_parameter_is_named(tiny_llama):
    folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReferenceModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is not stored"):
        ReferenceModel(folder)


def test_a_parameter_of_another_shape_is_named(tiny_llama):
    folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReferenceModelError, match=r"model\.norm\.weight has shape"):
        ReferenceModel(folder)


def test_an_architecture_that_transformers_lacks_is_named(tiny_llama):
    folder = tiny_llama()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(ReferenceModelError, match="no_such_model"):
        ReferenceModel(folder)


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"has no config\.json"):
        ReferenceModel(tmp_path)


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_refused_by_name(tiny_llama, device):
    with pytest.raises(ReferenceModelError, match=f"device '{device}'"):
        ReferenceModel(tiny_llama(), device=device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "kl_max", "ratio_max"),
    [
        ("int", "{name: smoothquant, alpha: 0.7, sites: [norm, linear]}, {name: gptq}", 0.012, 1.025),
        ("float", "{name: gptq}", 0.02, 1.03),
    ],
)
def test_eight_bits_cost_the_real_model_little_and_the_rounding_of_inputs_a_part_of_it(
    smollm2, quantized, kind, method, kl_max, ratio_max
):
    scheme = f"{{weights: {{bits: 8, type: {kind}}}, activations: {{bits: 8, type: {kind}}}}}"
    folder = quantized(smollm2, scheme, method=method, calibration="{samples: 16, length: 256, seed: 0}")
    heldout = named_ids("pydoc", load_tokenizer(smollm2), Cut(windows=4, length=256))
    base = ReferenceModel(smollm2, dtype=torch.float32)
    with_inputs, weights_only = (
        evaluate(
            ReferenceModel(folder, dtype=torch.float32, round_activations=switch),
            base,
            heldout,
            candidate_subject=Subject(name="candidate"),
            base_subject=Subject(name="base"),
        )
        for switch in (True, False)
    )
    assert with_inputs.perplexity_ratio < ratio_max
    assert with_inputs.kl_mean < kl_max
    assert weights_only.kl_mean < 0.9 * with_inputs.kl_mean
    assert weights_only.perplexity != with_inputs.perplexity
