"""Judges a candidate, alone or against its base: windows of held-out text streamed through both, side by side."""

import importlib.metadata
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import narrowgauge
from narrowgauge.quant.evaluate import divergence
from narrowgauge.quant.evaluate.intervals import over_windows
from narrowgauge.quant.evaluate.perplexity import LogitsSource, perplexity, token_losses
from narrowgauge.quant.evaluate.report import Conventions, EvalReport, Histogram, Interval, LayerError, Subject
from narrowgauge.quant.evaluate.windows import EvaluationError, HeldOut

LIBRARIES = ("torch", "transformers", "tokenizers")

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all)."""


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in a model folder. Raises EvaluationError where there is none that can be used."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(f"{folder}: has no usable tokenizer: {str(error).splitlines()[0]}") from None


def evaluate(
    candidate: LogitsSource,
    base: LogitsSource | None,
    heldout: HeldOut,
    *,
    candidate_subject: Subject,
    base_subject: Subject | None = None,
    batch: int = 1,
    layers: tuple[LayerError, ...] = (),
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> EvalReport:
    """Scores `heldout` by the candidate and, window by window beside it, by the base (None: perplexity only).

    `batch` windows go through the models at a time; it changes no figure beyond rounding. Logits of no more than a batch
    are held. Raises EvaluationError where the two models' vocabularies differ.
    """
    assert (base is None) == (base_subject is None)
    started = time.monotonic()
    measured = _measure(candidate, base, heldout, batch=batch, progress=progress)
    figures = measured.figures
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    report = EvalReport(
        source=candidate.name,
        candidate=candidate_subject,
        base=base_subject,
        conventions=_conventions(candidate, base, heldout, batch=batch),
        perplexity=None,
        kl_histogram=measured.histogram,
        perplexity_ratio_interval=measured.ratio_interval,
        kl_mean_interval=measured.kl_interval,
        non_finite=tuple(name for name in figures if name not in finite),
        layers=layers,
        notes=notes,
        seconds=round(time.monotonic() - started, 3),
    )
    return replace(report, **finite)  # type: ignore[arg-type]


def _conventions(candidate: LogitsSource, base: LogitsSource | None, heldout: HeldOut, *, batch: int) -> Conventions:
    windows, length = heldout.ids.shape
    return Conventions(
        dataset=heldout.sources,
        revisions=heldout.revisions,
        split=heldout.split,
        join=heldout.join,
        bos=heldout.bos,
        window=length,
        stride=heldout.stride or length,
        windows=windows,
        tokens=heldout.tokens,
        batch=batch,
        dtype=candidate.dtype,
        attention=candidate.attention,
        base_dtype=base.dtype if base else None,
        base_attention=base.attention if base else None,
        device=getattr(candidate, "device", None),
        rounding=getattr(candidate, "rounding", None),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    return {"narrowgauge": narrowgauge.__version__} | {name: importlib.metadata.version(name) for name in LIBRARIES}


@dataclass(frozen=True, kw_only=True)
class _Measured:
    figures: dict[str, float]
    histogram: Histogram | None = None
    ratio_interval: Interval | None = None
    kl_interval: Interval | None = None


def _measure(
    candidate: LogitsSource,
    base: LogitsSource | None,
    heldout: HeldOut,
    *,
    batch: int,
    progress: Progress | None,
) -> _Measured:
    comparisons: list[divergence.TokenComparison] = []
    losses: list[torch.Tensor] = []
    total = len(heldout.ids)
    for start in range(0, total, batch):
        part = heldout.ids[start : start + batch]
        first = None if heldout.first is None else heldout.first[start : start + batch]
        logits = candidate.logits(part)
        if base is None:
            losses.append(token_losses(logits, part, first))
        else:
            reference = base.logits(part)
            if reference.shape != logits.shape:
                raise EvaluationError(
                    f"the candidate has {logits.shape[-1]} tokens, the base {reference.shape[-1]}: only models with one "
                    "vocabulary can be compared"
                )
            comparisons.append(divergence.compare(reference, logits, part, first=first))
        if progress is not None:
            progress(min(start + batch, total), total)
    if base is None:
        return _Measured(figures={"perplexity": perplexity(torch.cat(losses))})
    return _judge(divergence.join(comparisons), heldout)


def _judge(comparison: divergence.TokenComparison, heldout: HeldOut) -> _Measured:
    judged, original = perplexity(comparison.candidate_loss), perplexity(comparison.base_loss)
    windows, length = heldout.ids.shape
    counts = [length - 1] * windows if heldout.first is None else (length - heldout.first).tolist()
    ratio = over_windows(comparison.candidate_loss - comparison.base_loss, counts)
    kl = over_windows(comparison.kl, counts)
    figures = {
        "perplexity": judged,
        "base_perplexity": original,
        "perplexity_ratio": judged / original,
        **vars(divergence.summarize(comparison)),
    }
    return _Measured(
        figures=figures,
        histogram=divergence.histogram(comparison),
        ratio_interval=_exp(ratio),
        kl_interval=None if kl is None else Interval(low=max(kl.low, 0.0), high=kl.high),  # no KL is below 0
    )


def _exp(interval: Interval | None) -> Interval | None:
    try:
        return None if interval is None else Interval(low=math.exp(interval.low), high=math.exp(interval.high))
    except OverflowError:  # the candidate is broken, and its ratio says so
        return None
