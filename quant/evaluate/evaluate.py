"""Judges a candidate, alone or against its base: windows of held-out text streamed through both, side by side."""

import importlib.metadata
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import narrowgauge
from narrowgauge.quant.calibration import shares
from narrowgauge.quant.evaluate import divergence
from narrowgauge.quant.evaluate.perplexity import LogitsSource, perplexity, token_losses
from narrowgauge.quant.evaluate.report import Conventions, EvalReport, LayerError, Subject
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.recipe import CalibrationSpec
from narrowgauge.quant.sources import LocalModel
from narrowgauge.quant.texts import TextError, documents

JOIN = "\n\n"
CHARACTERS_A_TOKEN = 6
"""Text taken before tokenizing, for each token wanted: more than most texts need; doubled where it is not enough."""

LIBRARIES = ("torch", "transformers", "tokenizers")

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all)."""


class EvaluationError(ValueError):
    """Models or text that cannot be judged together; the message says why."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Windows of held-out text: ids [S, L] int64, and what a report must say about them."""

    ids: torch.Tensor
    sources: tuple[str, ...]
    split: str
    join: str
    bos: str


def heldout_ids(spec: CalibrationSpec, tokenizer: Any, *, windows: int, length: int) -> HeldOut:
    """The first `windows` disjoint windows of `length` tokens of the held-out half of the spec's sources, by their weights.

    `tokenizer` is a transformers tokenizer. A source's documents are joined by a blank line and tokenized in one call;
    the tail is dropped. Where the tokenizer begins a text with special tokens (BOS), so does every window. Raises
    TextError where a source has too little text.
    """
    if windows < 1 or length < 2:
        raise EvaluationError(f"needs at least 1 window of 2 tokens, not {windows} of {length}")
    prefix = list(tokenizer("").input_ids)
    if length < len(prefix) + 2:
        raise EvaluationError(f"windows of {length} tokens leave no room beside the {len(prefix)} that begin each text")
    rows: list[list[int]] = []
    for source, count in zip(spec.sources, shares(spec, windows), strict=True):
        rows += _windows(source.text, count, length=length, tokenizer=tokenizer, prefix=prefix)
    bos = f"{tokenizer.decode(prefix)} in each window" if prefix else "no token added"
    return HeldOut(
        ids=torch.tensor(rows, dtype=torch.int64),
        sources=tuple(source.text for source in spec.sources),
        split="heldout",
        join=JOIN,
        bos=bos,
    )


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in a model folder. Raises EvaluationError where there is none that can be used."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(f"{folder}: has no usable tokenizer: {str(error).splitlines()[0]}") from None


def describe(model: LocalModel) -> Subject:
    """What a report says of a checkpoint: its URI, digest, schemes and size. Raises FormatError."""
    reader = CheckpointReader(model.path)
    names = sorted({scheme.name for scheme in reader.layout.linears.values()}) if reader.layout else []
    return Subject(
        name=model.source, digest=model.digest, scheme=" + ".join(names) or None, size_bytes=reader.size_bytes
    )


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

    `batch` windows go through the models at a time; it changes no figure beyond rounding. Raises EvaluationError where
    the two models' vocabularies differ.
    """
    assert (base is None) == (base_subject is None)
    started = time.monotonic()
    figures = _measure(candidate, base, heldout.ids, batch=batch, progress=progress)
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    windows, length = heldout.ids.shape
    conventions = Conventions(
        dataset=heldout.sources,
        split=heldout.split,
        join=heldout.join,
        bos=heldout.bos,
        window=length,
        stride=length,
        windows=windows,
        tokens=windows * (length - 1),
        batch=batch,
        dtype=candidate.dtype,
        attention=candidate.attention,
        base_dtype=base.dtype if base else None,
        base_attention=base.attention if base else None,
        versions=_versions(),
    )
    return EvalReport(
        source=candidate.name,
        candidate=candidate_subject,
        base=base_subject,
        conventions=conventions,
        perplexity=finite.get("perplexity"),
        base_perplexity=finite.get("base_perplexity"),
        perplexity_ratio=finite.get("perplexity_ratio"),
        kl_mean=finite.get("kl_mean"),
        kl_median=finite.get("kl_median"),
        kl_p99=finite.get("kl_p99"),
        kl_max=finite.get("kl_max"),
        top1=finite.get("top1"),
        delta_p_rms=finite.get("delta_p_rms"),
        non_finite=tuple(name for name in figures if name not in finite),
        layers=layers,
        notes=notes,
        seconds=round(time.monotonic() - started, 3),
    )


def _versions() -> dict[str, str]:
    return {"narrowgauge": narrowgauge.__version__} | {name: importlib.metadata.version(name) for name in LIBRARIES}


def _windows(source: str, count: int, *, length: int, tokenizer: Any, prefix: list[int]) -> list[list[int]]:
    texts = documents(source, split="heldout")
    body = length - len(prefix)
    wanted = count * body
    taken = _enough(texts, CHARACTERS_A_TOKEN * wanted)
    while (
        len(tokens := tokenizer(JOIN.join(texts[:taken]), add_special_tokens=False, verbose=False).input_ids) < wanted
    ):
        if taken == len(texts):
            raise TextError(
                f"{source}: holds {len(tokens)} held-out tokens; {count} windows of {length} need {wanted}; "
                "use fewer or shorter windows, or a longer text"
            )
        taken = min(2 * taken, len(texts))
    return [prefix + list(tokens[start : start + body]) for start in range(0, wanted, body)]


def _enough(texts: list[str], characters: int) -> int:
    """How many of the first texts hold that many characters: what lies far behind the last window is not tokenized."""
    total = 0
    for index, text in enumerate(texts):
        total += len(text)
        if total >= characters:
            return index + 1
    return len(texts)


def _measure(
    candidate: LogitsSource, base: LogitsSource | None, ids: torch.Tensor, *, batch: int, progress: Progress | None
) -> dict[str, float]:
    comparisons: list[divergence.TokenComparison] = []
    losses: list[torch.Tensor] = []
    for start in range(0, len(ids), batch):
        part = ids[start : start + batch]
        logits = candidate.logits(part)
        if base is None:
            losses.append(token_losses(logits, part))
        else:
            reference = base.logits(part)
            if reference.shape != logits.shape:
                raise EvaluationError(
                    f"the candidate has {logits.shape[-1]} tokens, the base {reference.shape[-1]}: only models with one "
                    "vocabulary can be compared"
                )
            comparisons.append(divergence.compare(reference, logits, part))
        if progress is not None:
            progress(min(start + batch, len(ids)), len(ids))
    if base is None:
        return {"perplexity": perplexity(torch.cat(losses))}
    comparison = divergence.join(comparisons)
    judged, original = perplexity(comparison.candidate_loss), perplexity(comparison.base_loss)
    return {
        "perplexity": judged,
        "base_perplexity": original,
        "perplexity_ratio": judged / original,
        **vars(divergence.summarize(comparison)),
    }
