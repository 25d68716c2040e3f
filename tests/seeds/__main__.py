"""`python -m tests.seeds [NAME ...]`: runs the five projects and prints one table; figures go to .bench/seeds.json.

A name is a project (`parler`) or a place (`virtual`, `fake card`); all of them have to fit a run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from tests.seeds.runs import PROJECTS, Case, Missing, Row, commit, run
from tests.trainers.driver import Overrun

FIGURES = Path(".bench/seeds.json")
HEAD = ("project", "where, devices", "attempts", "resumed at", "ended", "in MLflow", "seconds")


def main(names: list[str]) -> None:
    """Print a row as soon as its run has ended."""
    rows = []
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for project in PROJECTS:
        for fields in project.CASES:
            case = Case(**fields)
            if not set(names) <= {project.__name__.rpartition(".")[2], case.where}:
                continue
            with tempfile.TemporaryDirectory(prefix="seed-") as folder:
                try:
                    row, _ = run(project, case, Path(folder))
                except Missing as missing:
                    print(
                        f"| {project.CHECKOUT} {commit(project)} | {case.where} | skipped: {missing} |",
                        flush=True,
                    )
                    continue
                except Overrun as overrun:
                    last = str(overrun).rstrip().rpartition("\n")[2]
                    head, _, _ = str(overrun).partition(":")
                    print(
                        f"| {project.CHECKOUT} {commit(project)} | {case.where} | cut: {head}: {last} |",
                        flush=True,
                    )
                    continue
            rows.append(dataclasses.asdict(row))
            print(_line(row), flush=True)
            FIGURES.parent.mkdir(exist_ok=True)
            FIGURES.write_text(json.dumps(rows, indent=1))


def _line(row: Row) -> str:
    attempts = "; ".join(f"{number}: {text}" for number, text in enumerate(row.attempts, start=1))
    ended = (
        row.ended if row.ended == "succeeded" else f"{row.ended}: {row.reason}".replace("\n", " ")
    )
    cells = (
        f"{row.project} {row.commit}",
        f"{row.where}, {row.devices}",
        attempts,
        row.resumed,
        ended,
        row.mlflow,
    )
    return "| " + " | ".join((*cells, str(row.wall_s))) + " |"


if __name__ == "__main__":
    main(sys.argv[1:])
