"""EvalReport: what was measured, on which text and how, so that each figure can be measured again.

Figures that were not measured are None. A figure that came out as NaN or infinite is None as well and stands in
`non_finite`: JSON has no such numbers, and a gate must see them.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.quant.formats import read
from narrowgauge.quant.formats.manifest import write_atomically

if TYPE_CHECKING:
    from narrowgauge.quant.evaluate.gate import GateOutcome

REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML = "report.json", "report.md", "report.html"
SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One of the models compared: where it came from (URI, revision, digest of its files), its schemes, bytes of its weights.

    For a checkpoint made by a recipe also the digests of recipe and calibration tokens, and the calibration's seed.
    """

    name: str
    digest: str | None = None
    scheme: str | None = None
    size_bytes: int | None = None
    revision: str | None = None
    recipe_digest: str | None = None
    calibration_digest: str | None = None
    calibration_seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What a perplexity depends on besides the model.

    dataset: text sources; revisions: what fixes the text of each (a commit, a SHA-256); split: which part of them; join: what
    stood between documents; bos: what began each window; window and stride in tokens (stride: from one window's start to the
    next in the text; of overlapping windows only the new tokens are scored, the tail is dropped); windows: how many were
    scored; tokens: scored positions; batch: windows at a time; dtype, attention and device: of the activations, for the
    candidate and the base; rounding: what of the candidate was rounded while it ran; versions: of the libraries.
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
    revisions: tuple[str, ...] = ()
    device: str | None = None
    rounding: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """What rounding did to one Linear: relative errors ‖W-Q‖/‖W‖ and ‖Y-Ŷ‖/‖Y‖ (Frobenius norms), null where not measured.

    output_error: both weights on the inputs that the layer has in full precision (when it was measured while quantizing:
    on the calibration inputs). propagated_error: the candidate's layer on what its own layers before put out.
    output_kl: KL(base‖candidate) in nats of the histograms of the outputs, the candidate's with propagated inputs.
    fallback: why the method that the recipe names was not used.
    """

    name: str
    weight_error: float
    output_error: float | None = None
    propagated_error: float | None = None
    output_kl: float | None = None
    scheme: str | None = None
    fallback: str | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpikes:
    """How heavy the tails of one attention module's output are, before (base) and after: excess kurtosis (0 for a normal
    distribution), and largest / median magnitude (null where the median is 0)."""

    name: str
    kurtosis: float
    base_kurtosis: float
    spike: float | None
    base_spike: float | None


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One metric of one lm-eval task (shares, with standard errors), of the candidate and, where it was run, of the base."""

    task: str
    metric: str
    value: float
    stderr: float | None = None
    base_value: float | None = None
    base_stderr: float | None = None
    samples: int
    few_shot: int = 0
    version: str


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A 95 % interval over windows of text: another sample of the same text would mostly fall into it."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many tokens' KL lies below edges[0], between neighbours (left edge included), and from edges[-1] on."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.edges) + 1:
            raise ValueError(f"counts: {len(self.edges)} edges make {len(self.edges) + 1} bins, not {len(self.counts)}")


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """A candidate judged, alone or against its base. KL(base‖candidate) in nats a token; top1 and delta_p are shares.

    Schema 2 added to 1: revisions, device and rounding of the conventions, where a subject was made from, intervals, the
    histogram of KL, propagated errors and fallbacks of layers, attention outputs, tasks. A report of schema 1 is read as one
    of schema 2 in which those were not measured.
    """

    schema: int = SCHEMA
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
    perplexity_ratio_interval: Interval | None = None
    kl_mean_interval: Interval | None = None
    kl_histogram: Histogram | None = None
    non_finite: tuple[str, ...] = ()
    layers: tuple[LayerError, ...] = ()
    attention: tuple[AttentionSpikes, ...] = ()
    tasks: tuple[TaskScore, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema: this release reads reports of schema 1 and {SCHEMA}, not {self.schema}")

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
        """Reads a report of schema 1 or 2. `source` (a path) is named in errors. Raises formats.read.ReadError."""
        try:
            mapping = json.loads(text)
        except ValueError as error:
            raise read.ReadError(f"{source or 'the report'}: is not JSON: {error}") from None
        if isinstance(mapping, dict) and mapping.get("schema") == 1:
            mapping["schema"] = SCHEMA  # every key of 1 has its meaning in 2, and every key that 2 added may be absent
        return read.build(cls, mapping, source=source)

    def to_markdown(self) -> str:
        """The report for people: it can be read without anything beside it."""
        from narrowgauge.quant.evaluate.markdown import to_markdown

        return to_markdown(self)

    def write(
        self, folder: Path, *, verdict: "GateOutcome | None" = None, others: "Sequence[EvalReport]" = ()
    ) -> tuple[Path, Path, Path]:
        """Writes report.json, report.md and report.html into `folder` (made where it is missing), each whole or not at all.

        `verdict`: a gate's answer to this report; `others`: reports to compare size and quality with, on the page.
        """
        from narrowgauge.quant.evaluate.html import to_html

        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            REPORT_JSON: self.to_json(),
            REPORT_MARKDOWN: self.to_markdown(),
            REPORT_HTML: to_html(self, verdict=verdict, others=others),
        }
        for name, text in texts.items():
            write_atomically(folder / name, text.encode())
        return folder / REPORT_JSON, folder / REPORT_MARKDOWN, folder / REPORT_HTML


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

MEANINGS = {
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
"""Field -> what it means, in one line."""


def show(name: str, value: float | None, non_finite: tuple[str, ...] = ()) -> str:
    """One figure as people read it; shares in percent, four significant digits."""
    if value is None:
        return "not finite" if name in non_finite else "not measured"
    return f"{value:.2%}" if name in ("top1", "delta_p_rms") else f"{value:.4g}"


def shown(report: EvalReport, name: str) -> str:
    """One figure of a report with its interval, where it has one."""
    text = show(name, getattr(report, name), report.non_finite)
    interval: Interval | None = getattr(report, f"{name}_interval", None)
    return text if interval is None else f"{text} [{interval.low:.4g}, {interval.high:.4g}]"
