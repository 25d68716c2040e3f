"""The table of `orc fit`, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.service.commands.fit import FitRow
from orchestrator.service.terminal.plain_tables import make_plain_table
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.units import format_bytes, format_seconds


def make_fit_panel(
    spec: JobSpec, rows: Sequence[FitRow], *, is_memory_assumed: bool
) -> RenderableType:
    """Return a table with a row per GPU model: its memory, and the fewest GPUs and their bytes for
    each way to train.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    table = make_plain_table()
    table.add_column("CARD", no_wrap=True)
    table.add_column("HAS", justify="right", no_wrap=True)
    for way in ways:
        table.add_column(way.upper(), no_wrap=True)
    for device in dict.fromkeys(row["device"] for row in rows):
        by_way = {row["way"]: row for row in rows if row["device"] == device}
        has = format_bytes(by_way[ways[0]]["memory_bytes"])
        table.add_row(
            device,
            has,
            *(_make_fit_cell(by_way[way], shows_step_time=len(ways) == 1) for way in ways),
        )
    length = (
        f", {spec.data.sequence_length} tokens a sample" if spec.known_model is not None else ""
    )
    settings = f"{spec.precision}, {spec.training.optimizer}, {spec.global_batch_size} samples a step{length}"
    head = [
        Text(
            spec.name if not is_memory_assumed else str(spec.known_model and spec.known_model.hf),
            style="bold",
        )
    ]
    head.append(
        Text(
            f"assumed: {settings}; `--set` changes them" if is_memory_assumed else settings,
            style="dim",
        )
    )
    last = f"Fewest cards of one machine, bytes of each{', predicted time of a step' if len(ways) == 1 else ''}."
    most = spec.gpus.max
    if not is_memory_assumed and any((row["devices"] or 0) > most for row in rows):
        last += f" The job allows {most} (`gpus`); `--set gpus=N` allows more."
    more = "`orc plan FILE --gpu CARD` says more."
    return Group(
        *head,
        Text(),
        table,
        Text(),
        *_make_reason_lines(rows),
        Text(last, style="dim"),
        Text(more, style="dim"),
    )


def _make_reason_lines(rows: Sequence[FitRow]) -> list[Text]:
    """Return a line for each reason why some GPU models have no plan, with the names of these
    models.
    """
    reasons = group_values((row["why"], row["device"]) for row in rows if row["why"] is not None)
    return [
        Text(f"-  {why}: {', '.join(dict.fromkeys(devices))}") for why, devices in reasons.items()
    ]


def _make_fit_cell(row: FitRow, *, shows_step_time: bool) -> Text:
    if row["devices"] is None or row["needed_bytes"] is None:
        return Text("-", style="red")
    step = (
        f" {format_seconds(row['step_s'])}" if shows_step_time and row["step_s"] is not None else ""
    )
    kind = "" if row["degradation"] == "exact" else f" {row['degradation']}"
    return Text(f"{row['devices']}x {format_bytes(row['needed_bytes'])}{step}{kind}")
