"""Submissions in the journal by idempotency key, so that a repeated one is recognised."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.tables import make_table
from orchestrator.backends.ports import Submission
from orchestrator.specs.events import Event, RequestKey, Submitted

KEPT_S = 86_400.0  # as Stripe keeps its keys (docs.stripe.com/api/idempotent_requests)

_submissions = make_table(
    "submissions",
    key=sa.Text,
    digest=sa.Text,
    jobs=sa.Text,  # their ids, as JSON
    at_s=sa.Float,
)


class Submissions:
    """Table of recent submissions in a journal, by idempotency key. Every method is thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: sa.Connection, events: Iterable[Event]) -> None:
        """Store those of these events that are submissions with a key, within a transaction; drop
        older ones.
        """
        ids: dict[RequestKey, list[str]] = {}
        at_s = 0.0
        for event in events:
            if isinstance(event, Submitted) and event.request is not None:
                ids.setdefault(event.request, []).append(event.job_id)
                at_s = event.at_s
        if not ids:
            return
        connection.execute(_submissions.delete().where(_submissions.c.at_s < at_s - KEPT_S))
        rows = [
            {"key": key.name, "digest": key.digest, "jobs": json.dumps(jobs), "at_s": at_s}
            for key, jobs in ids.items()
        ]
        connection.execute(_submissions.insert(), rows)

    def find_submissions(self, idempotency_keys: Sequence[str]) -> Mapping[str, Submission]:
        """Return {idempotency key: submission} for those of these keys that were used in the last
        KEPT_S seconds.
        """
        wanted = sa.select(_submissions).where(_submissions.c.key.in_(idempotency_keys))
        with self._database.transaction() as connection:
            rows = connection.execute(wanted).all()
        return {
            row.key: Submission(digest=row.digest, ids=tuple(json.loads(row.jobs))) for row in rows
        }
