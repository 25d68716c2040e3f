"""Ended jobs leave the state for a table of their own, and the live ones of the snapshot stand in rows, too."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

ENDED = ("succeeded", "failed", "refused", "cancelled")
PAGE = 500


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),  # in the order of their ends
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table("live", sa.Column("id", sa.Text, primary_key=True), sa.Column("body", sa.Text, nullable=False))
    op.add_column("events", sa.Column("decided", sa.Text))
    connection = op.get_bind()
    _number_submissions(connection)
    _cut_snapshots(connection)


def _number_submissions(connection: sa.Connection) -> None:
    """Each Submitted says its order, which used to be the number of jobs known before it, plus one."""
    order, last = 0, 0
    page = sa.text(f"SELECT id, body FROM events WHERE id > :last ORDER BY id LIMIT {PAGE}")
    while rows := connection.execute(page, {"last": last}).all():
        last = rows[-1].id
        numbered = []
        for row in rows:
            event = json.loads(row.body)
            if event["type"] == "submitted":
                order += 1
                numbered.append({"row": row.id, "body": json.dumps(event | {"order": order})})
        if numbered:
            connection.execute(sa.text("UPDATE events SET body = :body WHERE id = :row"), numbered)


def _cut_snapshots(connection: sa.Connection) -> None:
    """The newest snapshot without its jobs, which go where they belong now; older ones were of no use."""
    newest = connection.execute(sa.text("SELECT id, body FROM snapshots ORDER BY id DESC LIMIT 1")).one_or_none()
    if newest is None:
        return
    state = json.loads(newest.body)
    jobs = sorted(state.pop("jobs").values(), key=lambda job: job["order"])
    ended: list[dict[str, Any]] = []
    live: list[dict[str, Any]] = []
    for job in jobs:
        gone = job["status"] in ENDED and all(attempt["released"] for attempt in job["attempts"])
        (ended if gone else live).append(job)
    if ended:
        columns = "id, status, submitted_at, ended_at, body"
        insert = f"INSERT INTO jobs ({columns}) VALUES (:id, :status, :submitted_at, :ended_at, :body)"
        connection.execute(sa.text(insert), [_row(job) for job in ended])
    if live:
        insert = "INSERT INTO live (id, body) VALUES (:id, :body)"
        connection.execute(sa.text(insert), [{"id": job["id"], "body": json.dumps(job)} for job in live])
    connection.execute(sa.text("DELETE FROM snapshots WHERE id < :newest"), {"newest": newest.id})
    connection.execute(
        sa.text("UPDATE snapshots SET body = :body WHERE id = :row"),
        {"row": newest.id, "body": json.dumps(state | {"submitted": len(jobs)})},
    )


def _row(job: dict[str, Any]) -> dict[str, Any]:
    ends = [attempt["ended_at_s"] for attempt in job["attempts"]]
    return {
        "id": job["id"],
        "status": job["status"],
        "submitted_at": job["submitted_at_s"],
        "ended_at": ends[-1] if ends else job["submitted_at_s"],  # one that never ran: when it was asked for
        "body": json.dumps(job),
    }
