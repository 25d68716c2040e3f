"""Tables of jobs, attempts and plans: views in, Rich renderables out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.planning.picture import SYMBOLS, Mark, Picture, draw_lines
from orchestrator.service.terminal.expected import add_uncut_column, colour_status, format_minute
from orchestrator.service.terminal.plain_tables import make_plain_grid, make_plain_table
from orchestrator.service.views.columns import Column, Row, format_second, select_columns
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.profile import Source
from orchestrator.specs.units import format_bytes, format_seconds

if TYPE_CHECKING:  # a client that shows a table loads nothing that makes a view
    from orchestrator.service.views.records import (
        AttemptView,
        EstimateView,
        JobView,
        NodeView,
        ProgressView,
        PromiseView,
    )
    from orchestrator.service.views.teams import TeamView

MARK_STYLES = {
    Mark.TOO_BIG: "dim",
    Mark.FITS: "",
    Mark.REFUTED: "red",
    Mark.CHOSEN: "bold green",
    Mark.PREDICTED: "",
    Mark.MEASURED: "bold green",
}
BAR_WIDTH = 32
MOMENT_BAR_WIDTH = 28  # fits beside the longest name of a moment within 80 columns
NARROW_PLAN = 22  # columns of a plan in a narrow table
STYLED_MAX = 500  # jobs of a table with colours and folded cells
WIDE = 100  # columns from which a table has room for everything
Draw = Callable[[Any], str | Text]  # what draws a cell of a row
Cells = Mapping[str, Draw]  # by the key of the column


def draw_table(
    columns: Sequence[Column],
    rows: Sequence[Row],
    cell_texts: Cells,
    *,
    is_narrow: bool = False,
) -> Table:
    """Return the table of these rows; `cell_texts` has own texts for some columns, by the columns'
    keys.

    A narrow table has one line per row: the last column gets the remaining width, and is cut.
    """
    table = make_plain_table(is_wide=is_narrow)
    texts = []
    for column in columns:
        draw: Draw = cell_texts.get(column.key, column.show)
        texts.append([Text.assemble(draw(row)) for row in rows])
        heading = column.heading.upper()
        if not column.is_long:
            add_uncut_column(table, heading, map(str, texts[-1]), is_number=column.is_number)
        elif not is_narrow:
            table.add_column(heading, overflow="fold")
        elif column is columns[-1]:
            table.add_column(heading, overflow="ellipsis", no_wrap=True, ratio=1)
        else:
            table.add_column(heading, overflow="ellipsis", no_wrap=True, max_width=NARROW_PLAN)
    for line in zip(*texts, strict=True):
        table.add_row(*line)
    return table


def format_plain_lines(columns: Sequence[Column], rows: Sequence[Row], cell_texts: Cells) -> str:
    """Return a table of many rows as lines of text without styles, since Rich takes a third of a
    millisecond per row.
    """
    lines = [[column.heading.upper() for column in columns]]
    draws: list[Draw] = []
    for column in columns:
        draws.append(cell_texts.get(column.key, column.show))
    lines += [[str(draw(row)) for draw in draws] for row in rows]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    widths[-1] = 0  # nothing stands behind the last column
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def make_queue_table(jobs: Sequence[JobView], terminal_width: int = WIDE) -> Table | str:
    """Return a table with a row per job: status, plan, progress or reason; team and priority if any
    job has them.

    Below WIDE columns each job has one line: the plan without its devices, and the start of the
    reason. For more than STYLED_MAX jobs the rows are lines of text.
    """
    is_narrow = terminal_width < WIDE
    cells: Cells = {
        "team": lambda job: f"{job['team']}/{job['user']}",
        "status": lambda job: colour_status(job["status"]),
        "plan": lambda job: _format_plan(
            job.get("plan") or f"{_format_gpus(job)} wanted", is_narrow=is_narrow
        ),
        "why": lambda job: (
            format_progress_line(job["progress"]) or _describe_progress_or_reason(job)
        ),
    }
    columns = select_columns("queue", jobs, is_narrow=is_narrow)
    if len(jobs) > STYLED_MAX:
        return format_plain_lines(columns, jobs, cells)
    return draw_table(columns, jobs, cells, is_narrow=is_narrow)


def make_job_panel(job: JobView, terminal_width: int = WIDE) -> RenderableType:
    """Return a panel with a job's attempts side by side, the bytes of the last attempt by cause,
    and its failure.

    Below WIDE columns the changes of an attempt are among its reasons.
    """
    head = make_plain_grid()
    head.add_row("job", Text(job["id"], style="bold"))
    head.add_row("status", colour_status(job["status"]))
    head.add_row("why", Text(job["reason"]))
    head.add_row("submitted", format_second(job["submitted_at_s"]))
    for removal in job["removed"]:
        head.add_row("removed", Text(removal))
    head.add_row(
        "wants",
        f"{_format_gpus(job)}, global batch {job['global_batch_size']}, priority {job['priority']}",
    )
    if job["provenance"]:
        head.add_row("trains", Text(", ".join(make_provenance_phrases(job["provenance"]))))
    if job["time_limit_s"] is not None:
        head.add_row("time limit", format_seconds(job["time_limit_s"]))
    if job["retry_of"] is not None:
        begin = f", from the checkpoint of {job['continues_from']}" if job["continues_from"] else ""
        head.add_row("retries", Text(f"{job['retry_of']}{begin}"))
    if job["promise"] is not None:
        head.add_row("guarantee", Text(describe_guarantee(job["promise"])))
    if job["progress"]:
        head.add_row("progress", format_progress_line(job["progress"]))
    parts: list[RenderableType] = [head]
    if job["attempts"]:
        last = job["attempts"][-1]
        reasons = _make_reason_lines(job, has_changes=terminal_width < WIDE)
        parts += [
            Text(),
            make_attempts_table([job], terminal_width),
            Text(),
            Text("Why each attempt", style="bold"),
            reasons,
        ]
        if is_estimate_known(last["estimate"]):
            title = Text(f"Predicted bytes of attempt {last['number']}", style="bold")
            parts += [Text(), title, make_causes_table(last["estimate"])]
        parts += _make_failure_lines(last)
    return Group(*parts)


def make_provenance_phrases(provenance: Mapping[str, str]) -> list[str]:
    """Return phrases such as `learning rate 0.001` on what the job's figures rest on."""
    return [f"{name.replace('_', ' ')} {text}" for name, text in provenance.items()]


