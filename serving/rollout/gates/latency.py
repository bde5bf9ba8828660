"""Latency: is the new revision slower than stable, as a whole or in its tail?

Two rules, since each is blind where the other sees:
* shift: one-sided Mann-Whitney test (normal approximation with tie correction) *and* an effect size, the ratio
  1 + HL / median(stable), HL being the Hodges-Lehmann shift (median of all pairwise differences). A significant but
  tiny shift is no reason to stop.
* tail: how many requests lie above `max_ratio` x stable's `quantile`, canary against stable, by Fisher's exact test.
  A ratio of two sample quantiles alone would be noise at the sample sizes of a first step.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from narrowgauge.serving.rollout.gates.base import Evidence, RequestRecord, Result, Verdict, finite
from narrowgauge.serving.rollout.gates.errors import fisher_greater

_PAIRED = 1500


@dataclass(frozen=True, kw_only=True)
class LatencyGate:
    """Fails when either rule says that the canary is slower by more than `max_ratio`."""

    name: Literal["latency"]
    metric: Literal["ttft_s", "itl_p50_s", "e2e_s"]
    quantile: float = 0.95
    max_ratio: float = 1.3
    min_samples: int = 20
    alpha: float = 0.001

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.5 <= self.quantile < 1.0:
            raise ValueError(f"quantile is {self.quantile}; it must be at least 0.5 and below 1")
        if self.max_ratio < 1.0:
            raise ValueError(f"max_ratio is {self.max_ratio}; below 1 even an equal revision would fail")
        if self.min_samples < 2:
            raise ValueError(f"min_samples is {self.min_samples}; at least 2 are needed")
        if not 0.0 < self.alpha < 0.5:
            raise ValueError(f"alpha is {self.alpha}; it must lie between 0 and 0.5")

    def judge(self, evidence: Evidence) -> Verdict:
        """Compares the window's successful requests; a request without such a time (no token came) is left out."""
        canary, stable = self._samples(evidence.canary), self._samples(evidence.stable)
        figures = {"canary_samples": float(len(canary)), "stable_samples": float(len(stable))}
        if not (finite(canary) and finite(stable)):
            return self._verdict("inconclusive", f"{self.metric}: a sample is not a number", figures)
        if min(len(canary), len(stable)) < self.min_samples:
            reason = f"{self.metric}: {len(canary)} canary and {len(stable)} stable samples; {self.min_samples} needed"
            return self._verdict("inconclusive", reason, figures)
        shift = shift_of(canary, stable)
        tail = tail_of(canary, stable, quantile=self.quantile, max_ratio=self.max_ratio)
        figures |= shift | tail
        slower = shift["shift_p"] < self.alpha and shift["shift_ratio"] > self.max_ratio
        if slower:
            reason = f"{self.metric}: typically {shift['shift_ratio']:.2f}x stable (p = {shift['shift_p']:.2g})"
            return self._verdict("fail", f"{reason}; {self.max_ratio:g}x allowed", figures)
        if tail["tail_p"] < self.alpha:
            reason = (
                f"{self.metric}: {tail['tail_canary']:.0f} of {len(canary)} above {tail['tail_bound_s']:.3g} s "
                f"({self.max_ratio:g}x stable's p{100 * self.quantile:g}), stable {tail['tail_stable']:.0f} of "
                f"{len(stable)} (p = {tail['tail_p']:.2g})"
            )
            return self._verdict("fail", reason, figures)
        reason = f"{self.metric}: {shift['shift_ratio']:.2f}x stable over {len(canary)} and {len(stable)} samples"
        return self._verdict("pass", reason, figures)

    def _samples(self, records: tuple[RequestRecord, ...]) -> tuple[float, ...]:
        values = (getattr(record, self.metric) for record in records if record.fault is None)
        return tuple(float(value) for value in values if value is not None)

    def _verdict(self, result: Result, reason: str, figures: dict[str, float]) -> Verdict:
        return Verdict(gate=self.name, result=result, reason=reason, figures=figures)


def shift_of(canary: tuple[float, ...], stable: tuple[float, ...]) -> dict[str, float]:
    """Rank test and effect sizes: p-value for "canary greater", CLES = U/(n*m), Hodges-Lehmann shift and its ratio.

    Two constant and equal sides give p = 1. Both sides must be finite and not empty.
    """
    import numpy as np
    from scipy.stats import mannwhitneyu

    a, b = np.asarray(canary, dtype=np.float64), np.asarray(stable, dtype=np.float64)
    if a.min() == a.max() == b.min() == b.max():
        return {"shift_p": 1.0, "shift_cles": 0.5, "shift_s": 0.0, "shift_ratio": 1.0}
    test: Any = mannwhitneyu(a, b, alternative="greater", method="asymptotic")
    shift = float(np.median(_thinned(a)[:, None] - _thinned(b)[None, :]))
    middle = float(np.median(b))
    ratio = 1.0 + shift / middle if middle > 0 else (1.0 if shift <= 0 else float("inf"))
    cles = float(test.statistic) / (len(a) * len(b))
    return {"shift_p": float(test.pvalue), "shift_cles": cles, "shift_s": shift, "shift_ratio": ratio}


def _thinned(values: Any) -> Any:
    """At most `_PAIRED` order statistics, evenly spaced: all pairs of many thousands of samples would fill gigabytes."""
    import numpy as np

    ordered = np.sort(values)
    if len(ordered) <= _PAIRED:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, _PAIRED).round().astype(np.int64)]


def tail_of(
    canary: tuple[float, ...], stable: tuple[float, ...], *, quantile: float, max_ratio: float
) -> dict[str, float]:
    """Requests above `max_ratio` times stable's quantile on both sides, and Fisher's p for "canary has more"."""
    import numpy as np

    bound = max_ratio * float(np.quantile(np.asarray(stable, dtype=np.float64), quantile))
    above = (sum(value > bound for value in canary), sum(value > bound for value in stable))
    p = fisher_greater((above[0], len(canary)), (above[1], len(stable)))
    return {"tail_bound_s": bound, "tail_canary": float(above[0]), "tail_stable": float(above[1]), "tail_p": p}
