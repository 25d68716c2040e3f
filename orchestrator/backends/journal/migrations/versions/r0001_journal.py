"""The tables of version 0.1.0."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables. The module that uses a table documents its columns."""
    _add_numbered("events", sa.Column("decided", sa.Text))
    op.create_table(
        "snapshots",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        _text("body"),
    )
    op.create_table("live", _text("id", primary_key=True), _text("body"))
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        _text("id", unique=True),
        _text("status"),
        _number("submitted_at"),
        _number("ended_at"),
        _text("body"),
        sqlite_autoincrement=True,
    )
    for name in ("outbox", "notices"):
        _add_numbered(name, sa.Column("ran", sa.Boolean, nullable=False))
        op.create_index(f"{name}_in_order", name, ["ran", "id"])
    trackers, _ = (
        op.create_table(
            name, _text("name", primary_key=True), sa.Column("last_row", sa.Integer, nullable=False)
        )
        for name in ("trackers", "targets")
    )
    op.execute(
        trackers.insert().values(name="mlflow", last_row=0)
    )  # the tracker of a cluster file that names none
    op.create_table("told", _text("id", primary_key=True), _text("kind"), _number("at_s"))
    op.create_table("users", _text("name", primary_key=True), _text("role"), _number("created_at"))
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("user", sa.Text, sa.ForeignKey("users.name", ondelete="CASCADE"), nullable=False),
        _text("digest", unique=True),
        _text("shown"),
        _number("created_at"),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
        sa.Column("used_at", sa.Float),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        _number("at"),
        _text("user"),
        _text("role"),
        _text("request_id"),
        _text("action"),
        sa.Column("status", sa.Integer, nullable=False),
    )
    op.create_table(
        "sweeps",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        _text("id", unique=True),
        sa.Column("ended", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "trials",
        _text("job", primary_key=True),
        _text("sweep", index=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("value", sa.Float),
    )
    op.create_table(
        "submissions",
        _text("key", primary_key=True),
        _text("digest"),
        _text("jobs"),
        sa.Column("at_s", sa.Float, nullable=False, index=True),
    )
    op.create_table(
        "set_aside",
        _text("table", primary_key=True),
        _text("row", primary_key=True),
        _text("body"),
        _text("reason"),
        _number("at"),
    )
    if op.get_bind().dialect.name != "sqlite":  # where no file can be locked
        lease = op.create_table(
            "lease",
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("fence", sa.BigInteger, nullable=False),
            _text("holder"),
            sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        )
        op.execute(
            lease.insert().values(
                id=1, fence=0, holder="nobody", expires_at=sa.func.clock_timestamp()
            )
        )


def _add_numbered(name: str, *columns: sa.Column[Any]) -> None:
    """Make a table of bodies whose numbers are never given again, also those of rows that were deleted."""
    number = sa.Column("id", sa.Integer, primary_key=True, autoincrement=True)
    op.create_table(name, number, _text("body"), *columns, sqlite_autoincrement=True)


def _text(
    name: str, *, primary_key: bool = False, unique: bool = False, index: bool = False
) -> sa.Column[str]:
    return sa.Column(
        name, sa.Text, nullable=False, primary_key=primary_key, unique=unique, index=index
    )


def _number(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Float, nullable=False)
