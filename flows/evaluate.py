"""Judges a checkpoint against its base on held-out text, and applies the recipe's gate to the figures."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.flows.progress import Watch
from narrowgauge.flows.quantize import QuantizedCheckpoint
from narrowgauge.quant.evaluate.gate import check_gate
from narrowgauge.quant.evaluate.report import SCHEMA, EvalReport
from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.quant.formats.read import digest
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving import artifacts
from narrowgauge.serving.settings import Settings


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """How much held-out text is scored: `windows` of `length` tokens."""

    windows: int = 8
    length: int = 512


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A report and the gate's answer to it: every limit with its figure in `checks`, the missed ones in `reasons`."""

    report: EvalReport
    passed: bool
    reasons: tuple[str, ...]
    checks: tuple[str, ...]


def evaluate_checkpoint(
    checkpoint: QuantizedCheckpoint, recipe: Recipe, text: HeldOutText, *, settings: Settings, watch: Watch
) -> Judgement:
    """Scores the checkpoint and its base on the same tokens by the reference modules, then asks the recipe's gate.

    Figures of the same two digests on the same text are kept under work/ and not computed twice.
    """
    known = settings.work / "reports" / f"{report_key(checkpoint, recipe, text)}.json"
    if (report := _known_report(known)) is not None:
        watch.line("evaluate: these bytes were judged on this text before; using those figures")
    else:
        report = _measure(checkpoint, recipe, text, settings=settings, watch=watch)
        known.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(known, report.to_json().encode())
    return judge(report, recipe, watch=watch)


def report_key(checkpoint: QuantizedCheckpoint, recipe: Recipe, text: HeldOutText) -> str:
    """Names the inputs of an evaluation: the two checkpoints, the text and how much of it, the programs that judge,
    what a report holds."""
    inputs = {
        "candidate": checkpoint.digest,
        "base": checkpoint.base_digest,
        "sources": recipe.calibration.sources,
        "text": text,
        "schema": SCHEMA,
        "versions": {name: importlib.metadata.version(name) for name in ("narrowgauge", "torch", "transformers")},
    }
    return digest(inputs)[:32]


def _known_report(path: Path) -> EvalReport | None:
    try:
        return EvalReport.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or of another release's schema: measured anew
        return None


def _measure(
    checkpoint: QuantizedCheckpoint, recipe: Recipe, text: HeldOutText, *, settings: Settings, watch: Watch
) -> EvalReport:
    from narrowgauge.quant import sources
    from narrowgauge.quant.evaluate.evaluate import evaluate, load_tokenizer
    from narrowgauge.quant.evaluate.reference import ReferenceModel
    from narrowgauge.quant.evaluate.subject import describe, read_making
    from narrowgauge.quant.evaluate.windows import Cut, heldout_ids

    base = sources.resolve(recipe.model.source, cache=settings.models)
    found = artifacts.fetch(checkpoint.uri, settings=settings)
    candidate = sources.LocalModel(path=found.path, source=checkpoint.uri, revision=None, digest=found.digest)
    making = read_making(candidate.path)
    cut = Cut(windows=text.windows, length=text.length)
    heldout = heldout_ids(recipe.calibration, load_tokenizer(base.path), cut)

    def tell(done: int, total: int) -> None:
        watch.progress(f"evaluate {recipe.model.name} {checkpoint.scheme}", done, total)

    return evaluate(
        ReferenceModel(candidate.path),
        ReferenceModel(base.path),
        heldout,
        candidate_subject=describe(candidate),
        base_subject=describe(base),
        layers=making.layers or checkpoint.layers,
        notes=making.notes,
        progress=tell,
    )


def judge(report: EvalReport, recipe: Recipe, *, watch: Watch) -> Judgement:
    """Applies the recipe's gate to a report."""
    outcome = check_gate(report, recipe.gate)
    watch.line(f"evaluate: {report.tokens} tokens, {'; '.join(outcome.checks) or 'the recipe sets no limits'}")
    watch.line(f"gate: {'passed' if outcome.passed else 'rejected: ' + '; '.join(outcome.reasons)}")
    return Judgement(report=report, passed=outcome.passed, reasons=outcome.reasons, checks=outcome.checks)
