"""How well does the estimator that plans jobs predict published memory? Rows are the jobs in published/."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, informs
from benchmarks.published_rows import Row, read_rows
from orchestrator.service.commands.plan import CandidateView

WIDTH = 150


class Answered(NamedTuple):
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


def figures() -> list[Figure]:
    """Errors and wrong verdicts over all rows, and over those whose source was not looked at before."""
    found = [Answered(row, row.answer()) for row in read_rows()]
    Console(width=WIDTH).print(table(found))
    held_out = [one for one in found if not one.row.looked_at]
    return [
        *_figures("all published rows", found),
        *(_figures("rows of sources not looked at before", held_out) if held_out else ()),
        informs(
            "sources not looked at before", len({one.row.source for one in held_out}), "sources"
        ),
    ]


def table(found: Sequence[Answered]) -> Table:
    """A line for each source and kind of memory: rows, errors and wrong verdicts."""
    shown = Table(
        title="published memory, by source", title_justify="left", box=None, header_style="bold"
    )
    for column in ("SOURCE", "LOOKED AT BEFORE", "KIND"):
        shown.add_column(column, no_wrap=True, max_width=44)
    for column in ("ROWS", "MEAN", "MEDIAN", "WORST", "BELOW", "FALSE FITS", "REFUSED, BUT RAN"):
        shown.add_column(column, justify="right")
    groups: defaultdict[tuple[str, bool, str], list[Answered]] = defaultdict(list)
    for one in found:
        groups[one.row.source, one.row.looked_at, one.row.kind or "outcome only"].append(one)
    for (source, looked_at, kind), ones in sorted(groups.items()):
        errors = [one.error for one in ones if one.row.kind]
        ran_out, ran = (
            [one for one in ones if one.row.ran is outcome] for outcome in (False, True)
        )
        shown.add_row(
            source,
            "yes" if looked_at else "no",
            kind,
            str(len(ones)),
            *(_percentages(errors) if errors else ("", "", "", "")),
            f"{sum(one.fits for one in ran_out)} of {len(ran_out)}",
            f"{sum(not one.fits for one in ran)} of {len(ran)}",
        )
    return shown


def _percentages(errors: Sequence[float]) -> tuple[str, str, str, str]:
    sizes = [abs(error) for error in errors]
    below = sum(error < 0 for error in errors) / len(errors)
    return (
        f"{statistics.mean(sizes):.1%}",
        f"{statistics.median(sizes):.1%}",
        f"{max(errors, key=abs):+.1%}",
        f"{below:.0%}",
    )


def _figures(what: str, found: Sequence[Answered]) -> list[Figure]:
    measured = [one.error for one in found if one.row.kind]
    sizes = [abs(error) for error in measured]
    ran_out, ran = ([one for one in found if one.row.ran is outcome] for outcome in (False, True))
    return [
        informs(
            f"mean error, {what} ({len(measured)} measured)", 100 * statistics.mean(sizes), "%"
        ),
        informs(f"median error, {what}", 100 * statistics.median(sizes), "%"),
        informs(f"worst error, {what}", 100 * max(measured, key=abs), "%"),
        informs(
            f"predicted below what was measured, {what}",
            100 * sum(e < 0 for e in measured) / len(measured),
            "%",
        ),
        informs(
            f"false fits, {what}, of {len(ran_out)} that ran out",
            sum(one.fits for one in ran_out),
            "rows",
        ),
        informs(
            f"refused, but ran, {what}, of {len(ran)}", sum(not one.fits for one in ran), "rows"
        ),
    ]
