"""`make bench`: measure what the project promises, print what has a bar, write all of it to `.bench/<name>.json`.

    python -m benchmarks [NAME ...]
    python -m benchmarks published --rows FILE ...

Each module offers `figures()`: what was measured in this run, beside its bar. Exit code 1 where a bar does not hold,
2 where there is no such module.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, say

NAMES = (
    "plan",
    "memory",
    "published",
    "cost",
    "experts",
    "engines",
    "checkpoint",
    "guard",
    "launch",
    "recovery",
    "scheduler",
    "fairness",
    "journal",
    "service",
)
ON_REQUEST = ("sweep", "compare", "short_jobs")  # minutes
FOLDER = Path(".bench")


def main(names: list[str]) -> int:
    if names[:2] == ["published", "--rows"]:
        return importlib.import_module("benchmarks.published").print_rows(names[2:])
    unknown = sorted(set(names) - {*NAMES, *ON_REQUEST})
    if unknown:
        print(
            f"no such benchmark: {', '.join(unknown)}; there are {', '.join(NAMES + ON_REQUEST)}",
            file=sys.stderr,
        )
        return 2
    FOLDER.mkdir(exist_ok=True)
    console = Console()
    missed = 0
    for name in names or NAMES:
        say(f"measuring {name}")
        figures: list[Figure] = importlib.import_module(f"benchmarks.{name}").figures()
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(figures, indent=1))
        console.print(table(name, figures))
        console.print(f"{path}: all {len(figures)} figures, those without a bar as well")
        missed += sum(not figure["holds"] for figure in figures)
    return 1 if missed else 0


def table(name: str, figures: list[Figure]) -> Table:
    """What has a bar."""
    shown = Table(title=name, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("FIGURE", "VALUE", "UNIT", "BAR", "HOLDS"):
        shown.add_column(column, justify="right" if column == "VALUE" else "left")
    for one in figures:
        if one["bar"]:
            holds = "[green]yes[/]" if one["holds"] else "[red]no[/]"
            shown.add_row(one["figure"], f"{one['value']:.4g}", one["unit"], one["bar"], holds)
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