def make_attempts_table(jobs: Sequence[JobView], terminal_width: int = WIDE) -> Table:
    """Return a table with a row per attempt: plan, change, predicted and measured peak, step time,
    outcome.

    Below WIDE columns the change is left out, and so are a plan's devices.
    """
    is_narrow = terminal_width < WIDE
    rows: list[JsonObject] = []
    for job in jobs:
        for attempt in job["attempts"]:
            rows.append({**attempt, "attempt": f"{job['id']}-{attempt['number']}"})
        if not job["attempts"]:
            rows.append({"attempt": job["id"], "outcome": job["status"]})
    cells: Cells = {
        "plan": lambda row: _format_plan(row.get("plan", "-"), is_narrow=is_narrow),
        "outcome": lambda row: colour_status(row["outcome"]),
    }
    return draw_table(select_columns("attempts", rows, is_narrow=is_narrow), rows, cells)


def colour_picture(picture: Picture) -> Text:
    """Return the chart as text with coloured marks."""
    text = Text("\n".join(draw_lines(picture)), no_wrap=True)
    for mark, symbol in SYMBOLS.items():
        text.highlight_words([symbol], MARK_STYLES[mark])
    text.highlight_regex(r"╌+| memory ends: .*?B ", "yellow")
    return text


def make_peaks_table(estimate: EstimateView, activation_factor: float) -> Table:
    """Return a table with a bar for the bytes at each moment of a step at which the memory peak may
    lie.

    Activations are multiplied by `activation_factor`.
    """
    table = make_plain_grid()
    table.add_column()
    table.add_column(justify="right")
    rows = [
        (
            moment["name"],
            moment["counted_bytes"],
            round(activation_factor * moment["activation_bytes"]),
        )
        for moment in estimate["by_moment"]
    ]
    largest = (
        max((counted_bytes + activations for _, counted_bytes, activations in rows), default=1) or 1
    )
    for name, counted_bytes, activations in rows:
        whole = round(MOMENT_BAR_WIDTH * (counted_bytes + activations) / largest)
        solid = round(MOMENT_BAR_WIDTH * counted_bytes / largest)
        bar = Text("█" * solid, style="cyan") + Text("▒" * (whole - solid), style="cyan")
        table.add_row(f"  {name}", format_bytes(counted_bytes + activations), bar)
    factor = f" x{activation_factor:.2f}" if activation_factor >= 1.01 else ""
    table.add_row("", "", Text(f"█ counted  ▒ activations{factor}", style="dim"))
    return table


