"""A cursor in the outbox for each tracker; MLflow's begins before the rows that it has yet to get."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    trackers = op.create_table(
        "trackers",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("last_row", sa.Integer, nullable=False),  # of the outbox; the tracker has it and all before it
    )
    op.execute(trackers.insert().values(name="mlflow", last_row=0))
