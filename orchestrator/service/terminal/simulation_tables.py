"""Tables of simulated, replayed and expected runs: views in, Rich renderables out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.service.commands.replay import Decision
from orchestrator.service.commands.simulate import Simulated, quantile
from orchestrator.specs.units import format_seconds


def simulated_table(run: Simulated) -> Table:
    """Return the metrics of a simulated run, and the time of its decisions on this machine."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in _rows(run):
        table.add_row(name, value)
    return table


def _rows(run: Simulated) -> list[tuple[str, str]]:
    """Return (name, value) rows of a run; every run of a trace has the same names."""
    report, taken_s = run.report, sorted(run.decisions_s)
    completion = (
        f"mean {format_seconds(report['mean_completion_s'])}, "
        f"median {format_seconds(report['median_completion_s'])}, "
        f"99 % within {format_seconds(report['p99_completion_s'])}"
    )
    slowdown = f"99 % below {report['p99_slowdown']:.1f}, worst {report['worst_slowdown']:.1f}"
    rows = [
        ("jobs finished", f"{report['finished']} of {report['jobs']}"),
        ("completion", completion if report["finished"] else "-"),
        ("makespan", format_seconds(report["makespan_s"]) if report["finished"] else "-"),
        ("slowdown against alone", slowdown if report["finished"] else "-"),
        ("devices", f"{report['devices']}, busy {100 * report['utilisation']:.0f} % of the time"),
        ("GPU-hours", f"{report['gpu_hours']:.1f}"),
        ("restarts", f"{report['restarts']}"),
    ]
    if taken_s:  # the live queue is played without timing its decisions
        mean_ms, most_ms = 1e3 * fmean(taken_s), 1e3 * quantile(taken_s, 0.99)
        times = f"mean {mean_ms:.2f} ms, 99 % within {most_ms:.2f} ms, slowest {1e3 * taken_s[-1]:.1f} ms"
        rows.append(("decisions", f"{len(taken_s)}, {times}"))
    if report["guaranteed"]:
        refusals = report["guaranteed"] - report["promised"]
        promises = f"{report['promises_kept']} of {report['promised']}, {refusals} refused"
        rows.insert(4, ("promises kept", promises))
    if report["deadlines"]:
        deadlines = f"{report['deadlines_met']} of {report['deadlines']}"
        late = f", the others {format_seconds(report['mean_lateness_s'])} late on average"
        rows.insert(4, ("deadlines met", deadlines + (late if report["mean_lateness_s"] else "")))
    return rows


def replay_table(decisions: Sequence[Decision]) -> RenderableType:
    """Return past decisions with their reasons; both decisions if this version decides otherwise."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("AT", "AFTER", "DECIDED", "WHY"):
        table.add_column(column, no_wrap=column in ("AT", "AFTER"), overflow="fold")
    for row in decisions:
        moment = time.strftime("%m-%d %H:%M:%S", time.localtime(row["at_s"]))
        text = (
            Text(row["now"])
            if row["same"]
            else Text(f"then: {row['then']}\nnow: {row['now']}", "red")
        )
        table.add_row(moment, row["event"], text, Text(row["why"]))
    differing = [row for row in decisions if not row["same"]]
    recorded_count = sum(row["then"] is not None for row in decisions)
    verdict = f"{len(decisions)} decisions, {recorded_count} of them kept: "
    verdict += f"this version decides {len(differing)} otherwise."
    if differing:
        verdict += " Later ones may differ as a consequence of the first."
    return Group(table, Text(verdict))
