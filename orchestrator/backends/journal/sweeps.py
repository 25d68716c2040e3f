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
    """A trial's job, and the last value of its metric; None before the job has ended with a
    value.
    """

    job: str
    number: int
    value: float | None


class Sweeps:
    """Tables of sweeps in a journal. Every method is thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: sa.Connection, events: Iterable[Event]) -> None:
        """Store the trials, and the new sweeps, that these events submit, within a transaction of
        the journal.
        """
        trials = [
            {"job": event.job_id, "sweep": event.array, "number": event.spec.trial.number}
            for event in events
            if isinstance(event, Submitted) and event.spec.trial is not None
        ]
        if trials:
            connection.execute(ADD_TRIAL, trials)
        if begun := [trial for trial in trials if trial["number"] == 0]:
            connection.execute(ADD_SWEEP, begun)

    def list_open_sweeps(self) -> list[str]:
        """Return ids of unfinished sweeps, oldest first."""
        rows = self._query_rows("SELECT id FROM sweeps WHERE ended IS NULL ORDER BY number")
        return [row.id for row in rows]

    def list_newest_sweeps(self, sweeps_max: int) -> list[str]:
        """Return ids of at most `sweeps_max` sweeps, newest first."""
        rows = self._query_rows(
            "SELECT id FROM sweeps ORDER BY number DESC LIMIT :most", most=sweeps_max
        )
        return [row.id for row in rows]

    def find_end_reason(self, sweep_id: str) -> str | None:
        """Return the reason why a sweep ended; "" while it runs, None for an unknown sweep."""
        rows = self._query_rows("SELECT ended FROM sweeps WHERE id = :sweep", sweep=sweep_id)
        return rows[0].ended or "" if rows else None

    def list_trials(self, sweep_id: str) -> Sequence[TrialRow]:
        """Return the trials of a sweep, by number."""
        query = "SELECT job, number, value FROM trials WHERE sweep = :sweep ORDER BY number"
        return [TrialRow(**row._asdict()) for row in self._query_rows(query, sweep=sweep_id)]

    def store_metric_value(self, job_id: str, value: float) -> None:
        """Store a trial's metric value."""
        self._execute("UPDATE trials SET value = :value WHERE job = :job", job=job_id, value=value)

    def mark_ended(self, sweep_id: str, reason: str) -> None:
        """Mark the sweep as ended for this reason; a reason that is stored already stays."""
        update = "UPDATE sweeps SET ended = :why WHERE id = :sweep AND ended IS NULL"
        self._execute(update, sweep=sweep_id, why=reason)

    def _query_rows(self, query: str, **values: object) -> Sequence[sa.Row[Any]]:
        with self._database.transaction() as connection:
            return connection.execute(sa.text(query), values).all()

    def _execute(self, statement: str, **values: object) -> None:
        with self._database.transaction() as connection:
            connection.execute(sa.text(statement), values)
