"""Size against quality over several reports: which can be compared at all, and which of them none beats in both."""

from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.quant.evaluate.report import EvalReport


@dataclass(frozen=True)
class Candidate:
    """One judged checkpoint: bytes of its weights and its loss (KL mean in nats); `own` marks the report at hand."""

    name: str
    size_bytes: int
    loss: float
    own: bool = False


@dataclass(frozen=True)
class Comparison:
    """Those that can be compared, the front among them (by size), and why the others were left out."""

    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    left_out: tuple[str, ...]


def compare_reports(report: EvalReport, others: Sequence[EvalReport]) -> Comparison:
    """Sets `report` beside `others` that judged against the same base, on the same tokens."""
    found: list[Candidate] = []
    left_out: list[str] = []
    for one in (report, *others):
        reason = _incomparable(report, one)
        if reason is not None:
            left_out.append(f"{label(one)}: {reason}")
            continue
        size, loss = one.candidate.size_bytes, one.kl_mean
        assert size is not None
        assert loss is not None
        same = one is not report and one.candidate == report.candidate
        if not same:
            found.append(Candidate(label(one), size, loss, own=one is report))
    return Comparison(tuple(found), front(found), tuple(left_out))


def front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those for which no other is at most as large and at most as lossy, and better in one: by size, loss falling."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.size_bytes, one.loss)):
        if not best or candidate.loss < best[-1].loss:
            best.append(candidate)
    return tuple(best)


def label(report: EvalReport) -> str:
    """A short name of what was judged."""
    name = report.candidate.name.rstrip("/").rpartition("/")[2]
    if name == "checkpoint" or not name:
        name = (report.candidate.digest or "")[:8]
    return f"{report.candidate.scheme or 'full precision'} ({name})"


def _incomparable(report: EvalReport, other: EvalReport) -> str | None:
    if other.candidate.size_bytes is None or other.kl_mean is None or other.base is None:
        return "has no size or was not compared with a base"
    if report.base is None or (other.base.digest or other.base.name) != (report.base.digest or report.base.name):
        return f"was compared with another base ({other.base.name})"
    ours, theirs = report.conventions, other.conventions
    for field in ("dataset", "revisions", "split", "join", "bos", "window", "stride", "tokens"):
        one, two = getattr(ours, field), getattr(theirs, field)
        if one != two and (one and two):
            return f"was scored on other text ({field}: {two!r}, here {one!r})"
    return None
