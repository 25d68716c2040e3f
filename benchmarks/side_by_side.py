"""Several queues on the same inputs, side by side: means over the shaken inputs, with their ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.table import Table

from benchmarks.figure import Figure, informs
from orchestrator.service.commands.simulate import Simulated, compute_quantile

Measured = Mapping[str, float]  # of one run, by measure; of a bound, those that it bounds
UNITS = {
    "mean completion": "s",
    "p99 completion": "s",
    "makespan": "s",
    "worst slowdown": "x",
    "GPU-hours": "h",
    "deadlines met": "",
    "lateness of the missed": "s",
    "restarts a job": "",
    "p99 decision": "ms",
}


def measured(run: Simulated) -> Measured:
    """What one run shows. A decision's time is that of this machine."""
    report = run.report
    return {
        "mean completion": report["mean_completion_s"],
        "p99 completion": report["p99_completion_s"],
        "makespan": report["makespan_s"],
        "worst slowdown": report["worst_slowdown"],
        "GPU-hours": report["gpu_hours"],
        "deadlines met": report["deadlines_met"] / max(1, report["deadlines"]),
        "lateness of the missed": report["mean_lateness_s"],
        "restarts a job": report["restarts"] / report["jobs"],
        "p99 decision": 1e3 * compute_quantile(sorted(run.decisions_s), 0.99),
        "jobs not finished": report["jobs"] - report["finished"],
    }


class SideBySide:
    """One row for each queue on each cluster."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, Sequence[Measured]]] = []

    def add(self, where: str, queue: str, runs: Sequence[Measured]) -> None:
        """A queue's runs on the shaken inputs."""
        self._rows.append((where, queue, runs))

    def figures(self) -> list[Figure]:
        """Every cell: the mean, with the range in its name."""
        return [
            informs(ranged(f"{where}, {queue}: {measure}", values), fmean(values), unit)
            for where, queue, runs in self._rows
            for measure, unit in UNITS.items()
            for values in [_values(measure, runs)]
            if values
        ]

    def table(self) -> Table:
        """For people: each cell the mean, and the range below it where there are several inputs."""
        shown = Table(
            title="side by side",
            title_justify="left",
            box=None,
            pad_edge=False,
            header_style="bold",
        )
        shown.add_column("CLUSTER")
        shown.add_column("QUEUE")
        for measure, unit in UNITS.items():
            shown.add_column(f"{measure} {unit}".strip(), justify="right")
        for where, queue, runs in self._rows:
            shown.add_row(where, queue, *(_cell(_values(measure, runs)) for measure in UNITS))
        return shown


def ranged(name: str, values: Sequence[float]) -> str:
    """The name with the range of several values."""
    return f"{name} ({min(values):.5g} to {max(values):.5g})" if len(values) > 1 else name


def _values(measure: str, runs: Sequence[Measured]) -> list[float]:
    return [one[measure] for one in runs if measure in one]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = f"{fmean(values):.5g}"
    return mean if len(values) == 1 else f"{mean}\n{min(values):.5g} to {max(values):.5g}"
