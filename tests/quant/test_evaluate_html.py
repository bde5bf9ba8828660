"""The page: whole in one file, well-formed, small, and saying what the report says."""

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from narrowgauge.quant.evaluate.gate import GateOutcome
from narrowgauge.quant.evaluate.html import MOST_ROWS, block_of, to_html
from narrowgauge.quant.evaluate.report import (
    AttentionSpikes,
    Conventions,
    EvalReport,
    Histogram,
    Interval,
    LayerError,
    Subject,
    TaskScore,
)

LAYERS = tuple(
    LayerError(
        name=f"model.layers.{block}.{part}",
        scheme="W4A16",
        weight_error=0.11,
        output_error=0.01 * (block + 1),
        propagated_error=0.02 * (block + 1),
        output_kl=0.001,
        fallback="Cholesky failed twice" if (block, part) == (2, "mlp.up_proj") else None,
    )
    for block in range(4)
    for part in ("self_attn.q_proj", "mlp.up_proj")
)
REPORT = EvalReport(
    source="reference",
    candidate=Subject(name="hf:org/<b>bold</b>", digest="ab" * 32, scheme="W4A16", size_bytes=90_000_000),
    base=Subject(name="hf:org/base", digest="cd" * 32, size_bytes=250_000_000),
    conventions=Conventions(
        dataset=("pydoc",), split="heldout", join="\n\n", bos="no token added", window=512, stride=512, windows=8,
        tokens=4088, batch=1, dtype="float32", attention="sdpa", revisions=("Python 3.12.3",),
        rounding="inputs of 8 Linears (W8A8)",
    ),
    perplexity=20.5,
    base_perplexity=20.0,
    perplexity_ratio=1.025,
    kl_mean=0.04,
    kl_median=0.01,
    kl_p99=0.4,
    kl_max=2.5,
    top1=0.91,
    delta_p_rms=0.03,
    perplexity_ratio_interval=Interval(low=1.01, high=1.04),
    kl_histogram=Histogram(edges=(1e-4, 1e-3, 1e-2, 1e-1, 1.0), counts=(5, 100, 1500, 2000, 480, 3)),
    layers=LAYERS,
    attention=tuple(
        AttentionSpikes(name=f"model.layers.{i}.self_attn", kurtosis=3.0 + i, base_kurtosis=2.0, spike=9.0, base_spike=8.0)
        for i in range(4)
    ),
    tasks=(TaskScore(task="arc_easy", metric="acc", value=0.625, stderr=0.01, base_value=0.64, samples=2376, version="1.0"),),
    notes=("fallback in model.layers.2.mlp.up_proj: Cholesky failed twice",),
    seconds=12.0,
)  # fmt: skip


def _svgs(page):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


class _Balanced(HTMLParser):
    """Fails on a tag that is closed out of order or never."""

    VOID = frozenset({"meta", "br", "link"})

    def __init__(self):
        super().__init__()
        self.open, self.external, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.external += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        self.text.append(data)


def _parsed(page):
    parser = _Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_one_well_formed_file_that_asks_nothing_of_a_network():
    page = to_html(REPORT)
    parsed = _parsed(page)
    assert parsed.external == []
    assert not re.search(r"url\(|@import|https?://", page)
    assert len(_svgs(page)) == 4
    assert len(page.encode()) < 2_000_000
    assert "<b>bold</b>" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page


def test_it_says_what_a_person_wants_to_know():
    text = " ".join(" ".join(_parsed(to_html(REPORT)).text).split())
    for part in (
        "64.0% less than the base's",
        "2.50% more surprised",
        "for 91.0% of 4,088 tokens",
        "In 1 of 8 layers the recipe's method was not used",
        "1.025 [1.01, 1.04]",
        "Python 3.12.3",
        "inputs of 8 Linears (W8A8)",
        "Cholesky failed twice",
        "Measured, not judged",
        "62.50 % ± 1.00",
        "64.00 %",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("passed", "words"), [(True, "Passed the recipe's gate"), (False, "Rejected by the recipe's gate")]
)
def test_a_gates_answer_stands_on_top(passed, words):
    verdict = GateOutcome(passed=passed, reasons=(), checks=("KL mean 0.04 <= 0.25",))
    page = to_html(REPORT, verdict=verdict)
    assert words in page
    assert "KL mean 0.04 &lt;= 0.25" in page


def test_a_broken_candidate_is_called_broken():
    page = to_html(dataclasses.replace(REPORT, perplexity=None, kl_mean=None, non_finite=("perplexity", "kl_mean")))
    assert "The candidate is broken: perplexity, KL mean came out as NaN or infinity" in page
    assert "no gate would pass it" in page


def test_a_report_of_one_model_alone_has_no_plots_to_show():
    alone = EvalReport(
        source="engine",
        candidate=Subject(name="x"),
        base=None,
        conventions=REPORT.conventions,
        perplexity=3.5,
        seconds=1.0,
    )
    page = to_html(alone)
    _parsed(page)
    assert _svgs(page) == []
    assert "3.5" in page


def test_bars_of_the_histogram_are_as_high_as_their_shares_and_none_is_lost():
    svg = next(svg for svg in _svgs(to_html(REPORT)) if svg.get("aria-label") == "Histogram of KL divergence")
    bars = [element for element in svg.iter("rect") if element.get("class") == "bar"]
    heights = [float(bar.get("height")) for bar in bars]
    counts = REPORT.kl_histogram.counts
    assert len(bars) == len(counts)
    assert heights == pytest.approx([heights[3] * count / 2000 for count in counts], abs=0.2)
    assert "2000 tokens (48.92%) from 0.01 to 0.1" in [bar.find("title").text for bar in bars]


def test_each_kind_of_linear_is_a_line_over_the_blocks():
    svg = next(svg for svg in _svgs(to_html(REPORT)) if svg.get("aria-label") == "Error of each layer")
    assert len(list(svg.iter("polyline"))) == 2
    titles = [circle.find("title").text for circle in svg.iter("circle")]
    assert "model.layers.3.mlp.up_proj: 0.08" in titles
    assert len(titles) == 8
    points = [circle for circle in svg.iter("circle") if "up_proj" in circle.find("title").text]
    heights = [float(point.get("cy")) for point in points]
    assert heights == sorted(heights, reverse=True), "a larger error stands higher"


def test_a_mixture_with_very_many_experts_stays_a_small_page():
    layers = tuple(
        LayerError(
            name=f"model.layers.{b}.mlp.experts.{e}.down_proj", weight_error=0.1, output_error=0.001 * e + b * 1e-5
        )
        for b in range(40)
        for e in range(128)
    )
    page = to_html(dataclasses.replace(REPORT, layers=layers))
    assert len(page.encode()) < 2_000_000
    assert page.count("<td><code>model.layers") == MOST_ROWS
    assert f"{40 * 128 - MOST_ROWS} more stand in report.json" in page
    assert "experts.127.down_proj" in page


@pytest.mark.parametrize(
    ("name", "block"), [("model.layers.12.self_attn", 12), ("transformer.h.3.mlp.experts.7.w1", 3), ("lm_head", None)]
)
def test_the_block_of_a_module_is_the_first_number_in_its_name(name, block):
    assert block_of(name) == block
