"""Busy devices over time as text, one row per node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

COLUMNS = 72
NODES_MAX = 32  # in a larger cluster a row is several nodes
BLOCKS = " ▁▂▃▄▅▆▇█"  # share of a row's devices that are busy, averaged over the column


@dataclass(frozen=True, slots=True)
class BusySpan:
    """Devices of a node that an attempt occupied, with begin and end in seconds since 1970."""

    node: str
    devices: int
    from_s: float
    until_s: float


def busy_lines(
    nodes: Mapping[str, int], spans: Iterable[BusySpan], from_s: float, end_s: float
) -> dict[str, str]:
    """Return {label: block characters} of each row.

    `nodes` maps names to device counts; a node may have several rows.
    """
    rows, labels = _rows(list(nodes))
    devices = dict.fromkeys(labels, 0)
    for name, count in nodes.items():
        devices[rows[name]] += count
    busy = {label: [0.0] * COLUMNS for label in labels}
    for span in spans:
        for column, share in shares(span.from_s, span.until_s, from_s, end_s):
            busy[rows[span.node]][column] += share * span.devices
    return {
        label: "".join(block(share / max(1, devices[label])) for share in busy[label])
        for label in labels
    }


def add_ruler(lines: Mapping[str, str], first: str, last: str, note: str) -> str:
    """Return the labelled lines as text, with the two ends of time and a note below."""
    width = max(map(len, lines), default=0)
    ruler = f"{first}{last:>{COLUMNS - len(first)}}"
    return "\n".join(
        (
            *(f"{label:>{width}} {line}" for label, line in lines.items()),
            f"{'':>{width}} {ruler}",
            f"{'':>{width}} {note}",
        )
    )


def _rows(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return {node: label of its row}, and the labels from top to bottom; a row is several nodes in a large cluster."""
    together = max(1, -(-len(names) // NODES_MAX))
    rows = {}
    for first in range(0, len(names), together):
        members = names[first : first + together]
        label = members[0] if len(members) == 1 else f"{members[0]}..{members[-1]}"
        rows.update(dict.fromkeys(members, label))
    return rows, list(dict.fromkeys(rows.values()))


def shares(
    from_s: float, until_s: float, begin_s: float, end_s: float
) -> Iterator[tuple[int, float]]:
    """Yield (column, share of the column that the span covers)."""
    first, last = (
        COLUMNS * min(1.0, (at_s - begin_s) / (end_s - begin_s)) for at_s in (from_s, until_s)
    )
    for column in range(int(first), min(COLUMNS, int(last) + 1)):
        yield column, max(0.0, min(last, column + 1) - max(first, column))


def block(share: float) -> str:
    """Return the block character for a share from 0 to 1; blank only for 0."""
    return BLOCKS[0] if share <= 0 else BLOCKS[max(1, min(8, round(8 * share)))]
