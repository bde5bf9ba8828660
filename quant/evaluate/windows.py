"""Windows of text to score: which text, how it is joined, cut and begun, and which of its tokens count.

S windows, L tokens a window. A perplexity means nothing without these conventions, so each stands in the report.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from narrowgauge.quant.calibration import shares
from narrowgauge.quant.evaluate import wikitext
from narrowgauge.quant.evaluate.perplexity import count_scored
from narrowgauge.quant.recipe import CalibrationSpec, TextSource
from narrowgauge.quant.texts import MOST_CHARACTERS, Split, TextError, documents

JOIN = "\n\n"
CHARACTERS_A_TOKEN = 6
"""Text taken before tokenizing, for each token wanted: more than most texts need; doubled where it is not enough."""

Bos = Literal["auto", "none", "once", "each"]
"""What begins a window: `auto` what the tokenizer begins a text with, in each; `none`; `once` the same, but only at the
very start of a text; `each` the tokenizer's BOS in each, even where it does not add one by itself."""


class EvaluationError(ValueError):
    """Models or text that cannot be judged together; the message says why."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Windows of text: ids [S, L] int64, and what a report must say about them.

    `first` [S] int64: the first position of each window that is scored (its token is predicted from those before it);
    None scores from 1 on. `stride`: tokens of text from one window's start to the next; None: windows do not overlap.
    """

    ids: torch.Tensor
    sources: tuple[str, ...]
    split: str
    join: str
    bos: str
    first: torch.Tensor | None = None
    stride: int | None = None
    revisions: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens are scored."""
        return count_scored(self.ids, self.first)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How text becomes windows: `windows` of `length` tokens (None: all that fit; the tail is dropped), a new one every
    `stride` tokens of text (None: where the last ended), begun by `bos`."""

    windows: int | None = 8
    length: int = 512
    stride: int | None = None
    bos: Bos = "auto"

    def __post_init__(self) -> None:
        if (self.windows is not None and self.windows < 1) or self.length < 2:
            raise EvaluationError(f"needs at least 1 window of 2 tokens, not {self.windows} of {self.length}")
        if self.stride is not None and not 1 <= self.stride <= self.length:
            raise EvaluationError(f"stride: must be 1 to the window's {self.length} tokens, not {self.stride}")


WIKITEXT2 = "wikitext2"
"""The text whose conventions are those of GPTQ's scripts; "wikitext2:PATH" is a local copy of it."""


def default_cut(text: str) -> Cut:
    """How a text is cut where nobody says: WikiText-2 as GPTQ's scripts do, whole, BOS once; others in a few windows."""
    return Cut(windows=None, length=2048, bos="once") if _is_wikitext2(text) else Cut()


def named_ids(text: str, tokenizer: Any, cut: Cut, *, split: Split = "heldout") -> HeldOut:
    """Windows of one text by its name: "wikitext2", "wikitext2:PATH", or a source as texts.stream knows it."""
    if _is_wikitext2(text):
        path = text.removeprefix(WIKITEXT2).removeprefix(":")
        return wikitext2_ids(tokenizer, cut, path=Path(path) if path else None)
    return heldout_ids(CalibrationSpec(sources=(TextSource(text=text),)), tokenizer, cut, split=split)


def _is_wikitext2(text: str) -> bool:
    return text == WIKITEXT2 or text.startswith(f"{WIKITEXT2}:")


def heldout_ids(spec: CalibrationSpec, tokenizer: Any, cut: Cut, *, split: Split = "heldout") -> HeldOut:
    """Windows of one part of the spec's sources (by default the half that nothing was calibrated on), by their weights.

    `tokenizer` is a transformers tokenizer. A source's documents are joined by a blank line and tokenized in one call.
    Raises TextError where a source has too little text.
    """
    counts = [None] * len(spec.sources) if cut.windows is None else shares(spec, cut.windows)
    texts = [
        _Text(
            name=source.text,
            revision=functools.partial(_revision, source.text),
            read=functools.partial(documents, source.text, split=split),
            windows=count,
        )
        for source, count in zip(spec.sources, counts, strict=True)
    ]
    return _cut(texts, tokenizer, cut, split=split)


def wikitext2_ids(tokenizer: Any, cut: Cut, *, path: Path | None = None) -> HeldOut:
    """WikiText-2 as GPTQ's scripts take it: the raw test split, every row (blank ones too) joined by a blank line, one
    tokenizer call. `path` is a local copy of the split. Raises TextError where it cannot be had."""
    found = wikitext.load(path)
    text = _Text(
        name=found.source, revision=lambda: found.revision, read=lambda characters: [found.text], windows=cut.windows
    )
    return _cut([text], tokenizer, cut, split=wikitext.SPLIT)


class _Reader(Protocol):
    def __call__(self, *, characters: int) -> list[str]:
        """The first documents, until they hold so many characters."""


