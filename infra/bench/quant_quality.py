"""What quantizing SmolLM2 costs by each method, and what it costs by other programs on the very same calibration tokens.

    python infra/bench/quant_quality.py --work WORK --llmcompressor PEER/bin/python --gptqmodel PEER/bin/python

infra/bench/README.md says how the peers' environments are made; without them only ours is measured. All keep lm_head; all
are calibrated on 64 x 512 tokens of two texts mixed, once for each seed of the draw, and judged by the reference modules in
float32 on 4 x 1024 tokens from the middle of each text, which the calibration tokens leave out. Writes
results/quant-<machine>.json. The base model was 4-bit once (Q4_1), so the figures compare methods on one base and not with
published tables.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quality_material as shared
import quality_texts
import torch
from peer_runs import PeerRun, as_compressed_tensors, quantize_by, threads, told_versions
from quality_material import FP8_DYNAMIC, W4G64, W8A8, Material, say

from narrowgauge.cli.results import make_result, write_result
from narrowgauge.kernels.hardware import cpu_class
from narrowgauge.quant.evaluate.evaluate import evaluate
from narrowgauge.quant.evaluate.reference import ReferenceModel
from narrowgauge.quant.evaluate.subject import describe
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import resolve

HERE = Path(__file__).resolve().parent
NAMES = {"llmcompressor": "llm-compressor", "gptqmodel": "GPTQModel"}

Figures = dict[str, dict[str, float]]
"""Figures by name, by text."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of comparison: our methods on a scheme, what each peer is told, and whether the tokens matter."""

    methods: list[dict[str, Any]]
    scheme: dict[str, Any]
    peers: dict[str, list[str]] = field(default_factory=dict)
    calibrated: bool = True


_W4 = as_compressed_tensors(W4G64)
CASES = {
    "rtn_w4g64": Case(methods=[{"name": "rtn"}], scheme=W4G64, calibrated=False),
    "gptq_w4g64": Case(
        methods=[{"name": "gptq"}],
        scheme=W4G64,
        peers={"llmcompressor": ["--methods", "gptq", "--scheme", _W4], "gptqmodel": ["--bits", "4", "--group", "64"]},
    ),
    "awq_w4g64": Case(
        methods=[{"name": "awq"}],
        scheme=W4G64,
        peers={"llmcompressor": ["--methods", "awq", "rtn", "--scheme", _W4]},
    ),
    "awq_gptq_w4g64": Case(methods=[{"name": "awq"}, {"name": "gptq"}], scheme=W4G64),
    "smoothquant_gptq_w8a8": Case(
        methods=[{"name": "smoothquant", "alpha": 0.7, "sites": ["norm", "linear"]}, {"name": "gptq"}],
        scheme=W8A8,
        peers={
            "llmcompressor": ["--methods", "smoothquant", "gptq", "--scheme", as_compressed_tensors(W8A8)],
        },
    ),
    "fp8_dynamic": Case(
        methods=[{"name": "fp8"}],
        scheme=FP8_DYNAMIC,
        peers={"llmcompressor": ["--methods", "rtn", "--scheme", as_compressed_tensors(FP8_DYNAMIC)]},
        calibrated=False,
    ),
    "gptq_fp8_dynamic": Case(methods=[{"name": "gptq"}], scheme=FP8_DYNAMIC),
}
"""Name -> case. A peer's methods are its own with its own defaults: its AWQ has no clipping, for one."""


class Judge:
    """Judges checkpoints against the base by the reference modules in float32; figures are kept in the work folder."""

    def __init__(self, material: Material) -> None:
        self._material = material
        self._base: _Remembering | None = None

    def figures(self, folder: Path, *, round_activations: bool = True) -> Figures:
        """Figures of an EvalReport, by text."""
        told = shared.sources("quant/evaluate", "quant/formats")
        name = f"judged-{shared.content(folder)}-{told}{'' if round_activations else '-unrounded'}.json"
        found: Figures = shared.remembered(
            self._material.work / name, lambda: self._judge(folder, round_activations=round_activations)
        )
        for text, figures in found.items():
            say(f"{folder.name}: {text}: perplexity {figures['perplexity']:.3f}, KL {figures['kl_mean']:.5f}")
        return found

    def _judge(self, folder: Path, *, round_activations: bool) -> Figures:
        base = self._material.base
        if self._base is None:
            self._base = _Remembering(ReferenceModel(base.path, dtype=torch.float32))
        candidate = ReferenceModel(folder, dtype=torch.float32, round_activations=round_activations)
        found = {}
        for name, heldout in self._material.judged.items():
            report = evaluate(
                candidate,
                self._base,
                heldout,
                candidate_subject=describe(resolve(str(folder), cache=folder)),
                base_subject=describe(base),
            )
            found[name] = report.figures()
        return found


