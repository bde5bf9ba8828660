"""The report as one page for people: HTML that holds its styles, plots and data and asks no network for anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from narrowgauge.quant.evaluate import charts
from narrowgauge.quant.evaluate.charts import Point, Series
from narrowgauge.quant.evaluate.gate import GateOutcome
from narrowgauge.quant.evaluate.markdown import conventions, worst_first
from narrowgauge.quant.evaluate.pareto import Comparison, compare_reports
from narrowgauge.quant.evaluate.report import FIGURES, MEANINGS, EvalReport, Interval, LayerError, show, shown

TEMPLATE = "report.html.j2"
MOST_ROWS = 1000
"""Layers that the table lists, the worst first: a mixture of experts has tens of thousands, and a page stays small."""
_TILES = ("perplexity", "perplexity_ratio", "kl_mean", "top1")


@dataclass(frozen=True)
class Chart:
    """One plot: its title, the SVG, what it shows, and a legend of (series, index of its colour)."""

    title: str
    svg: str
    caption: str
    legend: tuple[tuple[str, int], ...] = ()


def to_html(report: EvalReport, *, verdict: GateOutcome | None = None, others: Sequence[EvalReport] = ()) -> str:
    """The whole page. `verdict` is a gate's answer to the report; `others` stand beside it in size against quality."""
    from jinja2 import Environment, StrictUndefined

    comparison = compare_reports(report, others)
    plots = [_size_chart(report, comparison), _kl_chart(report), _layer_chart(report), _attention_chart(report)]
    ranked = worst_first(report.layers)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    source = resources.files("narrowgauge.quant.evaluate").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        verdict=verdict,
        summary=_summary(report),
        tiles=[_tile(report, name) for name in _TILES if _told(report, name)],
        figures=[(FIGURES[name], shown(report, name), MEANINGS[name]) for name in FIGURES if _told(report, name)],
        subjects=_subjects(report),
        plots=[plot for plot in plots if plot is not None],
        left_out=comparison.left_out if others else (),
        layers=ranked[:MOST_ROWS],
        hidden=max(0, len(ranked) - MOST_ROWS),
        conventions=conventions(report),
        notes=report.notes,
    )  # fmt: skip


def _told(report: EvalReport, name: str) -> bool:
    return getattr(report, name) is not None or name in report.non_finite


def _tile(report: EvalReport, name: str) -> tuple[str, str, str]:
    """Label, value and what stands below it: an interval, the base's figure, or the meaning."""
    value = show(name, getattr(report, name), report.non_finite)
    interval: Interval | None = getattr(report, f"{name}_interval", None)
    if interval is not None:
        below = f"95 %: {interval.low:.4g} to {interval.high:.4g}"
    elif name == "perplexity" and report.base_perplexity is not None:
        below = f"base {report.base_perplexity:.4g}"
    else:
        below = MEANINGS[name]
    return FIGURES[name], value, below


def _summary(report: EvalReport) -> list[str]:
    """The findings as sentences that need no knowledge of the figures."""
    if report.non_finite:
        names = ", ".join(FIGURES[name] for name in report.non_finite)
        return [f"The candidate is broken: {names} came out as NaN or infinity. Do not serve it."]
    said = []
    candidate, base = report.candidate, report.base
    if base is not None and candidate.size_bytes and base.size_bytes:
        saved = 1 - candidate.size_bytes / base.size_bytes
        said.append(f"Its weights take {candidate.size_bytes / 1e6:,.1f} MB, {saved:.1%} less than the base's.")
    if report.perplexity_ratio is not None:
        change = report.perplexity_ratio - 1
        word = "more" if change >= 0 else "less"
        said.append(f"It is {abs(change):.2%} {word} surprised by the text than the base (perplexity).")
    if report.top1 is not None:
        said.append(
            f"It ranks the same next token first as the base for {report.top1:.1%} of {report.tokens:,} tokens."
        )
    if fallen := [layer for layer in report.layers if layer.fallback is not None]:
        said.append(
            f"In {len(fallen)} of {len(report.layers)} layers the recipe's method was not used (see the table)."
        )
    return said


def _subjects(report: EvalReport) -> list[tuple[str, str, str, str]]:
    rows = []
    for role, subject in (("Candidate", report.candidate), ("Base", report.base)):
        if subject is not None:
            size = "" if subject.size_bytes is None else f"{subject.size_bytes / 1e6:,.1f} MB"
            rows.append((role, subject.name, subject.scheme or "full precision", size))
    return rows


