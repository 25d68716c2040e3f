"""`orc watch`: devices and jobs, live in the terminal, within 80 columns."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.service.terminal.options import Home, check_finite, client_of
from orchestrator.service.terminal.output import console_on
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.service.views.records import JobView, NodeView, ProgressView

ENDED_SHOWN = 5
NODES_SHOWN = 16
BAR_WIDTH = 12
LINES_AROUND = 8  # headings and counts beside the rows of nodes and jobs


def watch(
    home: Home = DEFAULT_HOME,
    every_s: Annotated[
        float,
        typer.Option(
            "--every", min=0.2, max=3600, callback=check_finite, help="Seconds between two looks."
        ),
    ] = 2.0,
) -> None:
    """Show devices and jobs, live, until Ctrl-C; once where the output is no terminal."""
    from rich.live import Live

    client, console = client_of(home), console_on(sys.stdout)
    if not sys.stdout.isatty():
        console.print(_screen(client.cluster(), client.jobs(ENDED_SHOWN), None), highlight=False)
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                cluster, jobs = client.cluster(), client.jobs(ENDED_SHOWN)
                rows = console.height - LINES_AROUND - min(len(cluster["nodes"]), NODES_SHOWN)
                live.update(_screen(cluster, jobs, max(1, rows)), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _screen(
    cluster: Mapping[str, Any], jobs: Sequence[JobView], rows: int | None
) -> RenderableType:
    """Return the whole screen; `rows` is the number of jobs that fit, None: all."""
    from rich.console import Group
    from rich.text import Text

    count = {word: sum(job["status"] == word for job in jobs) for word in ("running", "queued")}
    title = f"{time.strftime('%a %H:%M:%S')}  {count['running']} running, {count['queued']} waiting"
    live = [job for job in jobs if job["status"] in count]
    ended = [job for job in jobs if job["status"] not in count]
    ordered = [*live, *reversed(ended)]
    shown = ordered if rows is None else ordered[:rows]
    problems = [Text(problem, style="red") for problem in cluster["problems"]]
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        *problems,
        Text(),
        _nodes(cluster["nodes"]),
        Text(),
    ]
    parts.append(_jobs(shown) if shown else Text("The queue is empty."))
    if len(shown) < len(ordered):
        parts.append(Text(f"... {len(ordered) - len(shown)} more: `orc queue`", style="dim"))
    return Group(*parts)


def _nodes(nodes: Sequence[NodeView]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for node in nodes[:NODES_SHOWN]:
        devices = len(node["free_bytes"])
        state = (
            Text("drained", style="yellow") if node["drained"] else Text(", ".join(node["jobs"]))
        )
        if not node["drained"] and (unreadable := sum(map(bool, node.get("driver_errors", ())))):
            state = Text(f"{unreadable} cannot be read", style="red")
        busy = len(node["busy"])
        table.add_row(
            node["name"], _bar(busy / max(1, devices)), f"{busy} of {devices} busy", state
        )
    if len(nodes) > NODES_SHOWN:
        table.add_row(f"... {len(nodes) - NODES_SHOWN} more")
    return table


def _jobs(jobs: Sequence[JobView]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from orchestrator.service.terminal.expected import coloured
    from orchestrator.service.terminal.tables import time_left

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("JOB", no_wrap=True, overflow="ellipsis", max_width=22)
    table.add_column("STATUS", no_wrap=True)
    table.add_column("TRY", justify="right", no_wrap=True)
    table.add_column("PROGRESS", no_wrap=True)
    table.add_column("LEFT", justify="right", no_wrap=True)
    table.add_column("WHY", no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs:
        progress = job["progress"]
        table.add_row(
            job["id"],
            coloured(job["status"]),
            str(len(job["attempts"])),
            _steps(progress),
            time_left(progress),
            Text(_status_text(job)),
        )
    return table


def _status_text(job: JobView) -> str:
    """Return the plan of a running job, the reason of another."""
    if job["status"] == "running" and job["attempts"]:
        return job["attempts"][-1]["plan"]
    return job["reason"].partition("\n")[0]


def _steps(progress: ProgressView | None) -> str:
    if progress is None:
        return ""
    if not progress["max_steps"]:
        return f"step {progress['step']}"
    return f"{_bar(progress['step'] / progress['max_steps'])} {progress['step']}/{progress['max_steps']}"


def _bar(share: float) -> str:
    full = round(BAR_WIDTH * min(1.0, share))
    return "█" * full + "░" * (BAR_WIDTH - full)
