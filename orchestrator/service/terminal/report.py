"""`orc report`: what happened to jobs, such as in a night."""

from __future__ import annotations

import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.scheduling.reports.morning import MorningReport

STYLES = {
    "Failed": "red",
    "Refused": "red",
    "Late": "yellow",
    "Recovered": "cyan",
    "Succeeded": "green",
}


class ReportFormat(StrEnum):
    """The forms in which `orc report` prints the report."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder in which `orc launch` ran; without it, the service's night."),
    ] = None,
    home: Home = DEFAULT_HOME,
    since: Annotated[
        str,
        typer.Option("--since", metavar="WHEN", help="Begin: 18:00, 12h or '2026-11-24 18:00'."),
    ] = "24h",
    form: Annotated[
        ReportFormat, typer.Option("--format", help="Form of the report.")
    ] = ReportFormat.TEXT,
    as_json: AsJson = False,
) -> None:
    """Report what ended, failed, recovered or is late, what it cost, and what to do now."""
    from orchestrator.service.views.report import format_html, format_markdown, parse_since

    since_s = parse_since(since, time.time())
    if folder is None:
        answer = connect_client(home).fetch_morning_report(since_s)
    else:
        from orchestrator.service.commands.launch.shown import report_folder

        answer = report_folder(folder, since_s, time.time())
    if as_json or form is ReportFormat.TEXT:
        print_answer(asdict(answer), as_json, _make_report_panel(answer))
    else:
        print(
            format_markdown(answer) if form is ReportFormat.MARKDOWN else format_html(answer),
            end="",
        )


def _make_report_panel(report: MorningReport) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from orchestrator.service.terminal.plain_tables import make_plain_grid
    from orchestrator.service.views.report import (
        describe_cost,
        draw_gantt,
        limit_job_rows,
        make_report_sections,
        make_report_title,
    )

    parts: list[RenderableType] = [
        Text(make_report_title(report), style="bold"),
        Text(report.summary),
        Text(describe_cost(report)),
    ]
    if chart := draw_gantt(report):
        parts += [Text(), Text(chart, no_wrap=True, overflow="crop")]
    if report.to_do:
        parts += [
            Text(),
            Text("To do", style="bold"),
            *(Padding(sentence, (0, 0, 0, 2)) for sentence in report.to_do),
        ]
    for heading, rows in make_report_sections(report):
        table = make_plain_grid()
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for job, sentence in limit_job_rows(rows):
            table.add_row(Text(f"  {job}"), Text(sentence))
        parts += [
            Text(),
            Text(f"{heading} ({len(rows)})", style=f"bold {STYLES.get(heading, '')}".strip()),
            table,
        ]
    return Group(*parts)
