"""Size against quality: a front by its definition, among reports that can be compared at all."""

import dataclasses
import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.quant.evaluate.html import to_html
from narrowgauge.quant.evaluate.pareto import Candidate, compare_reports, front
from narrowgauge.quant.evaluate.report import Conventions, EvalReport, Subject

HOW = Conventions(
    dataset=("pydoc",), split="heldout", join="\n\n", bos="none", window=512, stride=512, windows=8, tokens=4088,
    batch=1, dtype="float32", attention="sdpa", revisions=("Python 3.12.3",),
)  # fmt: skip


def _report(name, size, kl, *, base="base", **how):
    return EvalReport(
        source="reference",
        candidate=Subject(name=f"/models/{name}", digest=name * 8, scheme=name.upper(), size_bytes=size),
        base=Subject(name=base, digest=base * 8, size_bytes=1000),
        conventions=dataclasses.replace(HOW, **how),
        perplexity=10.0,
        kl_mean=kl,
        seconds=1.0,
    )


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=8))
def test_the_front_holds_exactly_what_nothing_beats(values):
    candidates = [Candidate(f"c{index}", size, float(loss)) for index, (size, loss) in enumerate(values)]

    def beats(one, two):
        no_worse = one.size_bytes <= two.size_bytes and one.loss <= two.loss
        return no_worse and (one.size_bytes, one.loss) != (two.size_bytes, two.loss)

    unbeaten = {(c.size_bytes, c.loss) for c in candidates if not any(beats(other, c) for other in candidates)}
    found = front(candidates)
    assert {(c.size_bytes, c.loss) for c in found} == unbeaten
    assert [c.size_bytes for c in found] == sorted(c.size_bytes for c in found)


def test_reports_of_other_text_or_another_base_are_left_out_with_the_reason():
    own = _report("w4", 300, 0.05)
    others = [
        _report("w8", 550, 0.005),
        _report("w3", 320, 0.5),
        _report("longer", 100, 0.001, window=2048),
        _report("foreign", 100, 0.001, base="elsewhere"),
        dataclasses.replace(_report("alone", 100, 0.1), base=None, kl_mean=None),
    ]
    comparison = compare_reports(own, others)
    assert [c.name for c in comparison.candidates] == ["W4 (w4)", "W8 (w8)", "W3 (w3)"]
    assert [c.name for c in comparison.front] == ["W4 (w4)", "W8 (w8)"]
    assert [c.own for c in comparison.candidates] == [True, False, False]
    reasons = "\n".join(comparison.left_out)
    assert "LONGER (longer): was scored on other text (window: 2048, here 512)" in reasons
    assert "FOREIGN (foreign): was compared with another base (elsewhere)" in reasons
    assert "ALONE (alone): has no size or was not compared" in reasons


def test_the_same_checkpoint_judged_twice_stands_there_once():
    own = _report("w4", 300, 0.05)
    assert len(compare_reports(own, [dataclasses.replace(own, kl_mean=0.0501)]).candidates) == 1


def test_the_page_draws_the_front_and_tells_what_it_left_out():
    page = to_html(
        _report("w4", 300_000_000, 0.05),
        others=[_report("w8", 550_000_000, 0.005), _report("odd", 1, 0.1, split="all")],
    )
    assert "W8 (w8): 550.0 MB, KL 0.005" in page
    assert "was scored on other text (split:" in page
    assert "Pareto front" in page


def test_a_report_of_schema_1_which_has_no_revisions_is_comparable():
    own = _report("w4", 300, 0.05)
    old = _report("w8", 550, 0.005, revisions=())
    assert len(compare_reports(own, [old]).candidates) == 2


def test_names_of_neighbours_do_not_cover_one_another():
    others = [_report(f"w{i}", 300_000_000 + i, 0.05 + i * 1e-5) for i in range(5)]
    page = to_html(_report("own", 300_000_000, 0.05), others=others)
    heights = sorted(float(y) for y in re.findall(r'<text class="label" x="[^"]*" y="([^"]*)" [^>]*>[OW]', page))
    assert len(heights) == 6
    assert min(b - a for a, b in pairwise(heights)) >= 13.9
