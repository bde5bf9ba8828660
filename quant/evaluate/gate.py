"""The offline gate: a recipe's limits against a report's figures. Pure; whoever asked acts on the answer."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.quant.evaluate.report import FIGURES, EvalReport
from narrowgauge.quant.recipe import GateSpec


@dataclass(frozen=True, kw_only=True)
class GateOutcome:
    """The gate's answer. `checks` tells every limit with its figure; `reasons` those that were missed."""

    passed: bool
    reasons: tuple[str, ...]
    checks: tuple[str, ...]


@dataclass(frozen=True)
class _Limit:
    figure: str
    bound: float | None
    keeps: Callable[[float, float], bool]
    symbol: str
    broken: str


def check_gate(report: EvalReport, gate: GateSpec) -> GateOutcome:
    """Passes where every limit is kept (a figure equal to its limit passes) and every figure of the report is finite.

    A limit on a figure that the report lacks (there was no base) is a missed one: nothing passes unmeasured.
    """
    checks, reasons = [], []
    for limit in _limits(gate):
        if limit.bound is None:
            continue
        value: float | None = getattr(report, limit.figure)
        label = FIGURES[limit.figure]
        if limit.figure in report.non_finite:
            continue  # told below, limit or not
        if value is None:
            reasons.append(f"{label} was not measured; the gate asks for {limit.symbol} {limit.bound:g}")
            checks.append(reasons[-1])
            continue
        kept = limit.keeps(value, limit.bound)
        figure, bound = _apart(value, limit.bound)
        checks.append(f"{label} {figure} {limit.symbol if kept else limit.broken} {bound}")
        if not kept:
            reasons.append(checks[-1])
    broken = [f"{FIGURES[name]} is not finite" for name in report.non_finite]
    return GateOutcome(passed=not reasons and not broken, reasons=(*reasons, *broken), checks=(*checks, *broken))


def _limits(gate: GateSpec) -> tuple[_Limit, ...]:
    return (
        _Limit("perplexity_ratio", gate.perplexity_ratio_max, operator.le, "<=", ">"),
        _Limit("kl_mean", gate.kl_mean_max, operator.le, "<=", ">"),
        _Limit("top1", gate.top1_min, operator.ge, ">=", "<"),
    )


def _apart(value: float, bound: float) -> tuple[str, str]:
    """Four digits, or all of them where four would show two different numbers as equal."""
    short = f"{value:.4g}", f"{bound:g}"
    return short if value == bound or float(short[0]) != bound else (repr(value), repr(bound))
