"""Sweeps (hyperparameter searches) in the journal: their trials, and the metric value of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.tables import table
from orchestrator.specs.events import Event, Submitted

_sweeps = table("sweeps", number=sa.Integer, id=sa.Text, ended=sa.Text)
_trials = table("trials", job=sa.Text, sweep=sa.Text, number=sa.Integer, value=sa.Float)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """The job of a trial, and the last value of its metric; None before it ended with one."""

    job: str
    number: int
    value: float | None


class Sweeps:
    """Tables of sweeps in a journal. Every method is thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: sa.Connection, events: Iterable[Event]) -> None:
        """Store submitted trials, and new sweeps, within a transaction of the journal."""
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
        """Return ids of unfinished sweeps, oldest first."""
        wanted = sa.select(_sweeps.c.id).where(_sweeps.c.ended.is_(None)).order_by(_sweeps.c.number)
        with self._database.transaction() as connection:
            return list(connection.execute(wanted).scalars())

    def newest(self, limit: int) -> list[str]:
        """Return ids of at most `limit` sweeps, newest first."""
        with self._database.transaction() as connection:
            wanted = sa.select(_sweeps.c.id).order_by(_sweeps.c.number.desc()).limit(limit)
            return list(connection.execute(wanted).scalars())

    def ended(self, sweep: str) -> str | None:
        """Return why the sweep has ended; "" while it runs, None for an unknown sweep."""
        with self._database.transaction() as connection:
            row = connection.execute(
                sa.select(_sweeps.c.ended).where(_sweeps.c.id == sweep)
            ).one_or_none()
        return None if row is None else row.ended or ""

    def trials(self, sweep: str) -> Sequence[TrialRow]:
        """Return the trials of a sweep, by number."""
        wanted = sa.select(_trials).where(_trials.c.sweep == sweep).order_by(_trials.c.number)
        with self._database.transaction() as connection:
            rows = connection.execute(wanted).all()
        return [TrialRow(job=row.job, number=row.number, value=row.value) for row in rows]

    def tell(self, job: str, value: float) -> None:
        """Store a trial's metric value."""
        with self._database.transaction() as connection:
            connection.execute(_trials.update().where(_trials.c.job == job).values(value=value))

    def end(self, sweep: str, why: str) -> None:
        """Mark the sweep as ended; the first reason stays."""
        with self._database.transaction() as connection:
            still_open = (_sweeps.c.id == sweep) & _sweeps.c.ended.is_(None)
            connection.execute(_sweeps.update().where(still_open).values(ended=why))
