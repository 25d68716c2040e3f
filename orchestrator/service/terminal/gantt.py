"""A Gantt chart of attempts: one row per node in the terminal, one lane per device as a PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orchestrator.service.commands.simulate import Outcome
from orchestrator.specs.cluster import ClusterSpec, idle_nodes
from orchestrator.specs.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from orchestrator.backends.simulated.process import Process

COLUMNS = 72
NODES_MAX = 32  # in a larger cluster a row is several nodes
BLOCKS = " ▁▂▃▄▅▆▇█"  # share of a row's devices that are busy, averaged over the column
INCHES = (12.0, 6.0)
DOTS_PER_INCH = 120
# Colour-blind safe (Okabe and Ito 2008, Color Universal Design).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


def picture(outcomes: Sequence[Outcome], cluster: ClusterSpec) -> str:
    """Busy devices per node over time, and the number of waiting jobs."""
    end_s = _end_s(outcomes)
    rows, labels = _rows(cluster)
    devices = dict.fromkeys(labels, 0)
    for node in idle_nodes(cluster):
        devices[rows[node.name]] += node.devices
    busy = {label: [0.0] * COLUMNS for label in labels}
    for process, until_s in _ended(outcomes):
        for part in process.attempt.placement:
            held = busy[rows[part.node]]
            for column, share in _shares(process.launched_at_s, until_s, end_s):
                held[column] += share * len(part.devices)
    width = max(map(len, (*labels, "waiting")))
    lines = [f"{label:>{width}} {''.join(_block(one / devices[label]) for one in busy[label])}" for label in labels]
    waiting = [0.0] * COLUMNS
    for one in outcomes:
        for column, share in _shares(one.submitted_at_s, one.started_at_s or end_s, end_s):
            waiting[column] += share
    most = max(waiting)
    lines.append(f"{'waiting':>{width}} {''.join(_block(one / most if most else 0.0) for one in waiting)}")
    ruler = f"0{format_seconds(end_s):>{COLUMNS - 1}}"
    return "\n".join((*lines, f"{'':>{width}} {ruler}", f"{'':>{width}} at most {most:.0f} jobs wait"))


def figure(title: str, outcomes: Sequence[Outcome], cluster: ClusterSpec) -> Figure:
    """One lane per device; an attempt has its job's colour, and its launch is pale."""
    from matplotlib.figure import Figure  # mlflow depends on matplotlib; pyplot has global state, which threads share

    lanes: dict[tuple[str, int], int] = {}
    for node in idle_nodes(cluster):
        for index in range(node.devices):
            lanes[node.name, index] = len(lanes)
    drawn = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = drawn.add_subplot()
    bars: dict[tuple[int, bool], list[tuple[float, float, int]]] = {}
    for process, until_s in _ended(outcomes):
        colour, started_s = process.job.order % len(COLOURS), process.started_at_s or until_s
        for device in process.devices:
            bars.setdefault((colour, False), []).append((process.launched_at_s, started_s, lanes[device]))
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
    axes.set(xlim=(0, _end_s(outcomes) / 3600), ylim=(len(lanes) - 0.5, -0.5), xlabel="hours", ylabel="device")
    firsts = [lane for (_, index), lane in lanes.items() if index == 0]
    axes.set_yticks(firsts[:: -(-len(firsts) // NODES_MAX)])
    axes.set_title(title, loc="left", fontsize=11)
    return drawn


def _ended(outcomes: Sequence[Outcome]) -> Iterator[tuple[Process, float]]:
    return (
        (process, process.ended_at_s) for one in outcomes for process in one.attempts if process.ended_at_s is not None
    )


def _end_s(outcomes: Sequence[Outcome]) -> float:
    return max((until_s for _, until_s in _ended(outcomes)), default=1.0)


def _rows(cluster: ClusterSpec) -> tuple[dict[str, str], list[str]]:
    """The row of each node, and all rows in order."""
    names = [node.name for node in idle_nodes(cluster)]
    together = -(-len(names) // NODES_MAX)
    rows = {}
    for first in range(0, len(names), together):
        members = names[first : first + together]
        label = members[0] if len(members) == 1 else f"{members[0]}..{members[-1]}"
        rows.update(dict.fromkeys(members, label))
    return rows, list(dict.fromkeys(rows.values()))


def _shares(from_s: float, until_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    """(column, share of the column that the span covers)."""
    first, last = (COLUMNS * min(1.0, at_s / end_s) for at_s in (from_s, until_s))
    for column in range(int(first), min(COLUMNS, int(last) + 1)):
        yield column, max(0.0, min(last, column + 1) - max(first, column))


def _block(share: float) -> str:
    """The block of a share; empty only for 0."""
    return BLOCKS[0] if share <= 0 else BLOCKS[max(1, min(8, round(8 * share)))]
