"""Gangs are placed whole, tight and regular, or not at all."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.placement import place
from orchestrator.specs.attempt import NodeDevices, Placement
from orchestrator.specs.cluster import Node
from tests.scheduling.factories import node


def cluster(free: dict[str, list[int]]) -> tuple[list[Node], dict[str, list[int]]]:
    return [node(name, devices=8) for name in free], free


ROWS: list[tuple[str, int, dict[str, list[int]], dict[str, tuple[int, ...]] | None]] = [
    ("one device", 1, {"a": [3]}, {"a": (3,)}),
    ("too few", 2, {"a": [3]}, None),
    ("none", 1, {"a": []}, None),
    ("tightest node that holds it", 2, {"a": [0, 1, 2], "b": [4, 5]}, {"b": (4, 5)}),
    ("one node before two", 3, {"a": [0, 1], "b": [0, 1, 2]}, {"b": (0, 1, 2)}),
    ("equal shares over nodes", 4, {"a": [0, 1, 2], "b": [5, 6]}, {"a": (0, 1), "b": (5, 6)}),
    ("no ragged gang", 5, {"a": [0, 1, 2], "b": [0, 1]}, None),
    ("as few nodes as possible", 8, {n: [0, 1, 2, 3] for n in "abc"}, {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}),
]


@pytest.mark.parametrize(("count", "free", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_places(count: int, free: dict[str, list[int]], expected: dict[str, tuple[int, ...]] | None) -> None:
    nodes, free = cluster(free)
    placement = place(count, nodes, lambda node, index: index in free[node.name])
    wanted: Placement | None = expected and tuple(NodeDevices(node=n, devices=d) for n, d in expected.items())
    assert placement == wanted
