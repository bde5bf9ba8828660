"""What a release leaves in the registry's run: parameters, figures, the report and the manifest."""

from collections.abc import Mapping
from typing import Any

from narrowgauge.flows.quantize import QuantizedCheckpoint
from narrowgauge.quant.evaluate.gate import GateOutcome
from narrowgauge.quant.evaluate.html import to_html
from narrowgauge.quant.evaluate.report import REPORT_HTML, REPORT_JSON, REPORT_MARKDOWN, EvalReport
from narrowgauge.quant.formats.manifest import Manifest
from narrowgauge.quant.formats.read import canonical_json, plain
from narrowgauge.quant.recipe import Recipe

_LONGEST_PARAM = 6000  # MLflow's limit


def recipe_params(recipe: Recipe) -> dict[str, str]:
    """The recipe, one parameter for each leaf: "calibration.samples" -> "64"; lists as JSON."""
    return {key: value[:_LONGEST_PARAM] for key, value in _leaves(plain(recipe), "")}


def report_metrics(report: EvalReport) -> dict[str, float]:
    """Every finite figure of a report and of its tasks, the sizes in bytes, the tokens scored and the seconds taken."""
    metrics = dict(report.figures())
    for score in report.tasks:
        metrics[f"task_{score.task}_{score.metric}"] = score.value
    metrics["evaluation_tokens"] = float(report.tokens)
    metrics["evaluation_s"] = report.seconds
    for role, subject in (("", report.candidate), ("base_", report.base)):
        if subject is not None and subject.size_bytes is not None:
            metrics[f"{role}size_bytes"] = float(subject.size_bytes)
    return metrics


def checkpoint_metrics(checkpoint: QuantizedCheckpoint) -> dict[str, float]:
    """What the making of a checkpoint cost."""
    return {"source_s": checkpoint.source_s, "quantize_s": checkpoint.quantize_s}


def report_texts(
    report: EvalReport, manifest: Manifest | None, *, verdict: GateOutcome | None = None
) -> dict[str, str]:
    """The files of the run: the report for machines and for people, and the manifest where there is one."""
    texts = {
        REPORT_JSON: report.to_json(),
        REPORT_MARKDOWN: report.to_markdown(),
        REPORT_HTML: to_html(report, verdict=verdict),
    }
    if manifest is not None:
        texts["manifest.json"] = canonical_json(manifest)
    return texts


def layer_table(report: EvalReport) -> dict[str, dict[str, list[Any]]]:
    """The errors of each Linear as one table, or nothing where they were not measured."""
    if not report.layers:
        return {}
    fields = ("name", "scheme", "weight_error", "output_error", "propagated_error", "output_kl", "fallback")
    return {"layers.json": {field: [getattr(layer, field) for layer in report.layers] for field in fields}}


def _leaves(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list):
        return [(path, canonical_json(value))]
    return [(path, "null" if value is None else str(value))]
