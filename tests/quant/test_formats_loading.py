"""transformers loads what we write: nothing missing, nothing unexpected but KV scales, the weights that `dequantize` gives."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from narrowgauge.quant.formats.base import KVScales, QuantizedWeight, get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.observers import round_to_nearest

INT8 = ActivationScheme(bits=8, type="int")
FP8 = ActivationScheme(bits=8, type="float")
FP8_STATIC = ActivationScheme(bits=8, type="float", granularity="tensor", dynamic=False)
FP8_GROUPS = ActivationScheme(bits=8, type="float", granularity="group", group=64)
BLOCK = WeightScheme(bits=8, type="float", block=(64, 64))
W4 = Scheme(weights=WeightScheme(bits=4, group=32))
W8A8 = Scheme(weights=WeightScheme(bits=8), activations=INT8)
SCHEMES = {
    "w4 sym": W4,
    "w4 asym": Scheme(weights=WeightScheme(bits=4, group=32, symmetric=False)),
    "w4 channel": Scheme(weights=WeightScheme(bits=4)),
    "w8": Scheme(weights=WeightScheme(bits=8, group=64)),
    "w8a8": W8A8,
    "w8a8 static": Scheme(
        weights=WeightScheme(bits=8),
        activations=ActivationScheme(bits=8, type="int", granularity="tensor", dynamic=False),
    ),
    "w4a8": Scheme(weights=WeightScheme(bits=4, group=32), activations=INT8),
    "fp8 weights": Scheme(weights=WeightScheme(bits=8, type="float")),
    "fp8 static": Scheme(weights=WeightScheme(bits=8, type="float", per_tensor=True), activations=FP8_STATIC),
    "fp8 dynamic": Scheme(weights=WeightScheme(bits=8, type="float"), activations=FP8),
    "fp8 block": Scheme(weights=BLOCK, activations=FP8_GROUPS),
    "fp8 block weights": Scheme(weights=BLOCK),
}
DEQUANTIZED = CompressedTensorsConfig(dequantize=True)
KV = KVCacheScheme(bits=8, type="float")


def _quantize(
    base: Path,
    folder: Path,
    choose: Callable[[str], Scheme | None],
    *,
    name: str = "compressed-tensors",
    kv: bool = False,
) -> Path:
    """The checkpoint that round to nearest makes of a tiny model, by the format alone."""
    checkpoint_format = get_format(name)
    tensors: dict[str, torch.Tensor] = {}
    schemes: dict[str, Scheme] = {}
    kept = ["lm_head"]
    for full, tensor in load_file(base / "model.safetensors").items():
        module, _, local = full.rpartition(".")
        scheme = choose(module) if module.endswith("_proj") and local == "weight" else None
        if scheme is None:
            tensors[full] = tensor
            kept += [module] if module.endswith("_proj") and local == "weight" else []
            continue
        rounded = round_to_nearest(tensor, scheme.weights)
        static = scheme.activations is not None and not scheme.activations.dynamic
        weight = QuantizedWeight(
            codes=rounded.codes,
            scales=rounded.scales,
            zeros=rounded.zeros,
            block=rounded.block,
            input_scale=torch.tensor([0.05], dtype=tensor.dtype) if static else None,
        )
        packed = checkpoint_format.pack(weight, scheme)
        tensors |= {f"{module}.{local}": packed_tensor for local, packed_tensor in packed.items()}
        schemes[module] = scheme
    for index in range(2 if kv else 0):
        scales = KVScales(key=torch.tensor([0.02]), value=torch.tensor([0.03]))
        tensors |= checkpoint_format.kv_tensors(f"model.layers.{index}.self_attn", scales)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = checkpoint_format.config(schemes, tuple(kept), KV if kv else None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _load(folder: Path, *, unexpected: frozenset[str] = frozenset(), **options: object) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert report["missing_keys"] == set()
    assert report["unexpected_keys"] == unexpected
    assert report["mismatched_keys"] == set()
    return model.eval()


def _check_weights(model: torch.nn.Module, reader: CheckpointReader) -> None:
    """After its first forward pass the library has decompressed every weight: within one step of bfloat16 of ours."""
    with torch.inference_mode():
        logits = model(torch.arange(1, 9).view(1, -1)).logits
    assert bool(torch.isfinite(logits).all())
    for name in reader.layout.linears:
        theirs, ours = model.get_submodule(name).weight.float(), reader.weight(name, torch.bfloat16).float()
        assert theirs.shape == ours.shape
        assert bool(((theirs - ours).abs() <= ours.abs() * 2.0**-7).all()), name


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_checkpoint_of_each_scheme_loads_with_the_weights_we_dequantize(tiny_llama, tmp_path, name):
    base = tiny_llama(num_hidden_layers=1)
    folder = _quantize(base, tmp_path / "out", lambda _: SCHEMES[name])
    reader = CheckpointReader(folder)
    assert set(reader.layout.linears.values()) == {SCHEMES[name]}
    assert reader.layout.warnings == ()
    # compressed-tensors 0.20.1 forgets to pack the zero points of the modules it prepares for packed ones (its own files
    # load no better), so that asymmetric files load dequantized only.
    asymmetric = {} if SCHEMES[name].weights.symmetric else {"quantization_config": DEQUANTIZED}
    _check_weights(_load(folder, **asymmetric), reader)


def test_mixed_schemes_and_kept_layers_load_each_as_it_was_chosen(tiny_llama, tmp_path):
    def choose(module: str) -> Scheme | None:
        if module.endswith("layers.1.mlp.down_proj"):
            return None
        if ".self_attn." in module:
            return W8A8
        return SCHEMES["fp8 dynamic"] if "layers.0" in module else W4

    folder = _quantize(tiny_llama(), tmp_path / "out", choose)
    reader = CheckpointReader(folder)
    assert reader.config["quantization_config"]["format"] == "mixed-precision"
    assert len(reader.layout.linears) == 13
    _check_weights(_load(folder), reader)


@pytest.mark.parametrize("weights", [True, False], ids=["with weights", "kv only"])
def test_kv_scales_are_the_only_keys_that_transformers_does_not_know(tiny_llama, tmp_path, weights):
    base = tiny_llama()
    folder = _quantize(base, tmp_path / "out", lambda _: W4 if weights else None, kv=True)
    scales = frozenset(f"model.layers.{index}.self_attn.{kind}_scale" for index in (0, 1) for kind in "kv")
    reader = CheckpointReader(folder)
    assert reader.layout.kv_cache == KV
    assert len(reader.layout.linears) == 14 * weights
    _check_weights(_load(folder, unexpected=scales), reader)


def test_native_fp8_loads_with_the_weights_we_dequantize(tiny_llama, tmp_path, monkeypatch):
    from transformers.quantizers import quantizer_finegrained_fp8

    # transformers asks for accelerate, which dequantizing on a CPU does not use.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    folder = _quantize(tiny_llama(), tmp_path / "out", lambda _: SCHEMES["fp8 block"], name="fp8")
    _check_weights(_load(folder), CheckpointReader(folder))
