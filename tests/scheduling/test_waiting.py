"""The reason of a waiting job is true: what it calls free, kept or closed is so in the state that it was read from."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.peers import Peer
from orchestrator.scheduling.base.held_devices import map_held_device_to_job_id
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.reports.waiting import WaitExplainer
from orchestrator.scheduling.scheduling_pass.decide import fits_no_idle_devices
from orchestrator.specs.clock import format_local_time
from orchestrator.specs.events import DrainRequested, Event
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.order import Order
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.people import interrupted
from tests.scheduling.test_pending import NIGHTS
from tests.scheduling.test_queue import played, script, seen, submitted
from tests.scheduling.transition import history
from tests.scheduling.world import (
    MemoryJournal,
    Scenario,
    backend_of,
    play,
    random_scenario,
    random_tide,
)

SEEDS = range(4)
THREE = seen(node("a", devices=3))
LONG, WIDE = script({1: 1000.0}), script({3: 100.0})
NEEDED = re.compile(r"(\d+) free (\S+)")
FREE = re.compile(r"(\d+) (\S+) (?:is|are) free[:; ]")
KEPT = re.compile(r"kept for (\S+), which starts about (\w+ \d\d:\d\d UTC)")


def waits(scenario: Scenario) -> Iterator[tuple[State, Job, str]]:
    """Every job that waits for devices after any event of a night, with its reason."""
    journal = MemoryJournal()
    play(scenario, journal, backend_of(scenario))
    for state in (transition.state for transition in history(journal.events)):
        reasons = WaitExplainer(state)
        for job in state.jobs.values():
            is_ready = (
                job.status is JobStatus.QUEUED
                and not job.waits_for
                and job.not_before_s <= state.at_s
            )
            if is_ready and state.nodes and all(attempt.released for attempt in job.attempts):
                yield state, job, reasons.explain_wait(job)


def free_of(state: State) -> Counter[str]:
    """Free devices of the group that has most of them, by the name of the device."""
    places, free = map_held_device_to_job_id(state), Counter[str]()
    for group in group_equal_nodes(state.nodes):
        count = sum(
            (node.name, index) not in places
            for node in group.nodes
            for index in range(node.devices)
        )
        name = group.hardware.device.name
        free[name] = max(free[name], count)
    return free


def unhindered(state: State) -> State:
    """Return the state with its devices and jobs, and nothing kept, closed or set aside."""
    nodes = tuple(replace(node, maintenance=()) for node in state.nodes)
    return replace(state, nodes=nodes, drained=(), reservations=(), suspensions=())


def falsehoods(state: State, job: Job, reason: str) -> Iterator[str]:
    free, named = free_of(state), FREE.match(reason)
    if reason.startswith("waits for "):
        for count, device in NEEDED.findall(reason.partition("(")[0]):
            if free[device] >= int(count):
                yield f"{free[device]} {device} are free"
    if named and free[named[2]] != int(named[1]):
        yield f"{free[named[2]]} are free"
    if reason.startswith("waits for others of the array"):
        promised = {reservation.job_id for reservation in state.reservations}
        others = [
            other
            for other in state.jobs.values()
            if other.array == job.array and other.id != job.id
        ]
        if not any(
            other.id in promised or not all(part.released for part in other.attempts)
            for other in others
        ):
            yield "no other of the array runs or is promised anything"
    for job_id, text in KEPT.findall(reason):
        promised = [
            reservation for reservation in state.reservations if reservation.job_id == job_id
        ]
        idle = {
            (part.node, index)
            for reservation in promised
            for part in reservation.placement
            for index in part.devices
        }
        if (
            not idle - {*map_held_device_to_job_id(state)}
            or format_local_time(promised[0].start_s, "UTC") != text
        ):
            yield f"nothing free is kept for {job_id} from {text}"
    if named and not any(
        phrase in reason for phrase in ("not together", "other processes", "it ended on")
    ):
        index = make_index(unhindered(state))
        if fits_no_idle_devices(index, index.make_queue_entry(job)):
            yield "it could not start there if nothing were kept or closed"


@cache
def of_night(night: Callable[[random.Random], Scenario], seed: int) -> list[tuple[State, Job, str]]:
    return [*waits(night(random.Random(f"{night.__name__} {seed}")))]


@pytest.mark.parametrize("night", NIGHTS)
def test_no_reason_of_a_random_night_is_false(night: Callable[[random.Random], Scenario]) -> None:
    for seed in SEEDS:
        for state, job, reason in of_night(night, seed):
            assert [*falsehoods(state, job, reason)] == [], (seed, state.at_s, job.id, reason)


@pytest.mark.parametrize("seed", range(3))
def test_no_reason_of_a_night_in_which_people_step_in_is_false(seed: int) -> None:
    for state, job, reason in waits(interrupted(random_scenario(random.Random(seed)))):
        assert [*falsehoods(state, job, reason)] == [], (seed, state.at_s, job.id, reason)


@pytest.mark.parametrize("order", [Order.FIFO, *Peer])
def test_no_reason_is_false_in_any_order(order: str) -> None:
    for night in NIGHTS[1:3]:
        scenario = night(random.Random(f"{night.__name__} 0"))
        for state, job, reason in waits(
            replace(scenario, cluster=scenario.cluster.replace_order(order))
        ):
            assert [*falsehoods(state, job, reason)] == [], (state.at_s, job.id, reason)


def test_every_kind_of_reason_is_met_in_some_night() -> None:
    kinds = [
        "waits for",
        "kept for",
        "maintenance of",
        "in maintenance until",
        "nothing new",
        "together",
        "ends sooner",
    ]
    reasons = {
        reason for night in NIGHTS for seed in SEEDS for _, _, reason in of_night(night, seed)
    }
    reasons |= {reason for _, _, reason in of_night(random_tide, 11)}
    assert [kind for kind in kinds if not any(kind in reason for reason in reasons)] == []


def test_a_reservation_is_named_with_its_job_and_time() -> None:
    """Two of three devices are free, and go to job-2 once job-1 ends: job-3 would still run then."""
    events: list[Event] = [
        THREE,
        submitted(1, LONG),
        submitted(2, WIDE, 2.0),
        submitted(3, script({2: 5000.0}), 3.0),
    ]
    state, launches = played(*events)
    assert set(launches) == {"job-1"}
    assert (
        WaitExplainer(state).explain_wait(state.jobs["job-2"]) == "waits for 3 free virtual-256mib"
    )
    start = format_local_time(state.reservations[0].start_s, "UTC")
    assert WaitExplainer(state).explain_wait(state.jobs["job-3"]) == (
        f"2 virtual-256mib are free and kept for job-2, which starts about {start}"
    )


def sooner(events: list[Event], job_id: str) -> tuple[str, ...]:
    state, launches = played(*events)
    assert job_id not in launches
    return WaitExplainer(state).describe_start_and_remedies(state.jobs[job_id])


def test_the_start_of_a_job_is_told_with_the_ends_that_it_waits_for() -> None:
    first = sooner([THREE, submitted(1, LONG), submitted(2, WIDE, 2.0)], "job-2")[0]
    assert re.fullmatch(
        r"It starts Thu 00:1\d UTC at the earliest, on 3 of a, after the end of job-1\.", first
    )


def test_fewer_devices_are_proposed_where_that_many_would_start_now() -> None:
    wide = script({2: 50.0, 3: 40.0}, gpus={"min": 3, "max": 3})
    events: list[Event] = [THREE, submitted(1, LONG), submitted(2, wide, 2.0)]
    assert "With `gpus: 2` it could start now." in sooner(events, "job-2")
    narrow = wide.model_copy(update={"gpus": wide.gpus.model_copy(update={"min": 2, "max": 2})})
    assert "job-2" in played(*events[:2], submitted(2, narrow, 2.0))[1]


def test_a_shorter_run_is_proposed_where_it_would_end_before_what_the_devices_are_kept_for() -> (
    None
):
    events: list[Event] = [THREE, submitted(1, LONG), submitted(2, WIDE, 2.0)]
    lines = sooner([*events, submitted(3, script({2: 5000.0}), 3.0)], "job-3")
    assert any(
        re.match(r"A run that ends by Thu 00:1\d UTC could start now", line) for line in lines
    ), lines
    assert "job-3" in played(*events, submitted(3, script({2: 800.0}), 3.0))[1]


def test_a_drain_to_undo_and_the_end_of_a_maintenance_are_proposed() -> None:
    drained: list[Event] = [THREE, DrainRequested(node="a", at_s=0.5), submitted(1, WIDE, 2.0)]
    assert "It could start now after `orc drain NODE --undo` of a." in sooner(drained, "job-1")
    away = seen(replace(node("a", devices=1), maintenance=((1000.0, 5000.0),)))
    assert "The maintenance of a ends Thu 01:23 UTC." in sooner(
        [away, submitted(1, script({1: 2000.0}))], "job-1"
    )
