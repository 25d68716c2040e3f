"""`python -m tests.seeds [NAME ...]`: runs the five projects and prints one table; figures go to .bench/seeds.json.

A name is a project (`parler`) or a place (`virtual`, `fake card`); all of them have to fit a run.
The exit code is 1 where a run failed or ended otherwise than its case says, and 2 for an unknown
name. What was skipped is no failure.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from tests.seeds.checkouts import Missing, commit
from tests.seeds.runs import CASES, Case, Row, name_of, run

FIGURES = Path(".bench/seeds.json")
HEAD = (
    "project",
    "where, devices",
    "attempts",
    "resumed at",
    "ended",
    "in MLflow",
    "seconds, of processors",
)


def main(names: list[str]) -> int:
    """Print a row as soon as its run has ended; return the exit code."""
    allowed = {name for project, case in CASES for name in (name_of(project), case.where)}
    if unknown := set(names) - allowed:
        print(f"no run has the name {', '.join(sorted(unknown))}; there are {sorted(allowed)}")
        return 2
    rows = list[Row]()
    has_failed = False
    print(f"{datetime.now(UTC):%Y-%m-%d}, Python {sys.version.split()[0]}\n")
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for project, case in CASES:
        if not set(names) <= {name_of(project), case.where}:
            continue
        with tempfile.TemporaryDirectory(prefix="seed-") as folder:
            try:
                row = run(project, case, Path(folder))
            except Missing as missing:
                print(_without_row(project, case, "skipped", str(missing)), flush=True)
                continue
            except (
                Exception
            ) as error:  # an environment, an overrun or our own: the others still run
                has_failed = True
                print(_without_row(project, case, "failed", str(error) or repr(error)), flush=True)
                continue
        has_failed = has_failed or bool(row.wrong)
        rows.append(row)
        print(_line(row), flush=True)
        FIGURES.parent.mkdir(exist_ok=True)
        FIGURES.write_text(json.dumps([dataclasses.asdict(entry) for entry in rows], indent=1))
    return int(has_failed)


def _without_row(project: ModuleType, case: Case, outcome: str, reason: str) -> str:
    """The row of a run without an end: its reason's first line, and the last, where a log's end follows."""
    first, *_, last = [*reason.strip().splitlines(), ""]
    text = f"{outcome}: {first}" + f" {last.strip()}" * bool(last.strip())
    return f"| {project.CHECKOUT} {commit(project)} | {case.place} | {_cell(text)} |"


def _line(row: Row) -> str:
    attempts = "; ".join(f"{number}: {text}" for number, text in enumerate(row.attempts, start=1))
    ended = f"failed: {row.wrong}; it {row.ended}" if row.wrong else row.ended
    cells = (
        f"{row.project} {row.commit}",
        f"{row.where}, {row.devices}",
        attempts,
        row.resumed,
        _cell(ended),
        row.mlflow,
        f"{row.wall_s}, {row.processor_s}",
    )
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
