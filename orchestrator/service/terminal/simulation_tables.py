"""Tables of simulated, replayed and expected runs: views in, Rich renderables out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.backends.text_templates import load_text_template
from orchestrator.service.commands.replay import ReplayedDecision
from orchestrator.service.commands.simulate import Simulated, compute_quantile
from orchestrator.service.terminal.plain_tables import make_plain_table


def make_simulated_table(simulated: Simulated) -> Table:
    """Return the metrics of a simulated run, and the time of its decisions on this machine."""
    taken_s = sorted(simulated.decisions_s)  # the live queue is played without timing its decisions
    template = load_text_template("orchestrator.service.terminal", "simulated")
    text = template.render(
        report=simulated.report,
        taken_s=taken_s,
        mean_s=fmean(taken_s or [0.0]),
        most_s=compute_quantile(taken_s or [0.0], 0.99),
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for line in text.splitlines():
        table.add_row(*line.split("\t"))
    return table


def make_replay_table(decisions: Sequence[ReplayedDecision]) -> RenderableType:
    """Return a table of past decisions with their reasons; if this version decides otherwise, of
    both decisions.
    """
    table = make_plain_table()
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
