"""`orc watch`: devices and jobs, live in the terminal, within 80 columns."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import Home, check_finite, connect_client
from orchestrator.service.terminal.output import make_console
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from orchestrator.service.terminal.tables import Cells
    from orchestrator.service.views.records import JobView, NodeView, ProgressView

ENDED_SHOWN = 5
NODES_SHOWN = 16
BAR_WIDTH = 12
LINES_AROUND = 9  # headings and counts beside the rows of nodes and jobs


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

    client = connect_client(home)
    console = make_console(sys.stdout)
    if not sys.stdout.isatty():
        console.print(
            _draw_screen(client.fetch_cluster(), client.list_jobs(ENDED_SHOWN), None),
            highlight=False,
        )
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                cluster = client.fetch_cluster()
                jobs = client.list_jobs(ENDED_SHOWN)
                rows = console.height - LINES_AROUND - min(len(cluster["nodes"]), NODES_SHOWN)
                live.update(_draw_screen(cluster, jobs, max(1, rows)), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _draw_screen(
    cluster: JsonObject, jobs: Sequence[JobView], rows_max: int | None
) -> RenderableType:
    """Return the whole screen of `orc watch`; `rows_max` is the number of job rows that fit, None
    for all.
    """
    from rich.console import Group
    from rich.text import Text

    count = {word: sum(job["status"] == word for job in jobs) for word in ("running", "queued")}
    title = f"{time.strftime('%a %H:%M:%S')}  {count['running']} running, {count['queued']} waiting"
    live = [job for job in jobs if job["status"] in count]
    ended = [job for job in jobs if job["status"] not in count]
    ordered = [*live, *reversed(ended)]
    shown = ordered if rows_max is None else ordered[:rows_max]
    problems = [Text(problem, style="red") for problem in cluster["problems"]]
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        *problems,
        Text(),
        _make_nodes_table(cluster["nodes"]),
        Text(),
    ]
    parts.append(_make_jobs_table(shown) if shown else Text("The queue is empty."))
    if len(shown) < len(ordered):
        parts.append(Text(f"... {len(ordered) - len(shown)} more: `orc queue`", style="dim"))
    return Group(*parts)


def _make_nodes_table(nodes: Sequence[NodeView]) -> RenderableType:
    from orchestrator.service.terminal.tables import draw_table
    from orchestrator.service.views.columns import select_columns

    cells: Cells = {
        "use": lambda node: _draw_progress_bar(len(node["busy"]) / max(1, len(node["free_bytes"]))),
        "busy": lambda node: f"{len(node['busy'])} of {len(node['free_bytes'])} busy",
        "jobs": _describe_node,
    }
    table = draw_table(select_columns("node_lines"), nodes[:NODES_SHOWN], cells, is_narrow=True)
    if len(nodes) > NODES_SHOWN:
        table.add_row(f"... {len(nodes) - NODES_SHOWN} more")
    return table


def _describe_node(node: NodeView) -> str | Text:
    """Return the jobs that run on a node; if it accepts none, why."""
    from rich.text import Text

    if node["drained"]:
        return Text("drained", style="yellow")
    if unreadable := sum(map(bool, node.get("driver_errors", ()))):
        return Text(f"{unreadable} cannot be read", style="red")
    return ", ".join(node["jobs"])


def _make_jobs_table(jobs: Sequence[JobView]) -> RenderableType:
    from orchestrator.service.terminal.expected import colour_status
    from orchestrator.service.terminal.tables import draw_table, format_time_left
    from orchestrator.service.views.columns import select_columns

    cells: Cells = {
        "status": lambda job: colour_status(job["status"]),
        "progress": lambda job: _format_step_count(job["progress"]),
        "left": lambda job: format_time_left(job["progress"]),
        "why": _describe_plan_or_reason,
    }
    return draw_table(select_columns("watch", jobs), jobs, cells, is_narrow=True)


def _describe_plan_or_reason(job: JobView) -> str:
    """Return the plan of a running job; of any other job, the reason for its status."""
    if job["status"] == "running" and job["attempts"]:
        return job["attempts"][-1]["plan"]
    return job["reason"].partition("\n")[0]


def _format_step_count(progress: ProgressView | None) -> str:
    if progress is None:
        return ""
    if not progress["max_steps"]:
        return f"step {progress['step']}"
    return f"{_draw_progress_bar(progress['step'] / progress['max_steps'])} {progress['step']}/{progress['max_steps']}"


def _draw_progress_bar(fraction: float) -> str:
    full = round(BAR_WIDTH * min(1.0, fraction))
    return "█" * full + "░" * (BAR_WIDTH - full)
