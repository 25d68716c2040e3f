"""Events, snapshots of the state after them, and the outbox of the tracker."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    for name in ("events", "snapshots", "outbox"):
        op.create_table(
            name,
            # AUTOINCREMENT: the number of a deleted outbox row is never given again
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=name != "snapshots"),
            sa.Column("body", sa.Text, nullable=False),
            sqlite_autoincrement=name != "snapshots",
        )


def downgrade() -> None:
    for name in ("events", "snapshots", "outbox"):
        op.drop_table(name)
