"""Notices for people: those that targets have yet to get, a cursor for each target, and what was told already."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "notices",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("body", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "targets",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("last_row", sa.Integer, nullable=False),
    )
    op.create_table(
        "told",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("at_s", sa.Float, nullable=False),
    )
