"""Alembic revisions of the journal's tables, oldest first in `versions/`."""
