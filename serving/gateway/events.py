"""Server-sent events of an answer: found, timed and read by byte search, never decoded, forwarded whole and at once.

Within JSON text a quotation mark stands only escaped, so `"usage":` can be nothing but a key.
"""

import json
import re

from narrowgauge.serving.gateway.records import Stopwatch
from narrowgauge.serving.openai.errors import ApiError

DONE = b"data: [DONE]\n\n"
_END_OF_EVENT = re.compile(rb"\n\r?\n")
_USAGE = re.compile(rb'"usage":\s*\{')
_NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
_OUTPUT_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_FINISH_REASON = re.compile(rb'"finish_reason":\s*"(\w{1,40})"')
_ERROR = re.compile(rb'data:\s*\{\s*"error"')


class Findings:
    """What was found in an answer: finish reason, token counts; `started`: it is a stream and a data event has come."""

    def __init__(self) -> None:
        self.started = False
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    def search(self, data: bytes) -> None:
        """Looks through one event or one whole JSON answer; later findings replace earlier ones."""
        for match in _FINISH_REASON.finditer(data):
            self.finish_reason = match[1].decode()
        if usage := _USAGE.search(data):
            self.prompt_tokens = _number(_PROMPT_TOKENS, data, usage.end())
            self.output_tokens = _number(_OUTPUT_TOKENS, data, usage.end())


class EventStream(Findings):
    """Cuts the bytes of an answer into events. `feed` returns those to forward: comments are signs of life only, and the
    usage chunk goes no further where only the gateway asked for it.

    `done`: the end mark has come. `error_status`: set by an error event.
    """

    def __init__(self, watch: Stopwatch, *, drops_usage: bool) -> None:
        super().__init__()
        self._watch = watch
        self._drops_usage = drops_usage
        self._rest = b""
        self.done = False
        self.error_status: int | None = None

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Takes in bytes as they come (monotonic seconds `now`); returns whole events to forward, perhaps none."""
        if self._rest:
            chunk = self._rest + chunk
            self._rest = b""
        if chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return self._event(chunk, now)  # the usual case: exactly one event
        forwarded = []
        begin = 0
        for end in _END_OF_EVENT.finditer(chunk):
            forwarded.append(self._event(chunk[begin : end.end()], now))
            begin = end.end()
        self._rest = chunk[begin:]
        return b"".join(forwarded)

    def _event(self, event: bytes, now: float) -> bytes:
        if event.startswith(b":") and b"\ndata:" not in event:
            return b""
        if b"[DONE]" in event[:16]:
            self.done = True
            return DONE
        if b'"error"' in event[:32] and _ERROR.match(event):
            self.error_status = _error_status(event)
            return event
        if b'"finish_reason"' in event or b'"usage"' in event:
            self.search(event)
            if _USAGE.search(event) and _NO_CHOICES.search(event):
                return b"" if self._drops_usage else event
        self.started = True
        self._watch.event(now)
        return event


def error_event(error: ApiError) -> bytes:
    """An error in-band, as OpenAI clients raise it, and the end of the stream."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n" + DONE


def _error_status(event: bytes) -> int:
    try:
        error = json.loads(event.strip().removeprefix(b"data:"))["error"]
        code = error["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 500
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def _number(pattern: re.Pattern[bytes], data: bytes, begin: int) -> int | None:
    match = pattern.search(data, begin)
    return int(match[1]) if match else None
