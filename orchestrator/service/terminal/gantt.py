"""Gantt charts of attempts: one row per node in the terminal, one lane per device as a PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orchestrator.service.commands.simulate import Outcome
from orchestrator.service.views.timeline import (
    COLUMNS,
    NODES_MAX,
    BusySpan,
    add_ruler,
    block,
    busy_lines,
    shares,
)
from orchestrator.specs.cluster import ClusterSpec, idle_nodes
from orchestrator.specs.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from orchestrator.backends.simulated.process import Process

INCHES = (12.0, 6.0)
DOTS_PER_INCH = 120
# Colour-blind safe (Okabe and Ito 2008, Color Universal Design).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


def picture(outcomes: Sequence[Outcome], cluster: ClusterSpec) -> str:
    """Return the busy devices per node over time, and the number of waiting jobs, as text."""
    end_s = _end_s(outcomes)
    nodes = {node.name: node.devices for node in idle_nodes(cluster)}
    for process, _ in _ended_attempts(outcomes):
        for part in process.attempt.placement:  # a node that has left, or has joined since
            nodes.setdefault(part.node, len(part.devices))
    spans = [
        BusySpan(part.node, len(part.devices), process.launched_at_s, until_s)
        for process, until_s in _ended_attempts(outcomes)
        for part in process.attempt.placement
    ]
    lines = busy_lines(nodes, spans, 0.0, end_s)
    waiting = [0.0] * COLUMNS
    for outcome in outcomes:
        for column, share in shares(
            outcome.submitted_at_s,
            end_s if outcome.started_at_s is None else outcome.started_at_s,
            0.0,
            end_s,
        ):
            waiting[column] += share
    most = max(waiting)
    lines["waiting"] = "".join(block(count / most if most else 0.0) for count in waiting)
    return add_ruler(lines, "0", format_seconds(end_s), f"at most {most:.0f} jobs wait")


def figure(title: str, outcomes: Sequence[Outcome], cluster: ClusterSpec) -> Figure:
    """Return a chart with a lane per device; an attempt has its job's colour, and its launch is pale."""
    from matplotlib.figure import (
        Figure,
    )  # mlflow depends on matplotlib; pyplot has global state, which threads share

    lanes: dict[tuple[str, int], int] = {}
    for node in idle_nodes(cluster):
        for index in range(node.devices):
            lanes[node.name, index] = len(lanes)
    chart = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = chart.add_subplot()
    bars: dict[tuple[int, bool], list[tuple[float, float, int]]] = {}
    for process, until_s in _ended_attempts(outcomes):
        colour = process.job.order % len(COLOURS)
        started_s = until_s if process.started_at_s is None else process.started_at_s
        for device in process.devices:
            lanes.setdefault(device, len(lanes))
            bars.setdefault((colour, False), []).append(
                (process.launched_at_s, started_s, lanes[device])
            )
            bars.setdefault((colour, True), []).append((started_s, until_s, lanes[device]))
    for (colour, trains), spans in bars.items():
        axes.barh(
            [lane for *_, lane in spans],
            [(until_s - from_s) / 3600 for from_s, until_s, _ in spans],
            left=[from_s / 3600 for from_s, *_ in spans],
            height=1.0,
            color=COLOURS[colour],
            alpha=1.0 if trains else 0.35,
            linewidth=0,
        )
    axes.set(
        xlim=(0, _end_s(outcomes) / 3600),
        ylim=(len(lanes) - 0.5, -0.5),
        xlabel="hours",
        ylabel="device",
    )
    firsts = [lane for (_, index), lane in lanes.items() if index == 0]
    axes.set_yticks(firsts[:: -(-len(firsts) // NODES_MAX)])
    axes.set_title(title, loc="left", fontsize=11)
    return chart


def _ended_attempts(outcomes: Sequence[Outcome]) -> Iterator[tuple[Process, float]]:
    return (
        (process, process.ended_at_s)
        for outcome in outcomes
        for process in outcome.attempts
        if process.ended_at_s is not None
    )


def _end_s(outcomes: Sequence[Outcome]) -> float:
    """Return the end of the chart: that of the last attempt, and at least a second."""
    return max((until_s for _, until_s in _ended_attempts(outcomes)), default=1.0) or 1.0
