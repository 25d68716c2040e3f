"""How well does `orc estimate` predict the step of a configuration that people tuned? Rows: tuned.yaml, in two halves.

What the first half showed may have changed the model of time; nothing that the second showed did.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, at_least, at_most, informs
from benchmarks.ranks import spearman
from benchmarks.tuned_rows import HALVES, Row, read_rows
from orchestrator.service.commands.plan import CandidateView

ROWS_MIN = 40
MEDIAN_MAX_PERCENT = 12
RANK_CORRELATION_MIN = 0.9
RANKED_MIN = 5  # rows of a source whose order says something
WIDTH = 200


class Answered(NamedTuple):
    """A row and what `orc estimate` says of it."""

    row: Row
    view: CandidateView

    @property
    def error(self) -> float:
        """Predicted step over the measured one, less one."""
        return self.view["step_s"] / self.row.measured_s - 1


def figures() -> list[Figure]:
    """Error and bias of both halves, and whether the steps of a source are in the order that was measured."""
    found = [Answered(row, row.answer()) for row in read_rows()]
    Console(width=WIDTH).print(table(found))
    sources: defaultdict[str, list[Answered]] = defaultdict(list)
    for one in found:
        sources[one.row.source].append(one)
    return [
        at_least(f"tuned steps, of {len(sources)} sources", len(found), "", ROWS_MIN),
        *(
            figure
            for half in HALVES
            for figure in half_figures(half, [one for one in found if one.row.half == half])
        ),
        *(figure for name, ones in sources.items() for figure in source_figures(name, ones)),
    ]


def half_figures(half: str, found: Sequence[Answered]) -> list[Figure]:
    """Number, error and bias of the rows of a half. Only the second's error has a bar."""
    name, sizes = f"tuned steps, {half} half", [100 * abs(one.error) for one in found]
    median, error = f"{name}: error, median", statistics.median(sizes)
    return [
        informs(f"{name}: rows", len(found), ""),
        informs(median, error, "%")
        if half == HALVES[0]
        else at_most(median, error, "%", MEDIAN_MAX_PERCENT),
        informs(f"{name}: bias, median", _bias_percent(found), "%"),
        informs(f"{name}: error, worst", max(sizes), "%"),
        informs(
            f"{name}: predicted below what was measured",
            100 * sum(e.error < 0 for e in found) / len(found),
            "%",
        ),
    ]


def source_figures(name: str, found: Sequence[Answered]) -> list[Figure]:
    """Bias of a source, and the order of its steps, of its second half as well, where rows are enough."""
    second = [one for one in found if one.row.half == HALVES[1]]
    told = [informs(f"{name}: bias of {len(found)} tuned steps, median", _bias_percent(found), "%")]
    if len(found) >= RANKED_MIN:
        figure = f"{name}: rank correlation of {len(found)} tuned steps"
        told.append(at_least(figure, _order(found), "", RANK_CORRELATION_MIN))
    if len(second) >= RANKED_MIN:
        told.append(
            informs(
                f"{name}: rank correlation of {len(second)} in the second half", _order(second), ""
            )
        )
    return told


def _bias_percent(found: Sequence[Answered]) -> float:
    return 100 * statistics.median(one.error for one in found)


def _order(found: Sequence[Answered]) -> float:
    return spearman([one.view["step_s"] for one in found], [one.row.measured_s for one in found])


def table(found: Sequence[Answered]) -> Table:
    """A line for each row: what was measured and predicted."""
    shown = Table(title="tuned configurations", title_justify="left", box=None, header_style="bold")
    for column in ("ROW", "HALF", "PLAN"):
        shown.add_column(column, no_wrap=True)
    for column in ("MEASURED S", "PREDICTED S", "ERROR"):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in found:
        measured_s, predicted_s = one.row.measured_s, one.view["step_s"]
        numbers = f"{measured_s:.2f}", f"{predicted_s:.2f}", f"{one.error:+.1%}"
        shown.add_row(one.row.name, one.row.half, one.view["plan"], *numbers)
    return shown
