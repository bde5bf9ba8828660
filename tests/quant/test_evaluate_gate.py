"""The offline gate: exact at its limits, and never passed by what was not measured."""

import dataclasses

import pytest

from narrowgauge.quant.evaluate.gate import check_gate
from narrowgauge.quant.evaluate.report import Conventions, EvalReport, Subject
from narrowgauge.quant.recipe import GateSpec

CONVENTIONS = Conventions(
    dataset=("pydoc",),
    split="heldout",
    join="\n\n",
    bos="no token added",
    window=512,
    stride=512,
    windows=8,
    tokens=4088,
    batch=1,
    dtype="float32",
    attention="sdpa",
)
REPORT = EvalReport(
    source="reference",
    candidate=Subject(name="candidate"),
    base=Subject(name="base"),
    conventions=CONVENTIONS,
    perplexity=25.0,
    base_perplexity=20.0,
    perplexity_ratio=1.25,
    kl_mean=0.25,
    top1=0.75,
    seconds=1.0,
)
LIMITS = GateSpec(perplexity_ratio_max=1.25, kl_mean_max=0.25, top1_min=0.75)


def test_figures_equal_to_their_limits_pass():
    outcome = check_gate(REPORT, LIMITS)
    assert outcome.passed
    assert outcome.reasons == ()
    assert outcome.checks == ("perplexity ratio 1.25 <= 1.25", "KL mean 0.25 <= 0.25", "top-1 agreement 0.75 >= 0.75")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"perplexity_ratio": 31.2}, "perplexity ratio 31.2 > 1.25"),
        ({"perplexity_ratio": 1.2500001}, "perplexity ratio 1.2500001 > 1.25"),
        ({"kl_mean": 3.14159}, "KL mean 3.142 > 0.25"),
        ({"top1": 0.5}, "top-1 agreement 0.5 < 0.75"),
        ({"top1": 0.7499999}, "top-1 agreement 0.7499999 < 0.75"),
    ],
)
def test_a_missed_limit_fails_with_the_figure_and_the_limit(change, reason):
    outcome = check_gate(dataclasses.replace(REPORT, **change), LIMITS)
    assert not outcome.passed
    assert outcome.reasons == (reason,)
    assert reason in outcome.checks
    assert len(outcome.checks) == 3


def test_every_missed_limit_is_told():
    worse = dataclasses.replace(REPORT, perplexity_ratio=2.0, kl_mean=1.0, top1=0.1)
    assert len(check_gate(worse, LIMITS).reasons) == 3


def test_limits_that_are_not_set_are_not_checked():
    worse = dataclasses.replace(REPORT, perplexity_ratio=2.0, kl_mean=1.0)
    outcome = check_gate(worse, GateSpec(top1_min=0.5))
    assert outcome.passed
    assert outcome.checks == ("top-1 agreement 0.75 >= 0.5",)


@pytest.mark.parametrize("gate", [LIMITS, GateSpec()])
@pytest.mark.parametrize("name", ["perplexity", "base_perplexity", "kl_max", "kl_mean"])
def test_a_figure_that_is_not_finite_fails_every_gate(gate, name):
    broken = dataclasses.replace(REPORT, **{name: None}, non_finite=(name,))
    outcome = check_gate(broken, gate)
    assert not outcome.passed
    assert any("is not finite" in reason for reason in outcome.reasons)


def test_a_limit_on_what_was_not_measured_is_a_missed_one():
    alone = dataclasses.replace(REPORT, base=None, base_perplexity=None, perplexity_ratio=None, kl_mean=None, top1=None)
    outcome = check_gate(alone, GateSpec(kl_mean_max=0.25))
    assert not outcome.passed
    assert outcome.reasons == ("KL mean was not measured; the gate asks for <= 0.25",)


def test_a_gate_without_limits_passes_finite_figures():
    assert check_gate(REPORT, GateSpec()).passed