@dataclass(frozen=True, kw_only=True)
class _Text:
    """One source: `read` gives its documents, `revision` what fixes them; `windows` of it are wanted, None for all."""

    name: str
    revision: Callable[[], str]
    read: _Reader
    windows: int | None


def _cut(texts: Sequence[_Text], tokenizer: Any, cut: Cut, *, split: str) -> HeldOut:
    opening = _opening(tokenizer, cut.bos)
    if cut.length < len(opening) + 2:
        raise EvaluationError(
            f"windows of {cut.length} tokens leave no room beside the {len(opening)} that begin each text"
        )
    rows: list[list[int]] = []
    firsts: list[int] = []
    for text in texts:
        if text.windows == 0:
            continue
        wanted = _tokens_needed(text.windows or 1, cut, opening)
        tokens = _tokenize(text.read, tokenizer, None if text.windows is None else wanted)
        found, first = _windows(tokens, text.windows, cut, opening=opening)
        if len(found) < (text.windows or 1):
            raise TextError(
                f"{text.name}: holds {len(tokens)} held-out tokens; {text.windows or 1} windows of {cut.length} need "
                f"{wanted}; use fewer or shorter windows, or a longer text"
            )
        rows, firsts = rows + found, firsts + first
    return HeldOut(
        ids=torch.tensor(rows, dtype=torch.int64),
        first=torch.tensor(firsts, dtype=torch.int64),
        sources=tuple(text.name for text in texts),
        revisions=tuple(text.revision() for text in texts),
        split=split,
        join=JOIN,
        bos=_describe(tokenizer, cut.bos, opening),
        stride=_step(cut, opening),
    )


def _windows(
    tokens: Sequence[int], count: int | None, cut: Cut, *, opening: list[int]
) -> tuple[list[list[int]], list[int]]:
    """Windows of `cut.length` tokens, each with the first position that is scored.

    Only tokens that no window before has scored count; what begins a window never does, nor the first token of a text.
    """
    once = cut.bos == "once"
    stream, begin = ([*opening, *tokens], []) if once else (list(tokens), opening)
    body, step = cut.length - len(begin), _step(cut, opening)
    rows: list[list[int]] = []
    firsts: list[int] = []
    for start in range(0, len(stream) - body + 1, step):
        if len(rows) == count:
            break
        rows.append([*begin, *stream[start : start + body]])
        firsts.append(max(1, len(opening) if start == 0 else len(begin) + body - step))
    return rows, firsts


def _step(cut: Cut, opening: list[int]) -> int:
    """Tokens of text from one window's start to the next."""
    body = cut.length if cut.bos == "once" else cut.length - len(opening)
    return min(cut.stride or body, body)


def _tokens_needed(count: int, cut: Cut, opening: list[int]) -> int:
    # What begins the text once takes up as much of the first window as of each where it begins them all.
    return (count - 1) * _step(cut, opening) + cut.length - len(opening)


def _tokenize(read: _Reader, tokenizer: Any, wanted: int | None) -> list[int]:
    """At least `wanted` tokens of the joined texts where they hold as many; of a long text no more is read than needed."""
    characters = MOST_CHARACTERS if wanted is None else CHARACTERS_A_TOKEN * wanted
    while True:
        texts = read(characters=characters)
        tokens = list(tokenizer(JOIN.join(texts), add_special_tokens=False, verbose=False).input_ids)
        if wanted is None or len(tokens) >= wanted or sum(map(len, texts)) < characters:
            return tokens
        characters *= 2


def _opening(tokenizer: Any, bos: Bos) -> list[int]:
    """The special tokens before a text. Raises EvaluationError for a tokenizer without the BOS that was asked for."""
    if bos == "none":
        return []
    whole, plain = list(tokenizer("a").input_ids), list(tokenizer("a", add_special_tokens=False).input_ids)
    begins = next(n for n in range(len(whole) + 1) if whole[n : n + len(plain)] == plain)
    if bos != "each" or begins:
        return whole[:begins]
    if tokenizer.bos_token_id is None:
        raise EvaluationError("bos: each window should begin with BOS, but the tokenizer has none; use auto or none")
    return [int(tokenizer.bos_token_id)]


def _describe(tokenizer: Any, bos: Bos, opening: list[int]) -> str:
    if not opening:
        return "no token added"
    return f"{tokenizer.decode(opening)} {'once, before the text' if bos == 'once' else 'in each window'}"


def _revision(source: str) -> str:
    """What fixes a source's text: a file's SHA-256, a hub dataset's commit, Python's version for its own documentation."""
    if source == "pydoc":
        import platform

        return f"Python {platform.python_version()}"
    if source.startswith("hub:"):
        return wikitext.hub_commit(source.removeprefix("hub:").partition(":")[0])
    return wikitext.file_digest(Path(source).expanduser())
