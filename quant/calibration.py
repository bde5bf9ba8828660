"""Calibration tokens: text packed into windows of equal length, the same for the same specification and tokenizer."""

import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.quant.recipe import CalibrationSpec, TextSource
from narrowgauge.quant.texts import MOST_CHARACTERS, Chat, Document, TextError, stream

logger = logging.getLogger(__name__)

_BUFFER = 10_000
"""Documents that are shuffled together. The order is ours, not that of the library that reads them: a dataset's own
shuffling would move documents between what is calibrated on and what is held out, and differs between releases."""


@dataclass(frozen=True)
class CalibrationSet:
    """Token ids [N samples, L tokens] int64 with the digest of exactly these tokens."""

    ids: torch.Tensor
    digest: str
    sources: tuple[TextSource, ...]


def build_calibration(spec: CalibrationSpec, tokenizer: Any) -> CalibrationSet:
    """Draws documents by seed, tokenizes and packs them. `tokenizer` is a transformers tokenizer.

    Documents are joined by a blank line; conversations under `template: chat` stand as the tokenizer's chat template
    writes them, one behind the other. Where the tokenizer begins a text with special tokens (BOS), so does every window
    (and a conversation does not add its own), since models that were trained with one need it. Raises TextError where a
    source has too little text or not the kind that the template needs.
    """
    prefix = list(tokenizer("").input_ids)
    if spec.length <= len(prefix):
        raise TextError(f"length {spec.length} leaves no room beside the {len(prefix)} tokens that begin each text")
    windows: list[list[int]] = []
    for source, count in zip(spec.sources, shares(spec, spec.samples), strict=True):
        if count:
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
    chat = (source.template or spec.template) == "chat"
    refused = _Refused()
    write = _by_template(source, tokenizer, refused) if chat else _as_text
    body = spec.length - len(prefix)
    tokens: list[int] = []
    for document in _shuffled(stream(source.text, split="calibration", chat=chat), spec.seed):
        if (text := write(document)) is None:
            continue
        found = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        tokens += found[len(prefix) :] if chat and found[: len(prefix)] == prefix else found
        if len(tokens) >= count * body:
            break
    if refused.count:
        logger.warning("%s: %s", source.text, refused)
    if len(tokens) < count * body:
        raise TextError(
            f"{source.text}: holds {len(tokens)} tokens for calibration; {count} samples of {spec.length} need "
            f"{count * body}; lower calibration.samples or add a source{f' ({refused})' if refused.count else ''}"
        )
    return [prefix + tokens[start : start + body] for start in range(0, count * body, body)]


def _shuffled(found: Iterator[Document], seed: int) -> Iterator[Document]:
    """The documents in an order by seed, buffer after buffer, so that a source larger than memory can be drawn from."""
    order = random.Random(seed)
    while buffer := list(_first(found)):
        order.shuffle(buffer)
        yield from buffer


def _first(found: Iterator[Document]) -> Iterator[Document]:
    """Up to a buffer of documents, fewer where they are long."""
    characters = 0
    for document in itertools.islice(found, _BUFFER):
        yield document
        characters += len(document.text if isinstance(document, Chat) else document)
        if characters >= MOST_CHARACTERS:
            return


def _as_text(document: Document) -> str:
    return (document.text if isinstance(document, Chat) else document) + "\n\n"


@dataclass
class _Refused:
    """Conversations that the chat template would not write (a role it does not know, turns out of order), and why."""

    count: int = 0
    reason: str = ""

    def __str__(self) -> str:
        return f"the chat template refused {self.count} conversations, the last with: {self.reason}"


def _by_template(source: TextSource, tokenizer: Any, refused: _Refused) -> Callable[[Document], str | None]:
    """What writes a conversation as the model was trained to see it; None for one that the template refuses."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise TextError(
            "template: chat needs a tokenizer with a chat template, and the model's has none; write template: none, "
            "which takes what was said in a conversation as plain text"
        )
    from jinja2 import TemplateError

    def write(document: Document) -> str | None:
        if not isinstance(document, Chat):
            raise TextError(
                f"{source.text}: holds plain text, and template: chat needs conversations (a column messages or "
                "conversations); write template: none for this source"
            )
        try:
            text: str = tokenizer.apply_chat_template(document.messages, tokenize=False)
        except TemplateError as error:
            refused.count += 1
            refused.reason = str(error)
            return None
        return text

    return write
