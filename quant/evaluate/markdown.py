"""The report as a page of Markdown, for people: it can be read without anything beside it."""

from collections.abc import Sequence

from narrowgauge.quant.evaluate.report import FIGURES, MEANINGS, EvalReport, LayerError, Subject, shown

SHOWN_LAYERS = 10


def to_markdown(report: EvalReport) -> str:
    """The whole page."""
    parts = (_heading, _table, _tasks, _method, _layers, _attention, _notes)
    return "\n".join(line for part in parts for line in part(report)) + "\n"


def _heading(report: EvalReport) -> list[str]:
    lines = [f"# Evaluation of {report.candidate.name}", "", _describe("Candidate", report.candidate)]
    if report.base is not None:
        lines.append(_describe("Base", report.base))
        if report.candidate.size_bytes and report.base.size_bytes:
            share = report.candidate.size_bytes / report.base.size_bytes
            lines.append(f"- Size: {share:.1%} of the base's weight files")
    how = "narrowgauge's engine" if report.source == "engine" else "transformers' modules (the reference)"
    return [*lines, f"- Logits computed by {how}; {report.seconds:.0f} s", ""]


def _describe(role: str, subject: Subject) -> str:
    parts = [subject.scheme or "full precision"]
    if subject.size_bytes is not None:
        parts.append(f"{subject.size_bytes / 1e6:.1f} MB of weights")
    if subject.digest is not None:
        parts.append(f"digest {subject.digest[:12]}")
    return f"- {role}: `{subject.name}` ({', '.join(parts)})"


def _table(report: EvalReport) -> list[str]:
    rows = [
        f"| {label} | {shown(report, name)} | {MEANINGS[name]} |"
        for name, label in FIGURES.items()
        if getattr(report, name) is not None or name in report.non_finite
    ]
    return ["| figure | value | meaning |", "|---|---:|---|", *rows, ""]


def _tasks(report: EvalReport) -> list[str]:
    if not report.tasks:
        return []
    rows = [
        f"| {score.task} | {score.metric} | {_share(score.value, score.stderr)} | "
        f"{_share(score.base_value, score.base_stderr)} | {score.samples} | {score.few_shot} | {score.version} |"
        for score in report.tasks
    ]
    head = [
        "| task | metric | candidate | base | questions | examples | version |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    return ["## Tasks (lm-eval)", "", *head, *rows, ""]


def _share(value: float | None, stderr: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if stderr is None else f"{value:.2%} ± {stderr:.2%}"


def _method(report: EvalReport) -> list[str]:
    return ["## How it was measured", "", *(f"- {label}: {text}" for label, text in conventions(report)), ""]


def conventions(report: EvalReport) -> list[tuple[str, str]]:
    """What the figures depend on, as pairs of a label and its text."""
    how = report.conventions
    texts = [
        f"{name} ({revision})" if revision else name
        for name, revision in zip(how.dataset, how.revisions or ("",) * len(how.dataset), strict=True)
    ]
    base = "" if how.base_dtype is None else f"; base: {how.base_dtype}, {how.base_attention} attention"
    pairs = [
        ("Text", f"{', '.join(texts)}; split: {how.split}; documents joined by {how.join!r}"),
        (
            "Windows",
            f"{how.windows} windows of {how.window} tokens, stride {how.stride} (the tail is dropped): {how.tokens} scored "
            f"tokens; beginning of a window: {how.bos}",
        ),
        (
            "Arithmetic",
            f"Activations {how.dtype}, {how.attention} attention{base}; log-softmax in {how.softmax_dtype}; "
            f"{how.batch} window(s) at a time{'' if how.device is None else f'; {how.device}'}",
        ),
    ]
    if how.rounding is not None:
        pairs.append(("Rounding while it ran", how.rounding))
    for role, subject in (("Candidate", report.candidate), ("Base", report.base)):
        if subject is not None and (origin := _origin(subject)):
            pairs.append((f"{role} made from", origin))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(how.versions.items()))
    return [*pairs, ("Versions", versions)]


def _origin(subject: Subject) -> str:
    known = {
        "revision": subject.revision,
        "digest": subject.digest,
        "recipe": subject.recipe_digest and subject.recipe_digest[:12],
        "calibration tokens": subject.calibration_digest and subject.calibration_digest[:12],
        "calibration seed": subject.calibration_seed,
    }
    return ", ".join(f"{label} {value}" for label, value in known.items() if value is not None)


def _layers(report: EvalReport) -> list[str]:
    if not report.layers:
        return []
    worst = worst_first(report.layers)[:SHOWN_LAYERS]
    rows = [
        f"| {layer.name} | {layer.weight_error:.4f} | {_number(layer.output_error)} | {_number(layer.propagated_error)} | "
        f"{_number(layer.output_kl)} |"
        for layer in worst
    ]
    by = "output" if all(layer.output_error is not None for layer in report.layers) else "weight"
    title = f"## Layers with the largest {by} error ({len(worst)} of {len(report.layers)})"
    head = ["| layer | ‖W-Q‖/‖W‖ | ‖Y-Ŷ‖/‖Y‖ | propagated | KL of outputs |", "|---|---:|---:|---:|---:|"]
    return [title, "", *head, *rows, ""]


def worst_first(layers: Sequence[LayerError]) -> list[LayerError]:
    """Layers by what they lost: by the error of their outputs, or of their weights where some outputs were not measured."""
    outputs = [layer.output_error for layer in layers if layer.output_error is not None]
    if len(outputs) < len(layers):
        return sorted(layers, key=lambda layer: layer.weight_error, reverse=True)
    ranked = sorted(zip(outputs, layers, strict=True), key=lambda pair: pair[0], reverse=True)
    return [layer for _, layer in ranked]


def _attention(report: EvalReport) -> list[str]:
    if not report.attention:
        return []
    rows = [
        f"| {part.name} | {part.base_kurtosis:.1f} | {part.kurtosis:.1f} | {_number(part.base_spike, 1)} | "
        f"{_number(part.spike, 1)} |"
        for part in report.attention
    ]
    head = ["| module | kurtosis before | after | max / median before | after |", "|---|---:|---:|---:|---:|"]
    return ["## Spikes in the outputs of attention", "", *head, *rows, ""]


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _notes(report: EvalReport) -> list[str]:
    return ["## Notes", "", *(f"- {note}" for note in report.notes)] if report.notes else []