class _Remembering:
    """A LogitsSource that computes each window once: the base is asked for the same ones beside every candidate."""

    def __init__(self, source: ReferenceModel) -> None:
        self._source = source
        self._known: dict[bytes, torch.Tensor] = {}
        self.name, self.dtype, self.attention = source.name, source.dtype, source.attention

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [S, L] int64 -> logits [S, L, V] float32."""
        key = ids.numpy().tobytes()
        if key not in self._known:
            self._known[key] = self._source.logits(ids)
        return self._known[key]


@dataclass
class Measured:
    """Figures of one case, one entry a seed; `unrounded` holds ours with the rounding of inputs switched off."""

    ours: list[Figures] = field(default_factory=list)
    unrounded: list[Figures] = field(default_factory=list)
    peers: dict[str, list[Figures]] = field(default_factory=dict)


def measure(
    material: Material, judge: Judge, case: Case, *, seeds: list[int], pythons: dict[str, Path]
) -> tuple[Measured, dict[str, dict[str, str]]]:
    """Quantizes and judges one case, ours and the peers that there are; also the peers' versions."""
    measured, versions = Measured(), {}
    for seed in seeds if case.calibrated else seeds[:1]:
        recipe = shared.make_recipe(material, case.methods, case.scheme, seed=seed)
        folder = shared.run_ours(material, recipe)
        measured.ours.append(judge.figures(folder))
        if "activations" in case.scheme:
            measured.unrounded.append(judge.figures(folder, round_activations=False))
        for peer, arguments in case.peers.items():
            if peer in pythons:
                run = _by_peer(material, recipe, peer, python=pythons[peer], arguments=arguments)
                measured.peers.setdefault(peer, []).append(judge.figures(run.folder))
                versions[peer] = run.versions
    return measured, versions


def _by_peer(material: Material, recipe: Recipe, peer: str, *, python: Path, arguments: list[str]) -> PeerRun:
    return quantize_by(material, recipe, f"peer_{peer}.py", python=python, arguments=[*arguments, *threads()])


def make_rows(measured: dict[str, Measured], names: dict[str, str]) -> list[dict[str, Any]]:
    """Result rows: means over the seeds with their extremes; ratio = peer / ours, above 1 where ours is better.

    `names` are the peers' with their versions. A second peer has rows of its own, named after it.
    """
    rows = []
    for text in quality_texts.TEXTS:
        first = next(iter(measured.values()))
        base = [figures[text]["base_perplexity"] for figures in first.ours]
        rows.append(row(f"bf16/{text}_ppl", base, unit="perplexity"))
    for case, found in measured.items():
        for text in quality_texts.TEXTS:
            for suffix, unit, figure in (("ppl", "perplexity", "perplexity"), ("kl", "nats", "kl_mean")):
                pick, name = _picker(text, figure), f"{case}/{text}_{suffix}"
                ours = list(map(pick, found.ours))
                if not found.peers:
                    rows.append(row(name, ours, unit=unit))
                for index, (peer, figures) in enumerate(found.peers.items()):
                    own = name if index == 0 else f"{name}_{peer}"
                    rows.append(row(own, ours, list(map(pick, figures)), unit=unit, peer_name=names[peer]))
            if found.unrounded:
                pick = _picker(text, "perplexity")
                rows.append(
                    row(f"{case}/{text}_ppl_inputs_unrounded", list(map(pick, found.unrounded)), unit="perplexity")
                )
    return rows


def _picker(text: str, figure: str) -> Callable[[Figures], float]:
    return lambda figures: figures[text][figure]


def row(
    name: str, ours: list[float], peer: list[float] | None = None, *, unit: str, peer_name: str | None = None
) -> dict[str, Any]:
    """One row of a results file, for figures of which less is better."""
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
    parser.add_argument("--work", type=Path, required=True, help="folder for models, texts and checkpoints; reused")
    for peer, name in NAMES.items():
        parser.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help=f"of an environment that has {name}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the calibration draw")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases (default: all)")
    parser.add_argument("--samples", type=int, default=shared.SAMPLES, help="calibration samples")
    parser.add_argument("--length", type=int, default=shared.LENGTH, help="tokens of a sample")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--output", type=Path, help="results file (default: results/quant-<machine>.json)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    pythons = {peer: path.absolute() for peer in NAMES if (path := getattr(arguments, peer)) is not None}
    material = shared.prepare(arguments.work.absolute(), samples=arguments.samples, length=arguments.length)
    judge, measured = Judge(material), {}
    versions: dict[str, dict[str, str]] = {}
    for name in arguments.only:
        measured[name], found = measure(material, judge, CASES[name], seeds=arguments.seeds, pythons=pythons)
        versions |= found
    names = {peer: f"{NAMES[peer]} {found[peer]}" for peer, found in versions.items()}
    result = make_result(
        "quant",
        make_rows(measured, names),
        _command(arguments, pythons),
        packages=shared.LIBRARIES,
        peer_versions=told_versions(versions),
    )
    output = arguments.output or HERE / "results" / f"quant-{cpu_class()}.json"
    write_result(output, result)
    say(f"written: {output}")


def _command(arguments: argparse.Namespace, pythons: dict[str, Path]) -> str:
    """The command that measures the same on another machine."""
    parts = ["python infra/bench/quant_quality.py --work WORK"]
    parts += [f"--{peer} {peer.upper()}/bin/python" for peer in pythons]
    parts.append(f"--seeds {' '.join(map(str, arguments.seeds))}")
    if arguments.only != list(CASES):
        parts.append(f"--only {' '.join(arguments.only)}")
    if (arguments.samples, arguments.length) != (shared.SAMPLES, shared.LENGTH):
        parts.append(f"--samples {arguments.samples} --length {arguments.length}")
    return " ".join(parts)


if __name__ == "__main__":
    main()