def _size_chart(report: EvalReport, comparison: Comparison) -> Chart | None:
    if not comparison.candidates or report.base is None:
        return None
    sizes = [one.size_bytes / 1e6 for one in comparison.candidates]
    losses = [one.loss for one in comparison.candidates]
    if report.base.size_bytes is not None:
        sizes, losses = [*sizes, report.base.size_bytes / 1e6], [*losses, 0.0]
    x, y = charts.linear_axis("weights, MB", sizes), charts.linear_axis("KL mean, nats a token", losses)

    def points(candidates: Sequence[Any]) -> tuple[Point, ...]:
        return tuple(
            Point(
                one.size_bytes / 1e6,
                one.loss,
                f"{one.name}: {one.size_bytes / 1e6:,.1f} MB, KL {one.loss:.4g}",
                one.name,
            )
            for one in candidates
        )

    beaten = [one for one in comparison.candidates if one not in comparison.front]
    series = [Series("Pareto front", points(comparison.front)), Series("beaten in both", points(beaten), line=False)]
    if report.base.size_bytes is not None:
        size = report.base.size_bytes / 1e6
        series.append(Series("base", (Point(size, 0.0, f"{report.base.name}: {size:,.1f} MB", "base"),), line=False))
    return Chart(
        "Size against quality",
        charts.lines("Size against quality", series, x=x, y=y),
        "Bytes of the weight files and the mean KL divergence from the base, on the same tokens. What lies on the line is "
        "not beaten in both by any other report given here.",
        tuple((one.name, index) for index, one in enumerate(series) if one.points),
    )


def _kl_chart(report: EvalReport) -> Chart | None:
    histogram = report.kl_histogram
    if histogram is None or not any(histogram.counts):
        return None
    marks = [("median", report.kl_median), ("mean", report.kl_mean), ("p99", report.kl_p99)]
    known = [(name, value) for name, value in marks if value is not None and value > histogram.edges[0]]
    return Chart(
        "KL divergence of single tokens",
        charts.bars("Histogram of KL divergence", histogram, label="KL(base‖candidate), nats", marks=known),
        "How many tokens' distributions moved how far. A long tail on the right is where the candidate answers differently.",
    )


def _layer_chart(report: EvalReport) -> Chart | None:
    field, what = next(
        (
            (field, what)
            for field, what in (
                ("propagated_error", "relative output error, inputs propagated"),
                ("output_error", "relative output error"),
                ("weight_error", "relative weight error"),
            )
            if any(getattr(layer, field) for layer in report.layers)
        ),
        ("", ""),
    )
    by_role = _by_role(report.layers, field) if field else {}
    if not by_role:
        return None
    values = [value for blocks in by_role.values() for value, _ in blocks.values()]
    indices = [index for blocks in by_role.values() for index in blocks]
    x, y = charts.linear_axis("block", indices), charts.log_axis(what, values)
    series = [
        Series(
            role,
            tuple(Point(index, value, f"{name}: {value:.4g}") for index, (value, name) in sorted(blocks.items())),
        )
        for role, blocks in by_role.items()
    ]
    return Chart(
        "Error of each layer",
        charts.lines("Error of each layer", series, x=x, y=y),
        f"The {what}, by block and kind of Linear (of several in one block, such as experts, the worst).",
        tuple((one.name, min(index, charts.SERIES_COLOURS - 1)) for index, one in enumerate(series)),
    )


def _by_role(layers: Sequence[LayerError], field: str) -> Mapping[str, dict[int, tuple[float, str]]]:
    """Kind of Linear -> block -> the worst value with the layer's name. Layers outside numbered blocks are left out."""
    roles: dict[str, dict[int, tuple[float, str]]] = {}
    for layer in layers:
        value: float | None = getattr(layer, field)
        index = block_of(layer.name)
        if value and index is not None:
            blocks = roles.setdefault(layer.name.rpartition(".")[2], {})
            if index not in blocks or value > blocks[index][0]:
                blocks[index] = (value, layer.name)
    return roles


def block_of(name: str) -> int | None:
    """The number of the decoder block in a module's name: its first part that is one."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _attention_chart(report: EvalReport) -> Chart | None:
    parts = [(block_of(part.name), part) for part in report.attention]
    numbered = [(index, part) for index, part in parts if index is not None]
    if not numbered:
        return None
    values = [value for _, part in numbered for value in (part.base_kurtosis, part.kurtosis)]
    x, y = charts.linear_axis("block", [index for index, _ in numbered]), charts.linear_axis("excess kurtosis", values)
    before = tuple(Point(i, part.base_kurtosis, f"{part.name}: {part.base_kurtosis:.4g}") for i, part in numbered)
    after = tuple(Point(i, part.kurtosis, f"{part.name}: {part.kurtosis:.4g}") for i, part in numbered)
    return Chart(
        "Spikes in the outputs of attention",
        charts.lines("Kurtosis of attention outputs", [Series("before", before), Series("after", after)], x=x, y=y),
        "Excess kurtosis of each attention module's output: 0 for a normal distribution, large where few values tower "
        "over the rest. A jump after quantizing shows where rounding made or removed outliers.",
        (("before", 0), ("after", 1)),
    )
