"""How well does the estimator that plans jobs predict published memory? Rows are the jobs in published/.

`python -m benchmarks published --rows FILE ...` asks it about rows of others, and prints them as README's table does.
"""

from __future__ import annotations

import datetime
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, informs
from benchmarks.published_rows import FileError, Row, read_file, read_rows
from orchestrator.service.commands.plan import CandidateView
from orchestrator.specs.errors import OrchestratorError

WIDTH = 150


class Answer(NamedTuple):
    """A row and what `orc estimate` says of it."""

    row: Row
    view: CandidateView

    @property
    def fits(self) -> bool:
        return self.view["rejected"] is None

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        estimate = self.view["estimate"]
        predicted = {
            "allocated": estimate["allocated_bytes"],
            "reserved": estimate["reserved_bytes"],
            "device": estimate["device_bytes"],
        }
        assert self.row.kind is not None
        return predicted[self.row.kind] / self.row.measured_bytes - 1


class Score(NamedTuple):
    """The errors of some answers, and how often they are wrong about what fits."""

    errors: list[float]  # of the rows that were measured: predicted over measured, less one
    ran_out: int
    false_fits: int  # of those that ran out
    ran: int
    refused: int  # of those that ran

    @property
    def sizes(self) -> list[float]:
        return [abs(error) for error in self.errors]

    @property
    def below(self) -> float:
        """Share of the measured rows that were predicted too low."""
        return sum(error < 0 for error in self.errors) / len(self.errors)


def score(answers: Iterable[Answer]) -> Score:
    answers = list(answers)
    ran_out = [answer for answer in answers if not answer.row.ran]
    ran = [answer for answer in answers if answer.row.ran]
    return Score(
        errors=[answer.error for answer in answers if answer.row.kind],
        ran_out=len(ran_out),
        false_fits=sum(answer.fits for answer in ran_out),
        ran=len(ran),
        refused=sum(not answer.fits for answer in ran),
    )


def figures() -> list[Figure]:
    """Errors and wrong verdicts over all rows, and over those whose source was not looked at before."""
    answers = [Answer(row, row.answer()) for row in read_rows()]
    Console(width=WIDTH).print(table(answers))
    held_out = [answer for answer in answers if not answer.row.looked_at]
    sources = {answer.row.source for answer in held_out}
    return [
        *_figures("all published rows", score(answers)),
        *(_figures("rows of sources not looked at before", score(held_out)) if held_out else ()),
        informs("sources not looked at before", len(sources), "sources"),
    ]


def print_rows(files: Sequence[str]) -> int:
    """Print README's lines for the rows of these files; return the exit code.

    A row that `orc estimate` refuses, as an unknown model or an impossible plan, is named and counted apart.
    """
    answers = []
    refused = []
    try:
        rows = list[Row]()
        for file in files:
            rows += read_file(Path(file))
    except FileError as error:
        print(error)
        return 2
    for row in rows:
        try:
            answers.append(Answer(row, row.answer()))
        except OrchestratorError as error:
            refused.append(f"{row.name}: {error}")
    if answers:
        Console(width=WIDTH).print(table(answers))
        for line in readme_lines(answers, datetime.date.today()):
            print(line)
    for line in refused:
        print(f"not answered: {line}")
    print(f"{len(answers)} of {len(rows)} rows were answered")
    return 0


def readme_lines(answers: Sequence[Answer], day: datetime.date) -> list[str]:
    """Return the lines of README's table of accuracy for these answers."""
    result = score(answers)
    sources = len({answer.row.source for answer in answers})
    held_out = sum(not answer.row.looked_at for answer in answers)
    share = f"{held_out} of {len(answers)}"
    if held_out == len(answers):
        share = "all"
    elif held_out == 0:
        share = "none"
    lines = []
    if result.errors:
        mean, median, worst, _ = _percentages(result)
        lines.append(
            f"| published GPU memory, {sources} sources | {len(result.errors)} measured | {share} "
            f"| {mean} | {median} | {worst} | {day} |"
        )
    fits = f"{result.false_fits} of {result.ran_out}; {result.refused} of {result.ran}"
    lines.append(f"| - said to fit, but ran out; refused, but ran | {fits} | {share} | | | | |")
    return lines


def table(answers: Sequence[Answer]) -> Table:
    """A line for each source and kind of memory: rows, errors and wrong verdicts."""
    lines = Table(
        title="published memory, by source", title_justify="left", box=None, header_style="bold"
    )
    for column in ("SOURCE", "LOOKED AT BEFORE", "KIND"):
        lines.add_column(column, no_wrap=True, max_width=44)
    for column in ("ROWS", "MEAN", "MEDIAN", "WORST", "BELOW", "FALSE FITS", "REFUSED, BUT RAN"):
        lines.add_column(column, justify="right")
    groups: defaultdict[tuple[str, bool, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        row = answer.row
        groups[row.source, row.looked_at, row.kind or "outcome only"].append(answer)
    for (source, looked_at, kind), members in sorted(groups.items()):
        result = score(members)
        lines.add_row(
            source,
            "yes" if looked_at else "no",
            kind,
            str(len(members)),
            *(_percentages(result) if result.errors else ("", "", "", "")),
            f"{result.false_fits} of {result.ran_out}",
            f"{result.refused} of {result.ran}",
        )
    return lines


def _percentages(result: Score) -> tuple[str, str, str, str]:
    """Return mean, median and worst error, and the share that is too low."""
    return (
        f"{statistics.mean(result.sizes):.1%}",
        f"{statistics.median(result.sizes):.1%}",
        f"{max(result.errors, key=abs):+.1%}",
        f"{result.below:.0%}",
    )


def _figures(what: str, result: Score) -> list[Figure]:
    sizes = result.sizes
    return [
        informs(f"mean error, {what} ({len(sizes)} measured)", 100 * statistics.mean(sizes), "%"),
        informs(f"median error, {what}", 100 * statistics.median(sizes), "%"),
        informs(f"worst error, {what}", 100 * max(result.errors, key=abs), "%"),
        informs(f"predicted below what was measured, {what}", 100 * result.below, "%"),
        informs(f"false fits, {what}, of {result.ran_out} that ran out", result.false_fits, "rows"),
        informs(f"refused, but ran, {what}, of {result.ran}", result.refused, "rows"),
    ]