def make_causes_table(estimate: EstimateView) -> Table:
    """Return a table with a bar for the bytes of each cause (weights, activations and so on), and
    the three totals.
    """
    table = make_plain_grid()
    table.add_column()
    table.add_column(justify="right")
    largest = max(estimate["by_cause"].values(), default=1) or 1
    for cause, count in estimate["by_cause"].items():
        table.add_row(
            f"  {cause}",
            format_bytes(count),
            Text("█" * round(BAR_WIDTH * count / largest), style="cyan"),
        )
    table.add_row(
        "  allocated", format_bytes(estimate["allocated_bytes"]), f"peak at: {estimate['moment']}"
    )
    table.add_row(
        "  reserved", format_bytes(estimate["reserved_bytes"]), "what the allocator holds"
    )
    table.add_row(
        "  device", format_bytes(estimate["device_bytes"]), "and context, communicators, workspaces"
    )
    if estimate["host_bytes"]:
        table.add_row("  host", format_bytes(estimate["host_bytes"]), "in host memory, per rank")
    return table


def format_progress_line(progress: ProgressView | None) -> str:
    """Return a line such as `step 12/60 · 0.213 s · peak 312 MiB · loss 4.51`; "" before the first step."""
    if progress is None or not (progress["step"] or progress["peak_bytes"]):
        return ""  # it starts
    total = "" if progress["max_steps"] is None else f"/{progress['max_steps']}"
    parts = [f"step {progress['step']}{total}"]
    if progress["step_s"]:
        parts.append(format_seconds(progress["step_s"]))
    parts.append(f"peak {format_bytes(progress['peak_bytes'])}")
    if progress["loss"] is not None:
        parts.append(f"loss {progress['loss']:.3f}")
    return " · ".join(parts)


def format_time_left(progress: ProgressView | None) -> str:
    """Return the time until the last step at the recent speed, as text; "" where it is unknown."""
    if progress is None or not progress["max_steps"] or not progress["step_s"]:
        return ""
    return format_seconds(max(0, progress["max_steps"] - progress["step"]) * progress["step_s"])


def is_estimate_known(estimate: EstimateView) -> bool:
    return estimate["source"] != Source.ASSUMED


def _make_reason_lines(job: JobView, *, has_changes: bool) -> Group:
    # the words of a plan come with the search for plans, which only this table needs
    from orchestrator.planning.explain import describe_choice

    lines = []
    for attempt in job["attempts"]:
        why = attempt["change_reason"] or describe_choice(attempt["fit_probability"])
        factor = (
            f", activations x{attempt['correction']:.2f}" if attempt["correction"] >= 1.01 else ""
        )
        lines.append(Text(f"  {attempt['number']}: {why}{factor}; on {attempt['placement']}"))
        lines += [Text(f"     {change}") for change in attempt["change"] if has_changes]
        lines += [Text(f"     {warning}", style="yellow") for warning in attempt["warnings"]]
    return Group(*lines)


def _make_failure_lines(attempt: AttemptView) -> list[RenderableType]:
    failure = attempt["failure"]
    if failure is None:
        return []
    rank = "" if failure["rank"] is None else f", rank {failure['rank']}"
    return [
        Text(),
        Text(f"Attempt {attempt['number']} ended: {failure['kind']}{rank}", style="bold red"),
        Text(failure["reason"]),
        Text(failure["excerpt"].rstrip(), style="dim"),
    ]


