"""What a report says of a checkpoint comes from the files that lie beside its weights."""

import json

import pytest

from narrowgauge.quant.evaluate.subject import describe, read_making
from narrowgauge.quant.evaluate.windows import EvaluationError
from narrowgauge.quant.formats.manifest import read_manifest
from narrowgauge.quant.sources import LocalModel, resolve

GPTQ = "{name: gptq}"


def test_a_checkpoint_names_its_schemes_recipe_and_calibration(tiny_llama, quantized, tmp_path):
    folder = quantized(tiny_llama(), "{weights: {bits: 4, group: 32}, kv_cache: {bits: 8, type: float}}", method=GPTQ)
    model = resolve(str(folder), cache=tmp_path)
    subject, manifest = describe(model), read_manifest(folder)
    assert subject.scheme == "W4A16 + KV8-fp8"
    assert (subject.digest, subject.recipe_digest) == (model.digest, manifest.recipe_digest)
    assert subject.calibration_digest == manifest.calibration_digest is not None
    assert subject.calibration_seed == 5
    assert subject.size_bytes == (folder / "model.safetensors").stat().st_size
    making = read_making(folder)
    assert len(making.layers) == 14
    assert all(layer.scheme == "W4A16" and layer.output_error > 0 for layer in making.layers)


def test_a_plain_model_has_no_making_and_keeps_its_revision(tiny_llama):
    folder = tiny_llama()
    subject = describe(LocalModel(path=folder, source="hf:org/x@main", revision="abc", digest="d" * 64))
    assert (subject.revision, subject.calibration_seed, subject.scheme) == ("abc", None, None)
    assert read_making(folder).layers == ()


def test_fallbacks_and_an_allocation_become_notes(tmp_path):
    layers = [{"name": f"l{i}", "weight_error": 0.1, "fallback": "not positive definite"} for i in range(7)]
    content = {"layers": layers, "allocation": {"bits": 4.78, "predicted_kl": 0.012, "measured_kl": 0.0131}}
    (tmp_path / "quantization.json").write_text(json.dumps(content))
    assert read_making(tmp_path).notes == (
        "fallback in l0, l1, l2, l3, l4 and 2 more: not positive definite",
        "allocation: bits 4.78, predicted kl 0.012, measured kl 0.0131",
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": [{"name": "x"}]}'])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "quantization.json").write_text(text)
    with pytest.raises(EvaluationError, match=r"quantization\.json: is not what quantizing writes"):
        read_making(tmp_path)
