"""The tables of version 0.1.0."""

from __future__ import annotations

from pathlib import Path
from string import Template

from alembic import op

revision = "0001"
down_revision = None

FILE = {
    "number": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
    "serial": "INTEGER NOT NULL PRIMARY KEY",
}
SERVER = dict.fromkeys(FILE, "SERIAL NOT NULL PRIMARY KEY")


def upgrade() -> None:
    """Create all tables. A file needs no lease, since it can be locked."""
    if op.get_bind().dialect.name == "sqlite":
        _run("r0001_journal.sql", FILE)
    else:
        _run("r0001_journal.sql", SERVER)
        _run("r0001_lease.sql", SERVER)


def _run(name: str, types: dict[str, str]) -> None:
    script = Template(Path(__file__).with_name(name).read_text()).substitute(types)
    for statement in script.split(";\n")[:-1]:
        op.execute(statement)