def describe_guarantee(promise: PromiseView) -> str:
    """Return a sentence on what was promised to a job with a guarantee, or on the refusal of the
    guarantee.
    """
    if promise["refused"]:
        return f"is refused: {promise['refused']}"
    gpus = f"{promise['gpus']} gpu{'s' if promise['gpus'] > 1 else ''}"
    if promise["starts_by_s"] is None:
        return f"is promised the speed of {gpus}, or refused, once the cluster is seen"
    starts_by = format_minute(promise["starts_by_s"], None)
    return f"is promised at least the speed of {gpus}, from {starts_by} on at the latest"


def _format_plan(plan_text: str, *, is_narrow: bool) -> str:
    """Return the plan as text; for a narrow table without its devices."""
    rest = plan_text.partition(" · ")[2]
    return rest if is_narrow and rest else plan_text


def _format_gpus(job: JobView) -> str:
    """Return the number of GPUs that the job asks for, as `1 gpu` or `2-8 gpus`."""
    return f"{job['gpus']} gpu" if job["gpus"] == "1" else f"{job['gpus']} gpus"


def _describe_progress_or_reason(job: JobView) -> str:
    if job["cancelling"] and job["status"] == "running":
        return "is being cancelled"
    why = job["reason"].partition("\n")[0]
    promise = job["promise"]
    if promise is None or promise["starts_by_s"] is None or job["status"] != "queued":
        return why
    return f"{why}; starts by {format_minute(promise['starts_by_s'], None)} at the latest"


def make_nodes_table(nodes: Sequence[NodeView], drained_node_names: Sequence[str]) -> Table:
    """Return a table with a row per node: whether it is drained, and its jobs.

    Drained nodes that have left the cluster are the last rows.
    """
    cells: Cells = {
        "takes": _describe_acceptance,
        "busy": lambda node: f"{len(node['busy'])} of {len(node['free_bytes'])}",
        "jobs": lambda node: ", ".join(node["jobs"]) or "-",
        "maintenance": _describe_next_maintenance,
    }
    columns = select_columns("nodes")
    table = draw_table(columns, nodes, cells)
    for name in {*drained_node_names} - {node["name"] for node in nodes}:
        away = {"name": name, "takes": "nothing new", "busy": "away"}
        table.add_row(*(column.show(away) for column in columns))
    return table


def make_teams_table(teams: Sequence[TeamView]) -> Table:
    """Return a table with a row per team and user, in fair-share order; usage above the share is red."""
    rows: list[Row] = []
    for team in teams:
        over = team["used_share"] > team["share"] > 0
        rows.append({**team, "style": "red" if over else ""})
        for user in team["users"]:
            rows.append({**user, "name": f"  {user['name'] or '(nobody)'}"})
    columns = select_columns("teams")
    share = next(column for column in columns if column.key == "used_share")
    cells: Cells = {"used_share": lambda row: Text(share.show(row), style=row.get("style", ""))}
    return draw_table(columns, rows, cells)


def _describe_next_maintenance(node: NodeView) -> str:
    """Return when the node's next maintenance is, as text; "" without one."""
    for begin_s, end_s in node["maintenance"]:
        if end_s > time.time():
            return f"{format_minute(begin_s, None)} to {format_minute(end_s, None)}"
    return "-"


def _describe_acceptance(node: NodeView) -> str:
    """Return text on whether the node accepts jobs; for a suspended device, until when it accepts
    none.
    """
    if node["drained"]:
        return "nothing new"
    errors = node.get("driver_errors", [])  # an older service has none
    if all(errors) and len(set(errors)) == 1:
        return f"nothing: the driver cannot be read ({errors[0]})"
    closed = [
        f"nothing on device {index}, which cannot be read ({error})"
        for index, error in enumerate(errors)
        if error
    ]
    closed += [
        f"nothing on {'it' if entry['device'] is None else 'device ' + str(entry['device'])}"
        f" until {format_minute(entry['until_s'], None)}: {entry['reason']}"
        for entry in node["suspended"]
    ]
    return "; ".join(closed) or "what comes"
