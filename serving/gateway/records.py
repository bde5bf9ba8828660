"""Request records: what the rollout gates judge by. One for every request, and one for every try that a replica failed."""

import dataclasses
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from narrowgauge.serving.gateway.routing import Role

Fault = Literal["client", "replica", "gateway"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One finished request (or failed try). Times in seconds, counted from the request's arrival (from the try's start
    where it was repeated); `t_end` is Unix time.

    `status` is what counts as the outcome: 499 where the client left, 502 where the replica was lost, 504 where it fell
    silent, even after the client had been sent 200. `ttft_s` runs to the first `data:` event, without stream to the
    answer; None where there was none, or a refusal.
    """

    seq: int
    t_end: float
    model: str
    revision: str
    role: Role
    shadow: bool
    status: int
    fault: Fault | None
    finish_reason: str | None
    ttft_s: float | None
    itl_p50_s: float | None
    e2e_s: float
    prompt_tokens: int | None
    output_tokens: int | None

    def to_json(self) -> dict[str, Any]:
        """The record as it is sent to the controller."""
        return dataclasses.asdict(self)


class RecordRing:
    """The newest `capacity` records, numbered without gaps.

    Numbers begin at the microseconds of the clock, so that those of a restarted gateway are above all it ever gave out and
    a reader's `after` stays good.
    """

    def __init__(self, capacity: int = 100_000, *, clock: Callable[[], float] = time.time) -> None:
        self._capacity = capacity
        self._records: list[RequestRecord | None] = [None] * capacity
        self._first = self._next = int(clock() * 1e6)
        self._clock = clock

    def add(self, **fields: Any) -> RequestRecord:
        """Numbers and stamps a record and keeps it, in place of the oldest where the ring is full."""
        record = RequestRecord(seq=self._next, t_end=self._clock(), **fields)
        self._records[self._next % self._capacity] = record
        self._next += 1
        self._first = max(self._first, self._next - self._capacity)
        return record

    def after(self, seq: int, *, limit: int) -> tuple[list[RequestRecord], int]:
        """Up to `limit` records with higher numbers, oldest first, and the number to ask with next time.

        A number that was never given out (by an earlier gateway whose clock was ahead) starts from the oldest.
        """
        if seq >= self._next:
            seq = self._first - 1
        begin = max(seq + 1, self._first)
        end = min(begin + limit, self._next)
        found = [self._records[number % self._capacity] for number in range(begin, end)]
        return [record for record in found if record is not None], max(end - 1, seq)


class Stopwatch:
    """Times of one try: the first event and the gaps between events, by the monotonic clock of this process."""

    def __init__(self, started: float) -> None:
        self.started = started
        self._gaps = array("d")
        self._first: float | None = None
        self._last = started

    def event(self, now: float) -> None:
        """Marks one event (a token, or what a replica sends at once)."""
        if self._first is None:
            self._first = now
        else:
            self._gaps.append(now - self._last)
        self._last = now

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first event."""
        return None if self._first is None else self._first - self.started

    @property
    def itl_p50_s(self) -> float | None:
        """Median seconds between events; None for fewer than two."""
        return statistics.median(self._gaps) if self._gaps else None
