"""Log-probabilities in the two shapes of the API: a list of entries (chat), parallel lists (plain completions)."""

import math
from collections.abc import Sequence
from typing import Any

from narrowgauge.engine.request import PositionLogprobs
from narrowgauge.engine.tokenizer import Tokenizer

LOWEST = -9999.0  # what stands for minus infinity, which JSON cannot say


class TokenTexts:
    """Text of single tokens, remembered: a scored prompt asks for the same ones thousands of times."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int, *, as_id: bool = False) -> str:
        """The token's text, or `token_id:N`, which is unlike the text always unique."""
        if as_id:
            return f"token_id:{token_id}"
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.token_str(token_id)
        return text


def chat_content(positions: Sequence[PositionLogprobs], texts: TokenTexts, *, as_ids: bool) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`: the chosen token, and the best ones in `top_logprobs`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts(token_id, as_id=as_ids)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(texts(token_id).encode())}

    return [
        {
            **entry(position.chosen.token_id, position.chosen.logprob),
            "top_logprobs": [entry(top.token_id, top.logprob) for top in position.top],
        }
        for position in positions
    ]


class CompletionLogprobs:
    """Builds the parallel lists of one choice; offsets run on from chunk to chunk, from 0 at the returned text's start."""

    def __init__(self, texts: TokenTexts, *, as_ids: bool) -> None:
        self._texts, self._as_ids = texts, as_ids
        self._offset = 0

    def lists(self, ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """The object of one chunk. `ids` are the tokens at these positions; a position without figures gives null."""
        names, logprobs, tops, offsets = [], [], [], []
        for token_id, position in zip(ids, positions, strict=True):
            names.append(self._texts(token_id, as_id=self._as_ids))
            offsets.append(self._offset)
            self._offset += len(self._texts(token_id))
            logprobs.append(None if position is None else _finite(position.chosen.logprob))
            tops.append(None if position is None else self._top(position))
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for token in (*position.top, position.chosen):  # the chosen one may be an entry more than was asked for
            best.setdefault(self._texts(token.token_id, as_id=self._as_ids), _finite(token.logprob))
        return best


def joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two such objects, one after the other."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def _finite(logprob: float) -> float:
    return LOWEST if math.isnan(logprob) else max(logprob, LOWEST)
