"""The table of `orc fit`, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.service.commands.fit import FitRow
from orchestrator.service.terminal.plain_tables import make_plain_table
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.units import BINARY_UNITS, format_bytes, format_seconds

ASSUMED_HOST = "A machine is taken to have twice its cards' memory, at least 64 GiB."


def make_fit_panel(
    spec: JobSpec, rows: Sequence[FitRow], *, is_memory_assumed: bool
) -> RenderableType:
    """Return a table with a row per GPU model: for each way to train the fewest GPUs, the bytes of
    each, and the predicted seconds of a step.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    table = make_plain_table()
    table.add_column("CARD", no_wrap=True)
    for way in ways:
        table.add_column(way.upper(), no_wrap=True)
    for device in dict.fromkeys(row["device"] for row in rows):
        by_way = {row["way"]: row for row in rows if row["device"] == device}
        table.add_row(device, *(_make_fit_cell(by_way[way]) for way in ways))
    settings = (
        f"{spec.precision}, {spec.training.optimizer}, {spec.global_batch_size} samples a step"
    )
    model = spec.known_model
    if model is not None:
        settings += f", {spec.data.sequence_length} tokens a sample"
    title = spec.name
    if is_memory_assumed:
        title = str(model and model.hf)
        settings = f"assumed: {settings}; `--set` changes them"
    last = "Fewest cards of one machine, bytes of each, predicted time of a step."
    host_bytes = [row["host_bytes"] or 0 for row in rows if row["offloads"]]
    if host_bytes:
        last += (
            f" *: training state waits in host memory, up to {format_bytes(max(host_bytes))} of"
            f" it. {ASSUMED_HOST}"
        )
    most = spec.gpus.max
    if not is_memory_assumed and any((row["devices"] or 0) > most for row in rows):
        last += f" The job allows {most} (`gpus`); `--set gpus=N` allows more."
    more = "`orc plan FILE --gpu CARD` says more; `--gpu 16xCARD` plans on several machines."
    return Group(
        Text(title, style="bold"),
        Text(settings, style="dim"),
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


def _make_fit_cell(row: FitRow) -> Text:
    if row["devices"] is None or row["needed_bytes"] is None:
        return Text("-", style="red")
    mark = "*" if row["offloads"] else ""
    # Few digits: three ways with seconds stay within 80 columns.
    parts = [f"{row['devices']}x {row['needed_bytes'] / BINARY_UNITS['GiB']:.1f} GiB{mark}"]
    if row["step_s"] is not None:
        parts.append(format_seconds(float(f"{row['step_s']:.2g}")))
    if row["degradation"] != "exact":
        parts.append(str(row["degradation"]))
    return Text(" ".join(parts))
