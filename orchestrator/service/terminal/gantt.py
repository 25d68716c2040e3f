"""The Gantt chart of a simulation in the terminal: one row per node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orchestrator.service.commands.simulate import Outcome
from orchestrator.service.views.timeline import (
    COLUMNS,
    BusySpan,
    add_labels_and_ruler,
    block_character,
    draw_busy_lines,
    iterate_columns_and_covered_fractions,
)
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.units import format_seconds

if TYPE_CHECKING:
    from orchestrator.backends.simulated.process import SimulatedProcess


def draw_gantt(outcomes: Sequence[Outcome], cluster: ClusterSpec) -> str:
    """Return a text chart of the busy devices per node over time, with the number of waiting
    jobs.
    """
    ends_s = (until_s for _, until_s in _iterate_attempts_and_ends_s(outcomes))
    end_s = max(ends_s, default=1.0) or 1.0  # at least a second
    nodes = {node.name: node.devices for node in make_idle_nodes(cluster)}
    for process, _ in _iterate_attempts_and_ends_s(outcomes):
        for part in process.attempt.placement:  # a node that has left, or has joined since
            nodes.setdefault(part.node, len(part.devices))
    spans = [
        BusySpan(part.node, len(part.devices), process.launched_at_s, until_s)
        for process, until_s in _iterate_attempts_and_ends_s(outcomes)
        for part in process.attempt.placement
    ]
    lines = draw_busy_lines(nodes, spans, 0.0, end_s)
    waiting = [0.0] * COLUMNS
    for outcome in outcomes:
        for column, share in iterate_columns_and_covered_fractions(
            outcome.submitted_at_s,
            end_s if outcome.started_at_s is None else outcome.started_at_s,
            0.0,
            end_s,
        ):
            waiting[column] += share
    most = max(waiting)
    lines["waiting"] = "".join(block_character(count / most if most else 0.0) for count in waiting)
    return add_labels_and_ruler(lines, "0", format_seconds(end_s), f"at most {most:.0f} jobs wait")


def _iterate_attempts_and_ends_s(
    outcomes: Sequence[Outcome],
) -> Iterator[tuple[SimulatedProcess, float]]:
    return (
        (process, process.ended_at_s)
        for outcome in outcomes
        for process in outcome.attempts
        if process.ended_at_s is not None
    )
