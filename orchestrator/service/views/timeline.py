"""Busy devices over time as text, one row per node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

COLUMNS = 72
NODES_MAX = 32  # in a larger cluster a row is several nodes
BLOCKS = " ▁▂▃▄▅▆▇█"  # share of a row's devices that are busy, averaged over the column


@dataclass(frozen=True, slots=True)
class BusySpan:
    """Devices of a node that an attempt occupied, from one time to another in seconds since 1970."""

    node: str
    devices: int
    from_s: float
    until_s: float


def draw_busy_lines(
    devices_by_node: Mapping[str, int], spans: Iterable[BusySpan], from_s: float, end_s: float
) -> dict[str, str]:
    """Return {row label: block characters for the busy devices over time}.

    `devices_by_node` maps names to device counts. In a large cluster several nodes share a row.
    """
    rows, labels = _make_row_label_by_node_and_order(list(devices_by_node))
    devices = dict.fromkeys(labels, 0)
    for name, count in devices_by_node.items():
        devices[rows[name]] += count
    busy = {label: [0.0] * COLUMNS for label in labels}
    for span in spans:
        for column, share in iterate_columns_and_covered_fractions(
            span.from_s, span.until_s, from_s, end_s
        ):
            busy[rows[span.node]][column] += share * span.devices
    return {
        label: "".join(block_character(share / max(1, devices[label])) for share in busy[label])
        for label in labels
    }


def add_labels_and_ruler(
    line_by_label: Mapping[str, str], first_time: str, last_time: str, note: str
) -> str:
    """Return the lines with their labels as text, with the two ends of the time span and a note
    below.
    """
    width = max(map(len, line_by_label), default=0)
    ruler = f"{first_time}{last_time:>{COLUMNS - len(first_time)}}"
    return "\n".join(
        (
            *(f"{label:>{width}} {line}" for label, line in line_by_label.items()),
            f"{'':>{width}} {ruler}",
            f"{'':>{width}} {note}",
        )
    )


def _make_row_label_by_node_and_order(
    node_names: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """Return ({node: label of its row}, labels from top to bottom). In a large cluster several
    nodes share a row.
    """
    together = max(1, -(-len(node_names) // NODES_MAX))
    rows = {}
    for first in range(0, len(node_names), together):
        members = node_names[first : first + together]
        label = members[0] if len(members) == 1 else f"{members[0]}..{members[-1]}"
        rows.update(dict.fromkeys(members, label))
    return rows, list(dict.fromkeys(rows.values()))


def iterate_columns_and_covered_fractions(
    chart_from_s: float, chart_until_s: float, begin_s: float, end_s: float
) -> Iterator[tuple[int, float]]:
    """Yield (column of the chart, fraction of the column that the time span covers)."""
    first, last = (
        COLUMNS * min(1.0, (at_s - begin_s) / (end_s - begin_s))
        for at_s in (chart_from_s, chart_until_s)
    )
    for column in range(int(first), min(COLUMNS, int(last) + 1)):
        yield column, max(0.0, min(last, column + 1) - max(first, column))


def block_character(fraction: float) -> str:
    """Return the block character for a fraction from 0 to 1; blank only for 0."""
    return BLOCKS[0] if fraction <= 0 else BLOCKS[max(1, min(8, round(8 * fraction)))]
