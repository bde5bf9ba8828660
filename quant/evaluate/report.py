"""EvalReport: what was measured, on which text and how, so that each figure can be measured again.

Figures that were not measured are None. A figure that came out as NaN or infinite is None as well and stands in
`non_finite`: JSON has no such numbers, and a gate must see them.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.quant.formats import read
from narrowgauge.quant.formats.manifest import write_atomically

REPORT_JSON, REPORT_MARKDOWN = "report.json", "report.md"
SHOWN_LAYERS = 10


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One of the models compared: where it came from, the digest of its files, its schemes, bytes of its weights."""

    name: str
    digest: str | None = None
    scheme: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What a perplexity depends on besides the model.

    dataset: text sources; split: which half of them; join: what stood between documents; bos: what began each window;
    window and stride in tokens (equal: windows are disjoint, the tail is dropped); windows: how many were scored; tokens:
    scored positions; batch: windows at a time; dtype and attention: of the activations, for the candidate and the base;
    versions: of the libraries.
    """

    dataset: tuple[str, ...]
    split: str
    join: str
    bos: str
    window: int
    stride: int
    windows: int
    tokens: int
    batch: int
    dtype: str
    attention: str
    base_dtype: str | None = None
    base_attention: str | None = None
    softmax_dtype: str = "float32"
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """Relative errors of one Linear: ‖W-Q‖/‖W‖ and, where outputs were compared, ‖Y-Ŷ‖/‖Y‖ (Frobenius norms)."""

    name: str
    weight_error: float
    output_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """A candidate judged, alone or against its base. KL(base‖candidate) in nats a token; top1 and delta_p are shares."""

    schema: int = 1
    source: str
    """What computed the candidate's logits: "reference" or "engine"."""
    candidate: Subject
    base: Subject | None
    conventions: Conventions
    perplexity: float | None
    base_perplexity: float | None = None
    perplexity_ratio: float | None = None
    kl_mean: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    top1: float | None = None
    delta_p_rms: float | None = None
    non_finite: tuple[str, ...] = ()
    layers: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float

    def __post_init__(self) -> None:
        if self.schema != 1:
            raise ValueError(f"schema: this release reads reports of schema 1, not {self.schema}")

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return self.conventions.tokens

    def figures(self) -> dict[str, float]:
        """The measured, finite figures by name: for a table, or for a tracker of runs."""
        values = {name: getattr(self, name) for name in FIGURES}
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> str:
        """Indented JSON with a final line break; `from_json` reads it back to an equal value."""
        return json.dumps(read.plain(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "") -> "EvalReport":
        """Reads a report. `source` (a path) is named in errors. Raises formats.read.ReadError."""
        try:
            mapping = json.loads(text)
        except ValueError as error:
            raise read.ReadError(f"{source or 'the report'}: is not JSON: {error}") from None
        return read.build(cls, mapping, source=source)

    def to_markdown(self) -> str:
        """The report for people: it can be read without anything beside it."""
        return "\n".join([*_heading(self), *_table(self), *_method(self), *_layers(self), *_notes(self)]) + "\n"

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes report.json and report.md into `folder` (made where it is missing), each whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / REPORT_JSON, folder / REPORT_MARKDOWN
        write_atomically(paths[0], self.to_json().encode())
        write_atomically(paths[1], self.to_markdown().encode())
        return paths


FIGURES = {
    "perplexity": "perplexity",
    "base_perplexity": "perplexity of the base",
    "perplexity_ratio": "perplexity ratio",
    "kl_mean": "KL mean",
    "kl_median": "KL median",
    "kl_p99": "KL p99",
    "kl_max": "KL max",
    "top1": "top-1 agreement",
    "delta_p_rms": "rms Δp of the right token",
}
"""Field -> what people call it."""

_MEANINGS = {
    "perplexity": "exp(mean loss in nats a token) of the candidate",
    "base_perplexity": "the same of the base, on the same tokens",
    "perplexity_ratio": "candidate / base; 1 is no loss",
    "kl_mean": "nats a token, KL(base‖candidate) over the full vocabulary; 0 is no change",
    "kl_median": "nats; half of the tokens lie below",
    "kl_p99": "nats; 99 % of the tokens lie below",
    "kl_max": "nats; the worst token",
    "top1": "share of tokens where both models rank the same token first",
    "delta_p_rms": "root mean square change of the probability of the token that really follows",
}


def show(name: str, value: float | None, non_finite: tuple[str, ...] = ()) -> str:
    """One figure as people read it; shares in percent, four significant digits."""
    if value is None:
        return "not finite" if name in non_finite else "not measured"
    return f"{value:.2%}" if name in ("top1", "delta_p_rms") else f"{value:.4g}"


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
        f"| {label} | {show(name, getattr(report, name), report.non_finite)} | {_MEANINGS[name]} |"
        for name, label in FIGURES.items()
        if getattr(report, name) is not None or name in report.non_finite
    ]
    return ["| figure | value | meaning |", "|---|---:|---|", *rows, ""]


def _method(report: EvalReport) -> list[str]:
    how = report.conventions
    base = ""
    if how.base_dtype is not None:
        base = f"; base: {how.base_dtype}, {how.base_attention} attention"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(how.versions.items()))
    return [
        "## How it was measured",
        "",
        f"- Text: {', '.join(how.dataset)}; split: {how.split}; documents joined by {how.join!r}",
        f"- {how.windows} windows of {how.window} tokens, stride {how.stride} (the tail is dropped): {how.tokens} scored "
        f"tokens; beginning of a window: {how.bos}",
        f"- Activations {how.dtype}, {how.attention} attention{base}; log-softmax in {how.softmax_dtype}; "
        f"{how.batch} window(s) at a time",
        f"- Versions: {versions}",
        "",
    ]


def _layers(report: EvalReport) -> list[str]:
    if not report.layers:
        return []
    worst = sorted(report.layers, key=lambda layer: layer.weight_error, reverse=True)[:SHOWN_LAYERS]
    rows = [
        f"| {layer.name} | {layer.weight_error:.4f} | "
        f"{'' if layer.output_error is None else f'{layer.output_error:.4f}'} |"
        for layer in worst
    ]
    title = f"## Layers with the largest weight error ({len(worst)} of {len(report.layers)})"
    return [title, "", "| layer | ‖W-Q‖/‖W‖ | ‖Y-Ŷ‖/‖Y‖ |", "|---|---:|---:|", *rows, ""]


def _notes(report: EvalReport) -> list[str]:
    return ["## Notes", "", *(f"- {note}" for note in report.notes)] if report.notes else []
