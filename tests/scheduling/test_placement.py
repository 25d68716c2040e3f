"""Gangs are placed whole, tight and regular, or not at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.base.shape import find_gang_shape
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.specs.attempt import NodeDevices, Placement
from orchestrator.specs.choices import Engine, ParallelLayout
from orchestrator.specs.plan import Plan
from tests.scheduling.factories import node


def pool(idle: dict[str, list[int]]) -> AvailabilityProfile:
    """Nodes of eight devices of which only these are idle."""
    (group,) = group_equal_nodes([node(name, devices=8) for name in idle])
    made = AvailabilityProfile(group)
    for name, devices in idle.items():
        made.occupy(
            name, [device for device in range(8) if device not in devices], expected_end_s=100.0
        )
    return made


ROWS: list[tuple[str, int, dict[str, list[int]], dict[str, tuple[int, ...]] | None]] = [
    ("one device", 1, {"a": [3]}, {"a": (3,)}),
    ("too few", 2, {"a": [3]}, None),
    ("none", 1, {"a": []}, None),
    ("tightest node that holds it", 2, {"a": [0, 1, 2], "b": [4, 5]}, {"b": (4, 5)}),
    ("one node before two", 3, {"a": [0, 1], "b": [0, 1, 2]}, {"b": (0, 1, 2)}),
    ("equal shares over nodes", 4, {"a": [0, 1, 2], "b": [5, 6]}, {"a": (0, 1), "b": (5, 6)}),
    ("no ragged gang", 5, {"a": [0, 1, 2], "b": [0, 1]}, None),
    (
        "as few nodes as possible",
        8,
        {n: [0, 1, 2, 3] for n in "abc"},
        {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)},
    ),
]


@pytest.mark.parametrize(
    ("count", "free", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_places(
    count: int, free: dict[str, list[int]], expected: dict[str, tuple[int, ...]] | None
) -> None:
    plan = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=count), micro_batch_size=1)
    shape = find_gang_shape(plan, 8, len(free))
    assert shape is not None or expected is None
    placement = pool(free).find_devices_now(shape, 10.0, 0) if shape is not None else None
    wanted: Placement | None = expected and tuple(
        NodeDevices(node=n, devices=d) for n, d in expected.items()
    )
    assert placement == wanted


@given(st.lists(st.sampled_from("xyz"), min_size=2, max_size=8), st.integers(2, 6), st.data())
def test_a_gang_of_several_nodes_spans_as_few_racks_as_it_can(
    racks: str, nodes: int, data: st.DataObject
) -> None:
    """Whatever is idle: no other choice of as many nodes spans fewer."""
    idle = {f"n{number}": data.draw(st.sampled_from([[], [0, 1]])) for number in range(len(racks))}
    (group,) = group_equal_nodes(
        [replace(node(name, devices=2), rack=rack) for name, rack in zip(idle, racks, strict=True)]
    )
    made = AvailabilityProfile(group)
    for name, devices in idle.items():
        made.occupy(
            name, [device for device in range(2) if device not in devices], expected_end_s=100.0
        )
    plan = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=2 * nodes), micro_batch_size=1)
    shape = find_gang_shape(plan, 2, len(racks))
    placement = made.find_devices_now(shape, 10.0, 0) if shape is not None else None
    rack_of = dict(zip(idle, racks, strict=True))
    choices = [
        [rack_of[name] for name in chosen]
        for chosen in combinations([n for n in idle if idle[n]], nodes)
    ]
    fewest = min((len(set(choice)) for choice in choices), default=None)
    assert (
        None if placement is None else len({rack_of[part.node] for part in placement})
    ) == fewest


def test_tensor_parallel_ranks_stay_inside_a_node() -> None:
    """Four ranks in two pairs: three idle devices here and three there hold a pair each, whatever else is idle."""
    plan = Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(pp=2, tp=2),
        micro_batch_size=1,
        gradient_accumulation_steps=2,
    )
    shape = find_gang_shape(plan, 8, 4)
    assert shape is not None
    assert pool({"a": [0, 1, 2], "b": [1, 2, 3]}).find_devices_now(shape, 10.0, 0) == (
        NodeDevices(node="a", devices=(0, 1)),
        NodeDevices(node="b", devices=(1, 2)),
    )
    assert pool({"a": [0, 1, 2], "b": [1], "c": [1]}).find_devices_now(shape, 10.0, 0) is None
