"""Sweeps, why each has ended, and their trials with the values that judge them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "sweeps",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("ended", sa.Text, nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "trials",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("sweep", sa.Text, nullable=False, index=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("value", sa.Float, nullable=True),
    )
