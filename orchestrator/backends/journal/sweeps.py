"""Sweeps in the journal: which there are, the jobs that are their trials, and what these gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.specs.events import Event, Submitted

_metadata = sa.MetaData()
_sweeps = sa.Table(
    "sweeps",
    _metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text),
    sa.Column("ended", sa.Text),
)
_trials = sa.Table(
    "trials",
    _metadata,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("sweep", sa.Text),
    sa.Column("number", sa.Integer),
    sa.Column("value", sa.Float),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A job that is a trial, and the last value of its metric once it has ended with one."""

    job: str
    number: int
    value: float | None


class Sweeps:
    """Tables of a journal; every method may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: sa.Connection, events: Iterable[Event]) -> None:
        """Keep the submitted trials, and the sweeps that begin with them, in a transaction of the journal."""
        trials = [
            {"job": event.job_id, "sweep": event.array, "number": event.spec.trial.number}
            for event in events
            if isinstance(event, Submitted) and event.spec.trial is not None
        ]
        if trials:
            connection.execute(_trials.insert(), trials)
        if begun := [{"id": trial["sweep"]} for trial in trials if trial["number"] == 0]:
            connection.execute(_sweeps.insert(), begun)

    def open(self) -> list[str]:
        """Ids of the sweeps that have not ended, oldest first."""
        wanted = sa.select(_sweeps.c.id).where(_sweeps.c.ended.is_(None)).order_by(_sweeps.c.number)
        with self._database.transaction() as connection:
            return list(connection.execute(wanted).scalars())

    def newest(self, limit: int) -> list[str]:
        """Ids of at most `limit` sweeps, the newest first."""
        with self._database.transaction() as connection:
            wanted = sa.select(_sweeps.c.id).order_by(_sweeps.c.number.desc()).limit(limit)
            return list(connection.execute(wanted).scalars())

    def ended(self, sweep: str) -> str | None:
        """Why the sweep has ended; "" while it goes on, None where there is no such sweep."""
        with self._database.transaction() as connection:
            row = connection.execute(sa.select(_sweeps.c.ended).where(_sweeps.c.id == sweep)).one_or_none()
        return None if row is None else row.ended or ""

    def trials(self, sweep: str) -> Sequence[TrialRow]:
        """The trials of a sweep by number."""
        wanted = sa.select(_trials).where(_trials.c.sweep == sweep).order_by(_trials.c.number)
        with self._database.transaction() as connection:
            rows = connection.execute(wanted).all()
        return [TrialRow(job=row.job, number=row.number, value=row.value) for row in rows]

    def tell(self, job: str, value: float) -> None:
        """Keep what a trial gave."""
        with self._database.transaction() as connection:
            connection.execute(_trials.update().where(_trials.c.job == job).values(value=value))

    def end(self, sweep: str, why: str) -> None:
        """The sweep has no more trials; the first reason stays."""
        with self._database.transaction() as connection:
            still_open = (_sweeps.c.id == sweep) & _sweeps.c.ended.is_(None)
            connection.execute(_sweeps.update().where(still_open).values(ended=why))
