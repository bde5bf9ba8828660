"""The controller: observes, decides, writes down what was decided, acts, and leaves the rest to the next tick.

Everything runs on one event loop in the main thread (replicas must be spawned there), so nothing here blocks: probes,
golden scores and the registry work in tasks of their own. Every act is safe to repeat, since a controller that is
killed between writing and acting does it again after its restart.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from narrowgauge.quant.formats.read import canonical_json
from narrowgauge.serving.metrics import RolloutMetrics
from narrowgauge.serving.rollout.connection import Unreachable
from narrowgauge.serving.rollout.decide import Intent, Observation, allowed_actions, decide
from narrowgauge.serving.rollout.gates.base import Probe
from narrowgauge.serving.rollout.observe import Judge, RecordReader
from narrowgauge.serving.rollout.platforms.base import Ended, Platform
from narrowgauge.serving.rollout.probes import ReplicaProber
from narrowgauge.serving.rollout.reconcile import Fleet, RouterWriter
from narrowgauge.serving.rollout.registration import Registrar
from narrowgauge.serving.rollout.spec import Revision, RolloutSpec
from narrowgauge.serving.rollout.state import (
    Action,
    Asked,
    Event,
    Registered,
    Rollout,
    State,
    TrafficSet,
    apply,
    begin,
)
from narrowgauge.serving.rollout.store import Store
from narrowgauge.serving.rollout.telling import Telling
from narrowgauge.serving.rollout.traffic.base import TrafficRouter

_REGISTRY_RETRY_S = 2.0
_DRAIN_S = 60.0

_log = logging.getLogger(__name__)


class Refused(ValueError):
    """A request that conflicts with what is going on; the message names both. `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Started:
    """The answer to a start: the rollout, whether it is new, and what to tell about it."""

    state: State
    created: bool
    note: str | None = None


@dataclass(kw_only=True)
class _Recording:
    task: asyncio.Task[str]
    retry_at: float = 0.0


class Controller:
    """One leader over one store. `clock` gives Unix seconds."""

    def __init__(
        self,
        *,
        store: Store,
        platform: Platform,
        router: TrafficRouter,
        prober: ReplicaProber,
        records: RecordReader,
        registrar: Registrar,
        metrics: RolloutMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.platform = platform
        self.prober = prober
        self._router = RouterWriter(router, store)
        self._fleet = Fleet(platform, clock)
        self._records = records
        self._judge = Judge(records)
        self._registrar = registrar
        self._telling = Telling(metrics, clock)
        self._clock = clock
        self._active: dict[str, State] = {}
        self._stable: dict[str, tuple[Revision, str]] = {}
        self._recordings: dict[str, _Recording] = {}
        self._ended: list[Ended] = []
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Takes the lead, replays what is unfinished and adopts the replicas that run. Before the first tick."""
        try:
            newest = await self._router.newest_epoch()
        except Unreachable as error:
            _log.warning("starting without the router: %s", error)
            newest = 0
        self.store.lead(at_least=newest)
        self._active = {state.rollout.id: state for state in self.store.states(unfinished=True)}
        self._stable = self.store.stable()
        self._ended = list(self.platform.adopt())

    async def close(self) -> None:
        """Stops observing. Replicas go on."""
        await self.prober.close()
        await self._judge.close()
        await asyncio.gather(*(known.task for known in self._recordings.values()), return_exceptions=True)
        await self._router.close()
        await self._records.close()

    async def settle(self) -> None:
        """Waits for what works in the background (`--once`)."""
        await self.prober.settle()
        await self._judge.settle()
        await asyncio.gather(*(known.task for known in self._recordings.values()), return_exceptions=True)

    async def tick(self) -> None:
        """One pass over every model. Raises LeadershipLost."""
        began = time.perf_counter()
        self._fleet.note(ended := [*self._ended, *self.platform.poll(), *self._expel_impostors()])
        self._ended = []
        self.prober.follow()
        await self._refresh_records()
        for state in list(self._active.values()):
            await self._advance(state, ended)
        for model, (revision, _) in self._stable.items():
            if not any(state.rollout.revision.model == model for state in self._active.values()):
                await self._keep_serving(model, revision)
        await self._stop_strangers()
        self._telling.ticked(time.perf_counter() - began)

    async def start(self, *, model: str, revision: Revision, spec: RolloutSpec, override: str | None) -> Started:
        """Starts a rollout, or finds the one that the same request started. Raises Refused, VersionRejected."""
        if not model == revision.model == spec.model:
            names = f"the request names {model}, its revision {revision.model}, its spec {spec.model}"
            raise Refused(f"one model at a time: {names}", status=400)
        if (revision.engine, dict(revision.engine_args)) != (spec.engine, dict(spec.engine_args)):
            raise Refused("the revision's engine and engine_args differ from the spec's", status=400)
        async with self._starting:  # two askers of the same rollout must find one
            if (found := self._find(revision, spec)) is not None:
                return found
            await asyncio.to_thread(self._registrar.admit, revision, override)
            stable = self._stable.get(model)
            rollout = Rollout(
                id=secrets.token_hex(5),
                revision=revision,
                spec=spec,
                stable=stable[0] if stable else None,
                override=override,
                created_at=self._clock(),
            )
            self.store.create(rollout)
            state = self._active[rollout.id] = begin(rollout)
            return Started(state=state, created=True)

    def ask(self, rollout_id: str, action: Action, epoch: int) -> State:
        """Takes an operator's wish; it is acted upon by the next tick. Raises Refused, also for a stale epoch."""
        state = self.state(rollout_id)
        if state is None:
            raise Refused(f"no rollout {rollout_id}", status=404)
        if epoch != state.epoch:
            raise Refused(
                f"rollout {rollout_id} is at epoch {state.epoch} ({state.phase}), the request was made at {epoch}; "
                "look at it again"
            )
        if action not in (allowed := allowed_actions(state)):
            possible = f"possible now: {', '.join(allowed)}" if allowed else "nothing can be asked of it any more"
            raise Refused(f"rollout {rollout_id} is {state.phase}: cannot {action}; {possible}")
        event = Asked(at=self._clock(), action=action)
        return self._write(apply(state, event), event)

    def state(self, rollout_id: str) -> State | None:
        """A rollout by id, also a finished one."""
        return self._active.get(rollout_id) or self.store.state(rollout_id)

    def models(self) -> dict[str, tuple[Revision | None, str | None, str | None]]:
        """By served name: the stable revision, the rollout that promoted it, and the one in progress."""
        served: dict[str, tuple[Revision | None, str | None, str | None]] = {
            model: (revision, rollout_id, None) for model, (revision, rollout_id) in self._stable.items()
        }
        for state in self._active.values():
            model = state.rollout.revision.model
            revision, by, _ = served.get(model, (None, None, None))
            served[model] = (revision, by, state.rollout.id)
        return served

    def _find(self, revision: Revision, spec: RolloutSpec) -> Started | None:
        for state in self._active.values():
            other = state.rollout
            if other.revision.model != revision.model:
                continue
            if other.new_id != revision.id:
                raise Refused(
                    f"rollout {other.id} of revision {other.new_id} is {state.phase}; wait for its end or abort it "
                    f"before revision {revision.id} is rolled out"
                )
            if canonical_json(other.spec) != canonical_json(spec):
                raise Refused(
                    f"revision {revision.id} is being rolled out by {other.id} with another spec (for instance "
                    f"{_difference(other.spec, spec)}); use that one or abort it"
                )
            return Started(state=state, created=False, note=f"rollout {other.id} is {state.phase} already")
        stable = self._stable.get(revision.model)
        if stable is not None and stable[0].id == revision.id:
            state_then = self.store.state(stable[1])
            assert state_then is not None, "the rollout that promoted a revision is in the store"
            return Started(
                state=state_then,
                created=False,
                note=f"revision {revision.id} is stable for {revision.model} already; nothing was started",
            )
        return None

    async def _advance(self, state: State, ended: list[Ended]) -> None:
        """One rollout: observe, decide, write, act."""
        rollout = state.rollout
        now = self._clock()
        health = self.prober.health(rollout.new_id)
        self._judge.collect(state, self._probe(state), now)
        seen = await self._router.read(rollout.revision.model)
        observation = Observation(
            canary=health,
            stable=self.prober.health(rollout.old_id) if rollout.old_id else Observation().stable,
            traffic=(seen.stable, seen.canary, seen.canary_bp, seen.shadow_bp) if seen else None,
            canary_requests=self._judge.canary_requests(state),
            verdicts=self._judge.verdicts(state, health),
            lost=_lost(rollout, ended),
        )
        # While the router was asked, an operator may have asked for something: decide on the newest state.
        decision = decide(before := self._active[rollout.id], observation, now)
        self._write(decision.state, *decision.events)
        self._telling.decided(before, decision)
        await self._act(decision.state, decision.intent)
        if decision.state.terminal:
            del self._active[rollout.id]
            self._judge.forget(rollout.id)
            self._recordings.pop(rollout.id, None)
            self._stable = self.store.stable()

    async def _act(self, state: State, intent: Intent) -> None:
        rollout = state.rollout
        model = rollout.revision.model
        revisions = [revision for revision in (rollout.stable, rollout.revision) if revision is not None]
        for revision in revisions:
            if revision.id in intent.run:
                self._fleet.ensure(revision)
        if intent.traffic is not None:
            wanted = intent.run | intent.keep
            await self._router.reconcile(model, intent.traffic, replicas=self.platform.replicas(), revisions=wanted)
        listed = self._router.listed(model) if intent.run | intent.keep else frozenset()
        for revision in revisions:
            if revision.id not in intent.run | intent.keep and listed is not None:
                self._fleet.retire(revision.id, listed, grace_s=rollout.spec.drain_s)
        if intent.registry is not None:
            self._record(rollout, intent.registry)

    async def _keep_serving(self, model: str, revision: Revision) -> None:
        """Between rollouts: the stable revision runs, and the router knows where."""
        self._fleet.ensure(revision)
        await self._router.read(model)
        traffic = TrafficSet(at=self._clock(), stable=revision.id, canary=None, canary_bp=0, shadow_bp=0)
        await self._router.reconcile(
            model, traffic, replicas=self.platform.replicas(), revisions=frozenset({revision.id})
        )

    async def _stop_strangers(self) -> None:
        """Unless the router still sends users there: a store that was lost must not take down what serves."""
        strangers = self._fleet.strangers(self._wanted_ids())
        for model in {replica.model for replica in strangers}:
            await self._router.read(model)
        for replica in strangers:
            listed = self._router.listed(replica.model)
            if listed is not None and replica.url not in listed:
                self._fleet.stop_stranger(replica)

    def _write(self, state: State, *events: Event) -> State:
        """First the store, then our memory: what is acted upon has been written down."""
        if events:
            self.store.append(state, events)
        self._active[state.rollout.id] = state
        return state

    def _record(self, rollout: Rollout, outcome: str) -> None:
        """Has the registry told in a thread; the event follows when it has been."""
        now = self._clock()
        known = self._recordings.get(rollout.id)
        if known is None or (known.retry_at and now >= known.retry_at):
            work: Awaitable[str] = asyncio.to_thread(self._registrar.record, rollout, outcome)
            self._recordings[rollout.id] = _Recording(task=asyncio.ensure_future(work))
            return
        if known.retry_at or not known.task.done():
            return
        error = known.task.exception()
        if error is not None:
            # Whatever it was (a lock, a server that is down), traffic is where it should be: try on until the deadline.
            _log.warning("rollout %s: the registry was not told: %s", rollout.id, error)
            known.retry_at = now + _REGISTRY_RETRY_S
            return
        event = Registered(at=now, detail=known.task.result())
        self._write(apply(self._active[rollout.id], event), event)

    def _probe(self, state: State) -> Probe | None:
        """Who can be asked for golden scores now: both revisions have a ready replica and share a step."""
        if state.current_step is None or state.rollout.old_id is None:
            return None
        urls = {}
        for revision in (state.rollout.new_id, state.rollout.old_id):
            ready = [r.url for r in self.platform.replicas() if r.revision == revision and self.prober.ready(r)]
            if not ready:
                return None
            urls[revision] = ready[0]
        model, old = state.rollout.revision.model, state.rollout.old_id
        return Probe(model=model, canary_url=urls[state.rollout.new_id], stable_url=urls[old])

    def _expel_impostors(self) -> list[Ended]:
        expelled = []
        for replica, says in self.prober.impostors():
            _log.error("replica %s is stopped: it should serve revision %s but %s", replica.id, replica.revision, says)
            self.platform.stop(replica.id, grace_s=_DRAIN_S)
            expelled.append(Ended(replica=replica, expected=False, reason=says))
        return expelled

    async def _refresh_records(self) -> None:
        windows = [state.window_at or state.rollout.created_at for state in self._active.values()]
        await self._records.refresh()
        self._records.forget_before(min(windows, default=None))

    def _wanted_ids(self) -> frozenset[str]:
        """Every revision that some rollout or model still has a say in."""
        revisions = [revision.id for revision, _ in self._stable.values()]
        for state in self._active.values():
            revisions += filter(None, (state.rollout.new_id, state.rollout.old_id))
        return frozenset(revisions)


def _lost(rollout: Rollout, ended: list[Ended]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (end.replica.id, end.reason)
        for end in ended
        if not end.expected and end.replica.revision == rollout.new_id and end.replica.model == rollout.revision.model
    )


def _difference(one: RolloutSpec, other: RolloutSpec) -> str:
    """The first key in which two specs differ."""
    return next(name for name in RolloutSpec.__dataclass_fields__ if getattr(one, name) != getattr(other, name))
