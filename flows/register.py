"""Puts a judged checkpoint into the store and the registry."""

from pathlib import Path

from narrowgauge.flows import tracking
from narrowgauge.flows.evaluate import Judgement
from narrowgauge.flows.progress import Watch
from narrowgauge.flows.quantize import QuantizedCheckpoint
from narrowgauge.quant.evaluate.gate import GateOutcome, check_gate
from narrowgauge.quant.evaluate.report import EvalReport
from narrowgauge.quant.formats.manifest import MANIFEST, Manifest, read_manifest
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving import artifacts
from narrowgauge.serving.registry import ModelVersion, RegisterRequest, Registry, Verdict
from narrowgauge.serving.settings import Settings


class RegistrationError(ValueError):
    """A checkpoint and a report that do not belong together; the message says why."""


def store_checkpoint(checkpoint: QuantizedCheckpoint, *, settings: Settings) -> str:
    """Copies the checkpoint into the artifact store; its URI there."""
    return artifacts.store(artifacts.fetch(checkpoint.uri, settings=settings).path, settings=settings)


def register_release(
    checkpoint: QuantizedCheckpoint, uri: str, judgement: Judgement, *, recipe: Recipe, settings: Settings, watch: Watch
) -> ModelVersion:
    """Registers the stored checkpoint with its figures; `candidate` moves to it only if the gate passed."""
    request = RegisterRequest(
        name=recipe.model.name,
        digest=checkpoint.digest,
        uri=uri,
        verdict="passed" if judgement.passed else "rejected",
        scheme=checkpoint.scheme,
        recipe_digest=checkpoint.recipe_digest,
        params=tracking.recipe_params(recipe),
        metrics=tracking.report_metrics(judgement.report) | tracking.checkpoint_metrics(checkpoint),
        texts=tracking.report_texts(
            judgement.report,
            _manifest(artifacts.fetch(uri, settings=settings).path),
            verdict=GateOutcome(passed=judgement.passed, reasons=judgement.reasons, checks=judgement.checks),
        ),
        tables=tracking.layer_table(judgement.report),
    )
    version = Registry(settings.mlflow_tracking_uri, home=settings.home).register(request)
    watch.line(f"register: {version.name} version {version.version}, {version.verdict}")
    return version


def register_checkpoint(
    uri: str, name: str, report: EvalReport | None = None, *, recipe: Recipe | None = None, settings: Settings
) -> ModelVersion:
    """Registers any checkpoint under a name. With a report and a recipe its gate gives the verdict, else it is unjudged.

    A folder without a manifest (a plain model) is registered where it lies; a checkpoint is copied into the store.
    Raises RegistrationError for a report about other bytes, and what `fetch` and `register` raise.
    """
    local = artifacts.fetch(uri, settings=settings)
    if report is not None and report.candidate.digest not in (None, local.digest):
        raise RegistrationError(
            f"{uri}: is {local.digest[:12]}, but the report judges {(report.candidate.digest or '')[:12]}; "
            "evaluate this checkpoint first"
        )
    manifest = _manifest(local.path)
    verdict: Verdict = "unjudged"
    outcome = None
    if report is not None and recipe is not None:
        outcome = check_gate(report, recipe.gate)
        verdict = "passed" if outcome.passed else "rejected"
    request = RegisterRequest(
        name=name,
        digest=local.digest,
        uri=local.path.as_uri() if manifest is None else artifacts.store(local.path, settings=settings),
        verdict=verdict,
        scheme=report.candidate.scheme if report is not None else None,
        recipe_digest=manifest.recipe_digest if manifest is not None else None,
        params=tracking.recipe_params(recipe) if recipe is not None else {},
        metrics=tracking.report_metrics(report) if report is not None else {},
        texts=tracking.report_texts(report, manifest, verdict=outcome) if report is not None else {},
        tables=tracking.layer_table(report) if report is not None else {},
    )
    return Registry(settings.mlflow_tracking_uri, home=settings.home).register(request)


def read_report(path: Path) -> EvalReport:
    """Reads a report.json. Raises RegistrationError for a file that cannot be read, ReadError for one that is no report."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RegistrationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    return EvalReport.from_json(text, source=str(path))


def _manifest(folder: Path) -> Manifest | None:
    return read_manifest(folder) if (folder / MANIFEST).exists() else None
