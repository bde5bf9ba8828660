"""Token ids to text, as they come: whole characters only, and nothing that may yet turn out to be a stop string."""

from collections.abc import Sequence

from narrowgauge.engine.tokenizer import Tokenizer

REPLACEMENT = "�"
MAX_PENDING = 4
"""Tokens after which text that still ends in U+FFFD is taken for bytes that are no UTF-8: a character has at most 4 bytes."""
CONTEXT = 6
"""Prompt tokens decoded along, unseen: some tokenizers write the first token of a text differently."""


class Detokenizer:
    """Text of one output, grown token by token; seeded with the prompt, whose text is never given out."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT:])
        self._prefix = 0  # start of the window that is decoded again
        self._read = len(self._ids)  # tokens before this one have been given out
        self._known = self._decode(self._prefix, self._read)

    def push(self, token_id: int) -> str:
        """The text that this token completes; '' while a character is unfinished."""
        self._ids.append(token_id)
        text = self._decode(self._prefix, len(self._ids))
        if not text.endswith(REPLACEMENT):
            return self._give_out(text, len(self._ids))
        if len(self._ids) - self._read < MAX_PENDING:
            return ""
        # The oldest pending token is in no character that could still be finished; the later ones may be.
        return self._give_out(self._decode(self._prefix, self._read + 1), self._read + 1)

    def flush(self) -> str:
        """The rest at the end of the output; an unfinished character becomes U+FFFD."""
        return self._give_out(self._decode(self._prefix, len(self._ids)), len(self._ids))

    def _give_out(self, text: str, end: int) -> str:
        """The part of `text`, of the tokens up to `end`, that is new."""
        new = text[len(self._known) :]
        self._prefix, self._read = self._read, end
        self._known = self._decode(self._prefix, self._read)
        return new

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip) if start < end else ""


class StopScanner:
    """Watches a growing text for stop strings and holds back only what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text to give out, the stop string that ended it or None); the earliest match wins, then the longest.

        While not `armed` (before min_tokens) nothing is matched, and text given out then takes no part in a later match.
        """
        if not armed or not self._stops:
            text, self._held = self._held + text, ""
            return text, None
        window = self._held + text
        found = min(
            ((at, -len(stop), stop) for stop in self._stops if (at := window.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            at, _, stop = found
            self._held = ""
            return window[: at + len(stop) if self._include else at], stop
        keep = self._partial(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def flush(self) -> str:
        """What was held back, at the end of an output that no stop string ended."""
        text, self._held = self._held, ""
        return text

    def _partial(self, window: str) -> int:
        """Length of the longest end of `window` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(window)), longest, -1):
                if window.endswith(stop[:length]):
                    longest = length
                    break
        return longest
