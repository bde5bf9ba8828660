"""Calibration tokens: text packed into windows of equal length, the same for the same specification and tokenizer."""

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.quant.recipe import CalibrationSpec, TextSource
from narrowgauge.quant.texts import TextError, documents


@dataclass(frozen=True)
class CalibrationSet:
    """Token ids [N samples, L tokens] int64 with the digest of exactly these tokens."""

    ids: torch.Tensor
    digest: str
    sources: tuple[TextSource, ...]


def build_calibration(spec: CalibrationSpec, tokenizer: Any) -> CalibrationSet:
    """Draws documents by seed, tokenizes and packs them. `tokenizer` is a transformers tokenizer.

    Documents are joined by a blank line. Where the tokenizer begins a text with special tokens (BOS), so does every
    window, since models that were trained with one need it. Raises TextError where a source has too little text.
    """
    prefix = list(tokenizer("").input_ids)
    windows: list[list[int]] = []
    for source, count in zip(spec.sources, shares(spec, spec.samples), strict=True):
        windows += _windows(source, count, spec=spec, tokenizer=tokenizer, prefix=prefix)
    random.Random(spec.seed).shuffle(windows)
    ids = torch.tensor(windows, dtype=torch.int64)
    digest = hashlib.sha256(repr(tuple(ids.shape)).encode() + ids.numpy().astype("<i8").tobytes()).hexdigest()
    return CalibrationSet(ids=ids, digest=digest, sources=spec.sources)


def shares(spec: CalibrationSpec, windows: int) -> list[int]:
    """How many of `windows` each source gives, by the sources' weights and largest remainder."""
    total = sum(source.weight for source in spec.sources)
    exact = [windows * source.weight / total for source in spec.sources]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: windows - sum(counts)]:
        counts[index] += 1
    return counts


def _windows(
    source: TextSource, count: int, *, spec: CalibrationSpec, tokenizer: Any, prefix: list[int]
) -> list[list[int]]:
    texts = documents(source.text, split="calibration")
    random.Random(spec.seed).shuffle(texts)
    body = spec.length - len(prefix)
    if body < 1:
        raise TextError(f"length {spec.length} leaves no room beside the {len(prefix)} tokens that begin each text")
    tokens: list[int] = []
    for text in texts:
        if len(tokens) >= count * body:
            break
        tokens += tokenizer(text + "\n\n", add_special_tokens=False, verbose=False).input_ids
    if len(tokens) < count * body:
        raise TextError(
            f"{source.text}: holds {len(tokens)} tokens for calibration; {count} samples of {spec.length} need "
            f"{count * body}; lower calibration.samples or add a source"
        )
    return [prefix + tokens[start : start + body] for start in range(0, count * body, body)]
