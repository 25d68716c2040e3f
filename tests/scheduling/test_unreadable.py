"""Laws of devices that the driver cannot read: nothing new starts there, what runs goes on, and people are told why."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest
from pydantic import TypeAdapter

from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.base.shape import GangShape
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.scheduling.reports.waiting import WaitExplainer
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import NodeDevices
from orchestrator.specs.cluster import Node, describe_unreadable
from orchestrator.specs.events import Event, Started
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.pending import Pending
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_queue import gone, played, script, seen, submitted

LOST, NO_DRIVER = "GPU is lost", "NVML does not start: Driver Not Loaded"
ONE, TWO = script({1: 1000.0}), script({2: 1000.0})


def broken(name: str = "a", *errors: str) -> Node:
    """A node of two devices with these errors; by default its driver answers nothing."""
    errors = errors or (NO_DRIVER, NO_DRIVER)
    free = tuple(0 if error else 2**28 for error in errors)
    return replace(node(name), free_bytes=free, driver_errors=errors)


@pytest.mark.parametrize(
    ("spec", "errors", "places"),
    [
        (ONE, (), f"a ({NO_DRIVER})"),
        (TWO, (), f"a ({NO_DRIVER})"),
        (TWO, ("", LOST), f"device 1 of a ({LOST})"),
        (ONE, (LOST, "no answer"), f"device 0 of a ({LOST}), device 1 of a (no answer)"),
    ],
)
def test_a_job_waits_for_a_device_that_cannot_be_read_and_says_so(
    spec: object, errors: tuple[str, ...], places: str
) -> None:
    state, launches = played(seen(broken("a", *errors)), submitted(1, spec))  # type: ignore[arg-type]
    job = state.jobs["job-1"]
    assert not launches
    assert get_pending_code(job, state.at_s) is Pending.UNREADABLE
    assert describe_status(job) == f"waits for devices that cannot be read: {places}"
    assert places in WaitExplainer(state).explain_wait(job)
    assert "other processes" not in WaitExplainer(state).explain_wait(job)
    state, launches = played(seen(broken("a", *errors)), submitted(1, spec), seen(node("a")))  # type: ignore[arg-type]
    assert "job-1" in launches, "it starts as soon as the devices can be read again"


def test_a_job_takes_the_device_that_can_be_read_beside_one_that_cannot() -> None:
    _, launches = played(seen(broken("a", LOST, "")), submitted(1, ONE))
    assert launches["job-1"].placement[0].devices == (1,)


def test_a_job_that_waits_for_others_is_not_told_of_the_driver() -> None:
    state, _ = played(
        seen(node("a", devices=2)),
        submitted(1, TWO),
        submitted(2, TWO),
        seen(broken("a", "", LOST)),
    )
    assert get_pending_code(state.jobs["job-2"], state.at_s) is Pending.DEVICES


@pytest.mark.parametrize("errors", [(NO_DRIVER, NO_DRIVER), (LOST, "")])
def test_what_runs_goes_on_where_the_driver_breaks_and_nothing_follows_it_there(
    errors: tuple[str, ...],
) -> None:
    scheduler = Scheduler(State())
    events: list[Event] = [
        *(seen(node("a")), submitted(1, TWO), Started(job_id="job-1", number=1, at_s=2.0)),
        *(submitted(2, TWO), seen(broken("a", *errors))),
    ]
    for event in events:
        actions = scheduler.step(event)
        assert not any(isinstance(action, Stop) for action in actions)
    assert scheduler.state.jobs["job-1"].status is JobStatus.RUNNING
    followed = [action for event in gone(1, 2000.0) for action in scheduler.step(event)]
    assert not any(isinstance(action, Launch) for action in followed)
    assert any(
        isinstance(action, Launch)
        for action in scheduler.step(replace(seen(node("a")), at_s=2001.0))
    )


def test_devices_that_nobody_can_use_are_not_devices_that_others_hold() -> None:
    """Else the room that is kept for short jobs would keep a long one from the devices that are left, for ever."""
    (group,) = group_equal_nodes([broken("a", LOST, "")])
    pool = AvailabilityProfile(group)
    pool.occupy("a", (0,), inf)
    assert pool.find_held_at_most_from_s(0) == -inf
    pool.occupy("a", (1,), 50.0)
    assert (pool.find_held_at_most_from_s(0), pool.find_held_at_most_from_s(1)) == (50.0, -inf)


def test_since_when_a_device_cannot_be_read_is_kept_until_a_reading_shows_otherwise() -> None:
    def since(*events: tuple[float, tuple[Node, ...]]) -> list[float]:
        scheduler = Scheduler(State())
        for at_s, nodes in events:
            scheduler.step(replace(seen(node("a")), nodes=nodes, at_s=at_s))
        return [entry.since_s for entry in scheduler.state.unreadable]

    assert since((1.0, (broken("a", LOST, ""),)), (2.0, (broken("a", "other", ""),))) == [1.0]
    assert since((1.0, (broken("a", LOST, ""),)), (2.0, ()), (3.0, (broken("a", LOST, ""),))) == [
        1.0
    ], "away between"
    assert since((1.0, (broken(),)), (2.0, (node("a"),))) == []
    assert since((1.0, (broken("a", LOST, ""),)), (2.0, (broken("a", LOST, LOST),))) == [1.0, 2.0]
    assert since((1.0, (broken("b"),)), (2.0, (node("a"),))) == [], (
        "a node that is gone for good is forgotten"
    )


def test_a_node_that_an_older_version_wrote_can_be_read_whole() -> None:
    adapter = TypeAdapter(Node)
    older = json.loads(adapter.dump_json(node("a")))
    del older["driver_errors"]
    assert adapter.validate_python(older) == node("a")
    assert adapter.validate_json(adapter.dump_json(broken())) == broken()


def test_many_broken_nodes_are_told_in_a_bounded_text() -> None:
    text = describe_unreadable([broken(f"n{number}") for number in range(500)])
    assert text.endswith("and 497 more")
    assert describe_unreadable([node("a")]) == ""


def test_an_attempt_is_not_placed_again_on_a_device_that_cannot_be_read() -> None:
    (group,) = group_equal_nodes([broken("a", LOST, "")])
    pool = AvailabilityProfile(group)
    for device, until_s in ((0, 50.0), (1, 50.0)):
        pool.occupy("a", (device,), until_s)
    placement = (NodeDevices(node="a", devices=(0, 1)),)
    assert (
        pool.find_devices_without_attempt(placement, GangShape(devices=2, shares=(2,)), 100.0, 0)
        is None
    )
    again = pool.find_devices_without_attempt(
        placement, GangShape(devices=1, shares=(1,)), 100.0, 0
    )
    assert again == (NodeDevices(node="a", devices=(1,)),)
