"""Sweeps (hyperparameter searches) in the journal: their trials, and the metric value of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.specs.events import Event, Submitted
from orchestrator.specs.frozen import frozen

ADD_TRIAL = sa.text("INSERT INTO trials (job, sweep, number) VALUES (:job, :sweep, :number)")
ADD_SWEEP = sa.text("INSERT INTO sweeps (id) VALUES (:sweep)")


@frozen
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
            connection.execute(ADD_TRIAL, trials)
        if begun := [trial for trial in trials if trial["number"] == 0]:
            connection.execute(ADD_SWEEP, begun)

    def open(self) -> list[str]:
        """Return ids of unfinished sweeps, oldest first."""
        rows = self._rows("SELECT id FROM sweeps WHERE ended IS NULL ORDER BY number")
        return [row.id for row in rows]

    def newest(self, limit: int) -> list[str]:
        """Return ids of at most `limit` sweeps, newest first."""
        rows = self._rows("SELECT id FROM sweeps ORDER BY number DESC LIMIT :most", most=limit)
        return [row.id for row in rows]

    def ended(self, sweep: str) -> str | None:
        """Return why the sweep has ended; "" while it runs, None for an unknown sweep."""
        rows = self._rows("SELECT ended FROM sweeps WHERE id = :sweep", sweep=sweep)
        return rows[0].ended or "" if rows else None

    def trials(self, sweep: str) -> Sequence[TrialRow]:
        """Return the trials of a sweep, by number."""
        query = "SELECT job, number, value FROM trials WHERE sweep = :sweep ORDER BY number"
        return [TrialRow(**row._asdict()) for row in self._rows(query, sweep=sweep)]

    def tell(self, job: str, value: float) -> None:
        """Store a trial's metric value."""
        self._change("UPDATE trials SET value = :value WHERE job = :job", job=job, value=value)

    def end(self, sweep: str, why: str) -> None:
        """Mark the sweep as ended; the first reason stays."""
        update = "UPDATE sweeps SET ended = :why WHERE id = :sweep AND ended IS NULL"
        self._change(update, sweep=sweep, why=why)

    def _rows(self, query: str, **values: object) -> Sequence[sa.Row[Any]]:
        with self._database.transaction() as connection:
            return connection.execute(sa.text(query), values).all()

    def _change(self, statement: str, **values: object) -> None:
        with self._database.transaction() as connection:
            connection.execute(sa.text(statement), values)
