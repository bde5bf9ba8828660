"""Estimates against what a run then takes."""

import shutil
from pathlib import Path

import pytest

from narrowgauge.quant import estimate as module
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.pipeline import sequential
from narrowgauge.quant.pipeline.sequential import RunOptions, dry_run, quantize
from narrowgauge.quant.pipeline.shards import pieces
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import LocalModel, resolve

W4 = {"weights": {"bits": 4, "group": 32}}
FP8 = {"bits": 8, "type": "float"}


def _recipe(**changes: object) -> Recipe:
    mapping = {
        "version": 1,
        "model": {"source": "unused", "name": "tiny"},
        "calibration": {"samples": 6, "length": 48},
        "methods": [{"name": "gptq"}],
        **changes,
    }
    return build(Recipe, mapping, registries={QuantMethod: METHODS})


def _base(folder: Path) -> LocalModel:
    return resolve(str(folder), cache=folder.parent / "cache")


def _tensor_bytes(folder: Path) -> int:
    return sum(piece.size for file in folder.glob("*.safetensors") for piece in pieces(file))


@pytest.mark.parametrize(
    "changes",
    [
        {"scheme": W4},
        {"scheme": {"weights": {"bits": 4, "group": 64, "symmetric": False}}, "format": "gptq_v2"},
        {"scheme": {"weights": {"bits": 8}, "activations": {"bits": 8, "type": "int"}}},
        {
            "methods": [{"name": "fp8"}],
            "scheme": {
                "weights": {**FP8, "per_tensor": True},
                "activations": {**FP8, "granularity": "tensor", "dynamic": False},
                "kv_cache": {**FP8, "granularity": "head"},
            },
        },
        {"methods": [{"name": "fp8"}], "scheme": {"weights": {**FP8, "block": [128, 128]}}},
        {"methods": [], "scheme": {"weights": None, "kv_cache": FP8}},
    ],
    ids=["w4", "gptq-v2-asym", "w8a8", "fp8-static-kv-head", "fp8-block", "kv"],
)
def test_the_bytes_are_those_that_are_written_but_for_the_headers(tiny_llama, tmp_path, changes):
    base, recipe = _base(tiny_llama()), _recipe(**changes)
    planned, told = dry_run(recipe, base, tmp_path / "out")
    written = quantize(recipe, base, tmp_path / "out")
    assert not planned.warnings
    assert told.shortages == ()
    assert told.size_bytes - planned.base_size_bytes == _tensor_bytes(written.path) - _tensor_bytes(base.path)


def test_a_budget_is_not_exceeded_and_nearly_used(tiny_llama, tmp_path):
    base, recipe = _base(tiny_llama()), _recipe(target_bits=5.5)
    _, told = dry_run(recipe, base, tmp_path / "out")
    written = quantize(recipe, base, tmp_path / "out")
    assert told.size_bytes - 8000 < written.size_bytes < told.size_bytes + 8000  # headers


def test_the_disk_never_holds_more_than_was_told(tiny_llama, tmp_path):
    base, recipe, output = _base(tiny_llama()), _recipe(scheme=W4), tmp_path / "far" / "out"
    _, told = dry_run(recipe, base, output)
    assert not output.parent.exists()
    seen = []

    def look(_: object) -> None:
        seen.append(sum(path.stat().st_size for path in output.parent.rglob("*") if path.is_file()))

    quantize(recipe, base, output, progress=look)
    headers_and_records = 60_000
    assert 0 < max(seen) < told.disk_bytes + headers_and_records


def test_more_tokens_and_an_allocation_take_longer_in_proportion_to_their_work(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_timed", lambda work, device: 1.0)  # one step of anything: a second
    base = _base(tiny_llama())

    def seconds(samples: int, **changes: object) -> float:
        calibration = {"samples": samples, "length": 48}
        return dry_run(_recipe(calibration=calibration, **changes), base, tmp_path / "out")[1].seconds

    once, twice, thrice = (seconds(samples, scheme=W4) for samples in (600, 1200, 1800))
    assert thrice - twice == pytest.approx(twice - once, rel=1e-3)
    assert twice > once
    assert seconds(600, target_bits=4.6, candidates=[W4, {"weights": {"bits": 8}}]) > once
    assert seconds(600, scheme=W4, methods=[{"name": "rtn"}]) < once


def test_less_memory_for_activations_lowers_the_peak_and_more_samples_raise_it(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(sequential, "_calibration", lambda *_: None)  # no text here holds so many tokens
    base = _base(tiny_llama())

    def peak(samples: int, gib: float) -> int:
        recipe = _recipe(scheme=W4, calibration={"samples": samples, "length": 256})
        options = RunOptions(activation_bytes=int(gib * (1 << 30)))
        return dry_run(recipe, base, tmp_path / "out", options=options)[1].memory_bytes

    few, many, spilled = peak(64, 4), peak(20_000, 4), peak(20_000, 0.001)
    assert many - few > 1 << 30
    assert spilled - few < 1 << 28


def test_what_the_machine_lacks_is_told_with_the_remedy(tiny_llama, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr(module, "_machine_bytes", lambda: 1 << 20)
    _, told = dry_run(_recipe(scheme=W4), _base(tiny_llama()), tmp_path / "out")
    disk, memory = told.shortages
    assert "1,000 are free" in disk
    assert "lower --activation-memory" in memory


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ({"sources": [{"text": "absent.txt"}], "length": 48}, "absent.txt: no such file"),
        ({"samples": 100_000, "length": 48}, "lower calibration.samples"),
        ({"length": 100_000}, "calibration.length: 100000 is more than the model's"),
    ],
)
def test_calibration_that_cannot_be_had_is_refused_before_anything_runs(tiny_llama, tmp_path, calibration, message):
    with pytest.raises(ValueError, match=message):
        dry_run(_recipe(scheme=W4, calibration=calibration), _base(tiny_llama()), tmp_path / "out")
