"""A steady consumer: the official OpenAI client, several streams in flight, counting who answered and what failed.

It knows nothing of rollouts: it asks for the served name and reads the revision from the answer's header.
"""

import asyncio
import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

REVISION_HEADER = "x-narrowgauge-revision"
REQUEST_TIMEOUT_S = 120.0

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "What does a compiler do?",
    "How many days has a week?",
    "Explain gravity to a child.",
    "What is a prime number?",
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the consumer saw up to a moment: answers by revision, tokens a second of one stream (median), failures."""

    answers: Mapping[str, int] = field(default_factory=dict)
    stream_tokens_s: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All whole answers."""
        return sum(self.answers.values())

    def since(self, earlier: "Served") -> dict[str, int]:
        """Answers by revision after an earlier moment, zeros left out."""
        return dict(Counter(self.answers) - Counter(earlier.answers))


class ConsumerError(RuntimeError):
    """The consumer got no answer in time, or its thread ended; the message names the first failure."""


class Consumer:
    """Runs in a thread of its own from `start` to `stop`; `served` may be called from any thread."""

    def __init__(self, base_url: str, model: str, *, in_flight: int = 4, max_tokens: int = 16) -> None:
        self._base_url = base_url
        self._model = model
        self.in_flight = in_flight
        self._max_tokens = max_tokens
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._answers: Counter[str] = Counter()
        self._rates: dict[str, list[float]] = {}
        self._failures: list[str] = []
        self._open: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="consumer", daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> Served:
        """Lets the requests in flight finish, and returns what was seen in all."""
        self._stopping.set()
        if self.running:
            self._thread.join(REQUEST_TIMEOUT_S + 10.0)
        return self.served()

    def served(self) -> Served:
        """What was seen so far."""
        with self._changed:
            return Served(
                answers=dict(self._answers),
                stream_tokens_s={key: statistics.median(rates) for key, rates in self._rates.items() if rates},
                failures=tuple(self._failures),
            )

    @property
    def running(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    def wait_for_more(self, answers: int, *, timeout_s: float) -> None:
        """Blocks until that many more whole answers came. Raises ConsumerError."""
        with self._changed:
            wanted = self._answers.total() + answers
            if not self._changed.wait_for(lambda: self._answers.total() >= wanted, timeout_s):
                first = self._failures[0] if self._failures else "no failure was reported"
                raise ConsumerError(f"{self._base_url}: fewer than {answers} answers within {timeout_s:.0f} s: {first}")

    def wait_for_open(self, *, timeout_s: float) -> None:
        """Blocks until every request that is open now has ended, however long one takes. Raises ConsumerError."""
        with self._changed:
            waited = frozenset(self._open)
            if not self._changed.wait_for(lambda: not waited & self._open, timeout_s):
                still = ", ".join(map(str, sorted(waited & self._open)))
                raise ConsumerError(f"{self._base_url}: requests {still} were not answered within {timeout_s:.0f} s")

    def _run(self) -> None:
        asyncio.run(self._ask_all())

    async def _ask_all(self) -> None:
        import openai

        # Proxies from the environment must not come between us and 127.0.0.1; a retry would hide a failure.
        transport = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=self._base_url, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S, http_client=transport
        ) as client:
            numbers = itertools.count()
            await asyncio.gather(*(self._ask_in_turn(client, numbers) for _ in range(self.in_flight)))

    async def _ask_in_turn(self, client: Any, numbers: Iterator[int]) -> None:
        while not self._stopping.is_set():
            number = next(numbers)
            with self._changed:
                self._open.add(number)
            try:
                revision, rate = await self._ask(client, number)
            except Exception as error:  # noqa: BLE001 - whatever a client can see is a failed request, and is counted
                await self._failed(number, f"request {number}: {type(error).__name__}: {error}")
                continue
            with self._changed:
                self._open.discard(number)
                self._answers[revision] += 1
                if rate is not None:
                    self._rates.setdefault(revision, []).append(rate)
                self._changed.notify_all()

    async def _failed(self, number: int, text: str) -> None:
        with self._changed:
            self._open.discard(number)
            self._failures.append(text)
            self._changed.notify_all()
        await asyncio.sleep(0.2)  # a server that refuses is not asked thousands of times a second

    async def _ask(self, client: Any, number: int) -> tuple[str, float | None]:
        """One stream to its end: who answered, and its tokens a second after the first (None for fewer than two).

        Tokens are those of the answer's usage: a chunk may hold several, or none that can be seen.
        """
        raw = await client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            max_tokens=self._max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-session-id": f"session-{number}"},
        )
        revision = raw.headers.get(REVISION_HEADER)
        finish, tokens, first_s, last_s = None, 0, 0.0, 0.0
        async for chunk in raw.parse():
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                if choice.delta.content:
                    last_s = time.monotonic()
                    first_s = first_s or last_s
        if finish is None:
            raise ConsumerError("the stream ended without a finish_reason")
        if revision is None:
            raise ConsumerError(f"the answer has no {REVISION_HEADER} header")
        return revision, (tokens - 1) / (last_s - first_s) if tokens > 1 and last_s > first_s else None
