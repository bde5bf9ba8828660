"""Error ratio: does the new revision fail more often than stable, and more often than is allowed at all?

Two one-sided exact tests, not ranks, since counts of rare events are no continuous samples: Fisher's against stable's
counts, and the binomial against `max_ratio`. The second is left out where stable is above `max_ratio` itself: what both
suffer from is not the new revision's doing. Each has half of `alpha` where both are made.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from narrowgauge.serving.rollout.gates.base import Evidence, Verdict


@dataclass(frozen=True, kw_only=True)
class ErrorsGate:
    """Fails when the canary's error ratio is above `max_ratio`, with at least `min_errors` errors, and this is significant.

    Significant: more than stable's, or more than `max_ratio` while stable keeps to it. `alpha` holds for one look.
    """

    name: Literal["errors"]
    max_ratio: float = 0.01
    min_requests: int = 20
    min_errors: int = 2
    alpha: float = 0.01

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_ratio < 1.0:
            raise ValueError(f"max_ratio is {self.max_ratio}; it must be at least 0 and below 1")
        if self.min_requests < 1 or self.min_errors < 1:
            raise ValueError("min_requests and min_errors must be at least 1")
        if not 0.0 < self.alpha < 0.5:
            raise ValueError(f"alpha is {self.alpha}; it must lie between 0 and 0.5")

    def judge(self, evidence: Evidence) -> Verdict:
        """Counts requests whose fault was the replica's; a client's own mistakes are not counted at all."""
        canary = [record.failed for record in (*evidence.canary, *evidence.baking) if record.counts]
        stable = [record.failed for record in evidence.stable if record.counts]
        errors, requests = sum(canary), len(canary)
        stable_errors, stable_requests = sum(stable), len(stable)
        p = self._p((errors, requests), (stable_errors, stable_requests))
        figures = {
            "errors": float(errors),
            "requests": float(requests),
            "stable_errors": float(stable_errors),
            "stable_requests": float(stable_requests),
            "p": p,
        }
        ratio = errors / requests if requests else 0.0
        told = f"{errors} of {requests} requests failed (stable {stable_errors} of {stable_requests}, p = {p:.2g})"
        if errors >= self.min_errors and ratio > self.max_ratio and p < self.alpha:
            return Verdict(gate=self.name, result="fail", reason=told, figures=figures)
        if requests < self.min_requests:
            reason = f"{requests} of at least {self.min_requests} requests; {told}"
            return Verdict(gate=self.name, result="inconclusive", reason=reason, figures=figures)
        if ratio > self.max_ratio:
            reason = f"{told}: above {self.max_ratio:g}, yet not significant"
            return Verdict(gate=self.name, result="inconclusive", reason=reason, figures=figures)
        return Verdict(gate=self.name, result="pass", reason=told, figures=figures)

    def _p(self, canary: tuple[int, int], stable: tuple[int, int]) -> float:
        """The smaller p-value, doubled (Bonferroni) where both tests are made. Arguments are (errors, requests)."""
        alone = binomial_greater(canary, self.max_ratio)
        if stable[1] < self.min_requests:
            return alone
        beside = fisher_greater(canary, stable)
        if stable[0] / stable[1] > self.max_ratio:
            return beside
        return min(1.0, 2.0 * min(alone, beside))


def fisher_greater(canary: tuple[int, int], stable: tuple[int, int]) -> float:
    """One-sided p-value that the canary's error ratio is greater; arguments are (errors, requests).

    Fisher's exact test on the 2x2 table; 1.0 where either side is empty.
    """
    from scipy.stats import fisher_exact  # half a second to import: not for those who only read a spec

    if canary[1] == 0 or stable[1] == 0:
        return 1.0
    table = [[errors, requests - errors] for errors, requests in (canary, stable)]
    return float(fisher_exact(table, alternative="greater").pvalue)


def binomial_greater(canary: tuple[int, int], ratio: float) -> float:
    """Exact p-value of at least this many errors if the true error ratio were `ratio`; 1.0 without requests."""
    from scipy.stats import binomtest

    errors, requests = canary
    if requests == 0:
        return 1.0
    return float(binomtest(errors, requests, ratio, alternative="greater").pvalue)
