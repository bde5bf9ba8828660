"""Quantizing on a GPU: nearly the CPU's codes, files that load, batches that halve where memory is short."""

from pathlib import Path

import pytest
import torch

from narrowgauge.quant.evaluate.reference import ReferenceModel
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.pipeline.sequential import RunOptions, quantize
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import LocalModel, resolve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

W4 = {"weights": {"bits": 4, "group": 32}}
FP8 = {"bits": 8, "type": "float"}
RECIPES = {
    "gptq": ([{"name": "gptq"}], W4),
    "awq, gptq": ([{"name": "awq"}, {"name": "gptq"}], W4),
    "smoothquant, gptq": (
        [{"name": "smoothquant"}, {"name": "gptq"}],
        {"weights": {"bits": 8}, "activations": {"bits": 8, "type": "int"}},
    ),
    "fp8 static, kv cache": (
        [{"name": "fp8"}],
        {
            "weights": {**FP8, "per_tensor": True},
            "activations": {**FP8, "granularity": "tensor", "dynamic": False},
            "kv_cache": {**FP8, "granularity": "head"},
        },
    ),
}


def _recipe(name: str) -> Recipe:
    methods, scheme = RECIPES[name]
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"samples": 8, "length": 64},
        "methods": methods,
        "scheme": scheme,
    }
    return build(Recipe, mapping, registries={QuantMethod: METHODS})


def _base(folder: Path) -> LocalModel:
    return resolve(str(folder), cache=folder.parent / "cache")


@pytest.mark.parametrize("name", RECIPES)
def test_the_gpu_chooses_nearly_the_codes_of_the_cpu(tiny_llama, tmp_path, name):
    base = _base(tiny_llama())
    for device in ("cpu", "cuda"):
        quantize(_recipe(name), base, tmp_path / device, options=RunOptions(device=device, dtype=torch.float32))
    ours, theirs = CheckpointReader(tmp_path / "cuda"), CheckpointReader(tmp_path / "cpu")
    assert ours.names() == theirs.names()
    assert ours.layout.linears == theirs.layout.linears
    for linear in ours.layout.linears:
        codes = [reader.unpack(linear).codes.float() for reader in (ours, theirs)]
        assert float((codes[0] != codes[1]).float().mean()) < 0.02, linear
    for tensor in ours.names():
        if tensor.endswith(("k_scale", "v_scale", "input_scale")):
            torch.testing.assert_close(ours.tensor(tensor).float(), theirs.tensor(tensor).float(), rtol=0.02, atol=0)
    ids = torch.arange(32).unsqueeze(0)
    logits = [ReferenceModel(tmp_path / one, dtype=torch.float32).logits(ids) for one in ("cuda", "cpu")]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.1


def test_an_interrupted_run_on_the_gpu_goes_on_to_the_same_bits(tiny_llama, tmp_path):
    base, options = _base(tiny_llama(num_hidden_layers=3)), RunOptions(device="cuda")
    whole = quantize(_recipe("awq, gptq"), base, tmp_path / "whole", options=options)

    def interrupt(step: object) -> None:
        if step.done == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(_recipe("awq, gptq"), base, tmp_path / "out", options=options, progress=interrupt)
    result = quantize(_recipe("awq, gptq"), base, tmp_path / "out", options=options)
    assert result.resumed == 2
    assert result.digest == whole.digest


def test_batches_halve_until_they_fit(tiny_llama, tmp_path):
    base = _base(tiny_llama(hidden_size=256, intermediate_size=2048, max_position_embeddings=1024))
    recipe = build(
        Recipe,
        {
            "version": 1,
            "model": {"source": "unused", "name": "tiny"},
            "calibration": {"samples": 16, "length": 1024},
            "methods": [{"name": "gptq"}],
            "scheme": W4,
        },
        registries={QuantMethod: METHODS},
    )
    options = RunOptions(device="cuda", dtype=torch.float32, activation_bytes=0)
    roomy = quantize(recipe, base, tmp_path / "roomy", options=options)
    torch.cuda.empty_cache()
    # 16 samples at once need 128 MiB for each of gate, up and their product; the limit leaves room for a few of them.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(200 * 2**20 / total)
    try:
        tight = quantize(recipe, base, tmp_path / "tight", options=options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for one, other in zip(roomy.layers, tight.layers, strict=True):
        assert one.output_error == pytest.approx(other.output_error, rel=0.02)
