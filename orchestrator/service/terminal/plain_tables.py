"""The two looks of tables in the terminal: without lines, with or without headings."""

from __future__ import annotations

from rich.table import Table


def make_plain_table(*, is_wide: bool = False) -> Table:
    """Return an empty table with bold headings; a wide one is as wide as the terminal."""
    return Table(box=None, pad_edge=False, header_style="bold", expand=is_wide)


def make_plain_grid() -> Table:
    """Return an empty table without headings."""
    return Table.grid(padding=(0, 2))
