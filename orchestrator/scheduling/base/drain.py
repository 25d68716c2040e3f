"""Which nodes take nothing new, from when to when, and whose maintenance ends what runs on them?"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from orchestrator.scheduling.base.migration import MOVE_GRACE_S
from orchestrator.specs.cluster import Node, Window
from orchestrator.specs.events import DrainRequested
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

ALWAYS: tuple[Window, ...] = ((-inf, inf),)


def drain_requested(state: State, event: DrainRequested) -> State:
    """The state in which the node takes nothing new, or again what comes."""
    others = set(state.drained) - {event.node}
    return replace(state, drained=tuple(sorted(others if event.undo else {*others, event.node})))


def closures(state: State) -> dict[str, tuple[Window, ...]]:
    """When nothing may run on each live node, from now on, first things first; without nodes that are always open.

    What is closed already is so since ever.
    """
    closed = {}
    for node in state.nodes:
        ahead = ((start_s, end_s) for start_s, end_s in _windows(node) if end_s > state.at_s)
        windows = tuple((-inf if start_s <= state.at_s else start_s, end_s) for start_s, end_s in ahead)
        if node.name in state.drained or windows:
            closed[node.name] = ALWAYS if node.name in state.drained else windows
    return closed


def maintained(state: State) -> frozenset[str]:
    """Live nodes that what runs must leave now."""
    return frozenset(
        node.name for node in state.nodes if any(start_s <= state.at_s < end_s for start_s, end_s in _windows(node))
    )


def next_change_s(nodes: Iterable[Node], at_s: float) -> float:
    """When the next node closes for a maintenance, or opens after one."""
    return min((s for node in nodes for window in _windows(node) for s in window if s > at_s), default=inf)


def _windows(node: Node) -> tuple[Window, ...]:
    """Its maintenance, with the time that stopping takes before each."""
    return tuple((start_s - MOVE_GRACE_S, end_s) for start_s, end_s in node.maintenance)
