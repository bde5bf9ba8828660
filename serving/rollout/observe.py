"""Gathers evidence: the gateway's request records by window, and what gates collect themselves, in the background."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.serving.rollout.connection import Connection, Unreachable
from narrowgauge.serving.rollout.decide import RevisionHealth
from narrowgauge.serving.rollout.gates.base import (
    CollectError,
    CollectingGate,
    Evidence,
    Probe,
    RequestRecord,
    Verdict,
)
from narrowgauge.serving.rollout.state import State

_PAGE = 1_000
_RETRY_S = 2.0

_log = logging.getLogger(__name__)


class RecordReader:
    """The gateway's records, kept from the oldest window that is open now."""

    def __init__(self, gateway: Connection) -> None:
        self._gateway = gateway
        self._after = 0
        self._records: list[RequestRecord] = []

    async def refresh(self) -> None:
        """Fetches what is new. A gateway that does not answer leaves things as they are: too few samples judge nothing."""
        while True:
            try:
                page = await self._gateway.json(f"/admin/v1/records?after={self._after}&limit={_PAGE}")
                told, self._after = list(page["records"]), int(page["next"])
            except Unreachable as error:
                _log.debug("no records: %s", error)
                return
            except (KeyError, TypeError, ValueError) as error:
                _log.error("the gateway's records cannot be read (%s: %s); gates get none", type(error).__name__, error)
                return
            for record in told:
                self._take(record)
            if len(told) < _PAGE:
                return

    def _take(self, record: Any) -> None:
        """Keeps one record; one that cannot be read (a gateway of another release) must not hide those after it."""
        try:
            self._records.append(RequestRecord.from_json(record))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            _log.error("a record of the gateway cannot be read and is left out: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        """Gives the connection back."""
        await self._gateway.close()

    def forget_before(self, t_end: float | None) -> None:
        """Drops records that ended before `t_end` (all of them for None)."""
        self._records = [] if t_end is None else [record for record in self._records if record.t_end >= t_end]

    def of(
        self, revision: str, *, since: float, until: float | None = None, shadow: bool = False
    ) -> Sequence[RequestRecord]:
        """One revision's records that ended in [since, until), users' or shadow copies."""
        return [
            record
            for record in self._records
            if record.revision == revision
            and record.shadow == shadow
            and record.t_end >= since
            and (until is None or record.t_end < until)
        ]


@dataclass(kw_only=True)
class _Collection:
    task: asyncio.Task[Any]
    value: Any = None
    error: str | None = None
    retry_at: float = 0.0


@dataclass(kw_only=True)
class _Judged:
    key: tuple[object, ...]
    verdict: Verdict


class Judge:
    """Puts evidence together and has each gate judge it; the same evidence is not judged twice."""

    def __init__(self, records: RecordReader) -> None:
        self._records = records
        self._collections: dict[tuple[str, int, int], _Collection] = {}
        self._cache: dict[tuple[str, int, int], _Judged] = {}

    def canary_requests(self, state: State) -> int:
        """The canary's finished requests in the step's window: what `until.requests` counts."""
        return sum(record.counts for record in self._canary(state))

    def verdicts(self, state: State, health: RevisionHealth) -> tuple[Verdict, ...]:
        """One verdict a gate of `state.gates`, in that order."""
        canary, stable, baking = self._canary(state), self._stable(state), self._baking(state)
        verdicts = []
        for index, gate in enumerate(state.gates):
            key = (state.rollout.id, state.step, index)
            collection = self._collections.get(key)
            evidence = Evidence(
                ready_replicas=health.ready,
                restarts=len(state.lost),
                last_loss=state.last_loss,
                canary=tuple(canary),
                stable=tuple(stable),
                baking=tuple(baking),
                collected=collection.value if collection else None,
                collect_error=collection.error if collection else None,
            )
            # Records only ever come in at the end of a window, so that their counts say whether anything is new.
            news = (health.ready, len(state.lost), len(canary), len(stable), len(baking))
            seen = (*news, id(evidence.collected), evidence.collect_error)
            cached = self._cache.get(key)
            if cached is None or cached.key != seen:
                cached = self._cache[key] = _Judged(key=seen, verdict=gate.judge(evidence))
            verdicts.append(cached.verdict)
        return tuple(verdicts)

    def collect(self, state: State, probe: Probe | None, now: float) -> None:
        """Starts what gates collect, once a step; a failed attempt is repeated after a while. Returns at once."""
        for index, gate in enumerate(state.gates):
            if not isinstance(gate, CollectingGate):
                continue
            key = (state.rollout.id, state.step, index)
            known = self._collections.get(key)
            if known is not None:
                _settle(known, now)
                if known.error is None or now < known.retry_at or not known.task.done():
                    continue
            if probe is not None:
                error = known.error if known else None
                self._collections[key] = _Collection(task=asyncio.create_task(gate.collect(probe)), error=error)

    async def settle(self) -> None:
        """Waits for what is being collected (`--once`)."""
        await asyncio.gather(*(known.task for known in self._collections.values()), return_exceptions=True)

    def forget(self, rollout_id: str) -> None:
        """Drops what a finished rollout collected."""
        for key in [key for key in self._collections if key[0] == rollout_id]:
            self._collections.pop(key).task.cancel()
        for key in [key for key in self._cache if key[0] == rollout_id]:
            del self._cache[key]

    async def close(self) -> None:
        """Stops collecting."""
        for known in self._collections.values():
            known.task.cancel()
        await self.settle()

    def _canary(self, state: State) -> Sequence[RequestRecord]:
        if state.window_at is None or state.step < 0:
            return ()
        shadow = state.rollout.spec.steps[state.step].shadow is not None
        new = state.rollout.new_id
        return self._records.of(new, since=state.window_at, until=state.promoted_at, shadow=shadow)

    def _stable(self, state: State) -> Sequence[RequestRecord]:
        if state.window_at is None or state.rollout.old_id is None:
            return ()
        return self._records.of(state.rollout.old_id, since=state.window_at, until=state.promoted_at)

    def _baking(self, state: State) -> Sequence[RequestRecord]:
        if state.promoted_at is None:
            return ()
        return self._records.of(state.rollout.new_id, since=state.promoted_at)


def _settle(collection: _Collection, now: float) -> None:
    """Takes the result of a finished task; an error that is no CollectError is a bug and is raised."""
    if not collection.task.done() or collection.value is not None or collection.retry_at:
        return
    try:
        collection.value = collection.task.result()
        collection.error = None
    except CollectError as error:
        collection.error = str(error)
        collection.retry_at = now + _RETRY_S
