"""Tables of the journal as queries name them; `migrations/versions` has their keys and constraints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

Kind = type[TypeEngine[Any]] | TypeEngine[Any]


def make_table(name: str, /, **columns: Kind) -> sa.Table:
    """Return SQLAlchemy's table with these columns, for queries; the first column is the key."""

    def make_columns() -> Iterator[sa.Column[Any]]:
        for number, (column, kind) in enumerate(columns.items()):
            yield sa.Column(column, kind, primary_key=number == 0)

    return sa.Table(name, sa.MetaData(), *make_columns())
