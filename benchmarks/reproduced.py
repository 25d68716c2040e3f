"""Does a peer's queue, as we run it, reach the figure that the peer published? Nothing is claimed over one that misses.

A queue of the textbooks (FIFO, EASY, shortest first, earliest deadline first) has no figure of its own to reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.figure import Figure, informs, say
from benchmarks.side_by_side import measured
from orchestrator.backends.simulated.traces import read_trace
from orchestrator.specs.cluster import ClusterSpec

WITHIN_PERCENT = 2.0


@dataclass(frozen=True, kw_only=True)
class Published:
    """One figure that somebody published of a peer's queue."""

    peer: peers.Peer
    source: str  # whose, and of which input
    measure: str  # as in side_by_side.UNITS
    value: float
    unit: str
    cluster: ClusterSpec
    path: tuple[str, ...] | None  # of the input, below shared/traces; None: its format is not read


def reproduced(
    compared: Sequence[peers.Peer], published: Sequence[Published], traces: Path
) -> tuple[list[Figure], set[str]]:
    """A row for each published figure, and the names of the peers that reach none of theirs within 2 %."""
    found: list[Figure] = []
    unmet = {one.peer.name for one in published}
    for peer in compared:
        if peer.name not in unmet:
            found.append(informs(f"{peer.name}, a textbook's queue: published figures to reproduce", 0, ""))
    for one in published:
        said = f"{one.source}, {one.measure} published {one.value:g} {one.unit}".strip()
        path = None if one.path is None else traces.joinpath(*one.path)
        if path is None or not path.exists():
            missing = f"{one.peer.name}: not reproduced: {said}, its input is not in shared/traces"
            found.append(informs(missing, one.value, one.unit))
            continue
        say(f"{one.peer.name}: {one.source}")
        value = measured(peers.play(one.peer, read_trace(path), one.cluster, seed=0))[one.measure]
        percent = 100 * (value / one.value - 1)
        meets = abs(percent) <= WITHIN_PERCENT
        verdict = "reproduced" if meets else "not reproduced"
        name = f"{one.peer.name}: {verdict}: {said}, ours {value:g}, {percent:+.1f} %"
        found.append(informs(name, abs(percent), "%"))
        if meets:
            unmet.discard(one.peer.name)
    return found, unmet
