"""Which tables has the journal, and how did they come to be? Alembic revisions, oldest first in `versions/`."""
