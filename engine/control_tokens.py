"""Keeps text that a caller sends from being read as a model's control tokens (`<|im_end|>` in a message ends no turn).

Before a template is rendered a mark is set inside each control token that a caller's text spells, and the rendered text is
split at the marks. No piece spells the token any more, so that each costs ordinary tokens; those that the template wrote
stay whole. Text without such spellings stays one piece, and has the ids that transformers gives it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode's noncharacters: never part of a text that is exchanged


class ControlTokens:
    """A tokenizer's special tokens, and the further added tokens that the chat template itself writes.

    An assistant's turn is only searched for the special ones: templates take `<think>` and the like apart in there.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        added = {i: token for i, token in backend.get_added_tokens_decoder().items() if len(token.content.strip()) > 1}
        special = {i: token.content for i, token in added.items() if token.special}
        written = {i: token.content for i, token in added.items() if token.content in template}
        self._ids = frozenset(special) | frozenset(written)
        self._special = _pattern(special.values())
        self._every = _pattern((*special.values(), *written.values()))

    def marked(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
        """(messages, variables, mark): copies with the mark inside every control token. Raises ValueError."""
        taken = {letter for text in _texts([*messages, variables]) for letter in text if letter in _MARKS}
        free = [mark for mark in _MARKS if mark not in taken]
        if not free:
            raise ValueError("they hold all of Unicode's noncharacters U+FDD0 to U+FDEF; leave one out")
        patterns = (self._special if m.get("role") == "assistant" else self._every for m in messages)
        safe = [_mark(dict(m), pattern, free[0]) for m, pattern in zip(messages, patterns, strict=True)]
        return safe, _mark(dict(variables), self._every, free[0]), free[0]

    def smuggled(self, pieces: Sequence[str], ids: Sequence[int]) -> bool:
        """Whether `ids` have more control tokens than `pieces` spell: a normalizer has made one of something else."""
        return sum(i in self._ids for i in ids) > sum(len(self._every.findall(piece)) for piece in pieces)


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _mark(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        parts, start = [], 0
        while found := pattern.search(value, start):  # on from its second letter: what overlaps it may be one too
            parts.append(value[start : found.start() + 1])
            start = found.start() + 1
        return mark.join((*parts, value[start:]))
    if isinstance(value, Mapping):
        return {key: _mark(item, pattern, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(item, pattern, mark) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
