"""Where rollouts live: their constants, their events in order, what is stable for each model, and who leads.

Plain tables and plain SQL types through SQLAlchemy Core; the state of a rollout is the replay of its events, and the
`phase` column only finds the unfinished ones. SQLite in WAL mode, so that a reader never waits for the controller.
"""

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from narrowgauge.quant.formats.read import canonical_json, plain
from narrowgauge.serving.rollout.spec import Revision, read_revision, read_spec
from narrowgauge.serving.rollout.state import TERMINAL, Event, Rollout, State, event_from_json, event_to_json, replay

_metadata = sa.MetaData()
_rollouts = sa.Table(
    "rollouts",
    _metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("model", sa.String(255), nullable=False, index=True),
    sa.Column("revision_id", sa.String(64), nullable=False),
    sa.Column("revision", sa.Text, nullable=False),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("stable", sa.Text),
    sa.Column("override", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("phase", sa.String(16), nullable=False),
)
_events = sa.Table(
    "events",
    _metadata,
    sa.Column("rollout_id", sa.String(64), sa.ForeignKey("rollouts.id"), primary_key=True),
    sa.Column("n", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
_models = sa.Table(
    "models",
    _metadata,
    sa.Column("model", sa.String(255), primary_key=True),
    sa.Column("stable", sa.Text, nullable=False),
    sa.Column("rollout_id", sa.String(64), nullable=False),
    sa.Column("updated_at", sa.Float, nullable=False),
)
_leader = sa.Table(
    "leader",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("term", sa.Integer, nullable=False),
    sa.Column("traffic_epoch", sa.Integer, nullable=False),
)


class StoreError(RuntimeError):
    """The store cannot be opened or holds something else than our tables; the message says where."""


class LeadershipLost(RuntimeError):
    """Another controller leads now: this one must stop acting."""


class Store:
    """All of it in one database. Safe for several readers and one leader."""

    def __init__(self, url: str) -> None:
        try:
            self._engine = sa.create_engine(url)
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            raise _unusable(url, error) from None
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
        try:
            _metadata.create_all(self._engine)
        except sa.exc.SQLAlchemyError as error:
            self._engine.dispose()
            raise _unusable(url, error) from None
        self._term = 0

    def close(self) -> None:
        """Gives the connections back."""
        self._engine.dispose()

    def lead(self, *, at_least: int = 0) -> None:
        """Begins a term of leadership: from here on an earlier leader's writes are refused.

        The traffic epoch goes on above `at_least`, the newest epoch that any router has seen.
        """
        with self._engine.begin() as connection:
            row = connection.execute(sa.select(_leader)).first()
            if row is None:
                connection.execute(_leader.insert().values(id=1, term=0, traffic_epoch=0))
            self._term = (row.term if row else 0) + 1
            epoch = max(row.traffic_epoch if row else 0, at_least)
            connection.execute(_leader.update().values(term=self._term, traffic_epoch=epoch))

    def next_traffic_epoch(self) -> int:
        """The next epoch of a traffic state: it only ever grows. Raises LeadershipLost."""
        with self._engine.begin() as connection:
            self._check_term(connection)
            connection.execute(_leader.update().values(traffic_epoch=_leader.c.traffic_epoch + 1))
            return int(connection.execute(sa.select(_leader.c.traffic_epoch)).scalar_one())

    def lift_traffic_epoch(self, at_least: int) -> None:
        """Has the traffic epoch go on above `at_least`. Raises LeadershipLost."""
        with self._engine.begin() as connection:
            self._check_term(connection)
            lower = _leader.c.traffic_epoch < at_least
            connection.execute(_leader.update().where(lower).values(traffic_epoch=at_least))

    def create(self, rollout: Rollout) -> None:
        """Writes a new rollout down. Raises LeadershipLost."""
        with self._engine.begin() as connection:
            self._check_term(connection)
            connection.execute(
                _rollouts.insert().values(
                    id=rollout.id,
                    model=rollout.revision.model,
                    revision_id=rollout.revision.id,
                    revision=canonical_json(rollout.revision),
                    spec=canonical_json(rollout.spec),
                    stable=canonical_json(rollout.stable) if rollout.stable else None,
                    override=rollout.override,
                    created_at=rollout.created_at,
                    phase="Pending",
                )
            )

    def append(self, state: State, events: Sequence[Event]) -> None:
        """Adds events that lead to `state`; on Completed the revision becomes the model's stable one, all in one write.

        Raises LeadershipLost.
        """
        rollout = state.rollout
        with self._engine.begin() as connection:
            self._check_term(connection)
            count = sa.select(sa.func.count()).select_from(_events).where(_events.c.rollout_id == rollout.id)
            first = int(connection.execute(count).scalar_one())
            rows = [
                {"rollout_id": rollout.id, "n": first + i, "at": e.at, "kind": type(e).__name__, "body": _body(e)}
                for i, e in enumerate(events)
            ]
            if rows:
                connection.execute(_events.insert(), rows)
            connection.execute(_rollouts.update().where(_rollouts.c.id == rollout.id).values(phase=state.phase))
            if state.phase == "Completed":
                values = {
                    "stable": canonical_json(rollout.revision),
                    "rollout_id": rollout.id,
                    "updated_at": events[-1].at if events else time.time(),
                }
                changed = connection.execute(
                    _models.update().where(_models.c.model == rollout.revision.model).values(**values)
                )
                if changed.rowcount == 0:
                    connection.execute(_models.insert().values(model=rollout.revision.model, **values))

    def events(self, rollout_id: str) -> tuple[Event, ...]:
        """A rollout's events in order."""
        query = sa.select(_events.c.body).where(_events.c.rollout_id == rollout_id).order_by(_events.c.n)
        with self._engine.connect() as connection:
            return tuple(event_from_json(json.loads(row.body)) for row in connection.execute(query))

    def state(self, rollout_id: str) -> State | None:
        """The replayed state, or None for an id that does not exist."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(_rollouts).where(_rollouts.c.id == rollout_id)).first()
        return None if row is None else replay(_rollout(row), self.events(rollout_id))

    def states(self, *, model: str | None = None, unfinished: bool = False) -> tuple[State, ...]:
        """Rollouts, oldest first; of one model, or only those that are not terminal."""
        query = sa.select(_rollouts).order_by(_rollouts.c.created_at, _rollouts.c.id)
        if model is not None:
            query = query.where(_rollouts.c.model == model)
        if unfinished:
            query = query.where(_rollouts.c.phase.not_in(sorted(TERMINAL)))
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return tuple(replay(_rollout(row), self.events(row.id)) for row in rows)

    def stable(self) -> dict[str, tuple[Revision, str]]:
        """By model: the revision that was promoted last, and the rollout that did it."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(_models)).all()
        return {row.model: (read_revision(json.loads(row.stable)), row.rollout_id) for row in rows}

    def _check_term(self, connection: sa.Connection) -> None:
        term = connection.execute(sa.select(_leader.c.term).with_for_update()).scalar()
        if term != self._term:
            raise LeadershipLost(f"another controller leads (term {term}, ours was {self._term}); this one stops")


def _unusable(url: str, error: Exception) -> StoreError:
    without_password = re.sub(r"//[^@/]*@", "//***@", url)
    reason = str(error).strip().partition("\n")[0]
    return StoreError(f"rollout store {without_password}: {reason}; see NG_STORE_URL")


def _body(event: Event) -> str:
    return json.dumps(plain(event_to_json(event)), separators=(",", ":"))


def _rollout(row: Any) -> Rollout:
    return Rollout(
        id=row.id,
        revision=read_revision(json.loads(row.revision)),
        spec=read_spec(json.loads(row.spec), trusted=True),
        stable=read_revision(json.loads(row.stable)) if row.stable else None,
        override=row.override,
        created_at=row.created_at,
    )


def _prepare_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
