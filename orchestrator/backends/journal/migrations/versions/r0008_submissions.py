"""Submissions by their keys, so that one that is sent again makes no second job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "submissions",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("jobs", sa.Text, nullable=False),
        sa.Column("at_s", sa.Float, nullable=False, index=True),
    )
