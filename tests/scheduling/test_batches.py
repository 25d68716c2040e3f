"""A submission costs the same behind any queue, and a batch is one decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.scheduling_pass import quotas
from orchestrator.scheduling.scheduling_pass.decide import fits_no_idle_devices
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.scheduling_pass.quotas import LOOKED_AT_MAX
from orchestrator.specs.actions import Action, Launch
from orchestrator.specs.events import DrainRequested, Event
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.pending import Pending
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic
from tests.scheduling.test_queue import script, seen, submitted

WAITING = 200


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the waiting jobs that passes look at, from now on."""
    count = 0

    def count_looks(index: SchedulerIndex, waiting: quotas.WaitingJob) -> bool:
        nonlocal count
        count += 1
        return fits_no_idle_devices(index, waiting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quotas, "fits_no_idle_devices", count_looks)
        yield lambda: count


def behind(*before: Event) -> Scheduler:
    """Return a scheduler after these events, with a queue of jobs that wait."""
    scheduler = Scheduler(State())
    for event in before:
        scheduler.step(event)
    for number in range(100, 100 + WAITING):
        scheduler.step(submitted(number, script({2: 500.0}), 50.0 + number))
    assert len(scheduler.state.jobs) >= WAITING
    return scheduler


BUSY = submitted(1, script({2: 90_000.0}), 1.0)
MOVABLE = submitted(1, elastic({2: 90_000.0}), 1.0)
NODES = seen(node("a", devices=2), node("b", devices=2))
DRAINED = DrainRequested(node="b", undo=False, at_s=0.5)
STATES: dict[str, tuple[Event, ...]] = {
    "all busy": (seen(node("a", devices=2)), BUSY),
    "a drained node is free": (NODES, DRAINED, BUSY),
    "a drained node is free beside a movable job": (NODES, DRAINED, MOVABLE),
    "one device is free, and nobody wants one": (seen(node("a", devices=3)), BUSY),
    "one is free beside a movable job": (seen(node("a", devices=3)), MOVABLE),
}


@pytest.mark.parametrize("state", STATES)
def test_a_submission_looks_at_few_of_those_who_wait(state: str) -> None:
    scheduler = behind(*STATES[state])
    with counted() as looks:
        for number in range(1000, 1010):
            scheduler.step(submitted(number, script({2: 500.0}), 2000.0 + number))
        assert looks() <= 10 * (LOOKED_AT_MAX + 2)


@pytest.mark.parametrize("state", STATES)
def test_a_batch_is_one_decision(state: str) -> None:
    """A batch starts the jobs that submissions one by one would start, in one pass."""
    single, batch = behind(*STATES[state]), behind(*STATES[state])
    events = [
        submitted(number, script({1 if number % 5 == 0 else 2: 500.0}), 3000.0)
        for number in range(1000, 1050)
    ]
    actions = list[Action]()
    for event in events:
        actions += single.step(event)
    with counted() as looks:
        for event in events[:-1]:
            assert batch.step(replace(event, more=True)) == ()
        assert looks() == 0
        together = batch.step(events[-1])
    assert [launch.job.id for launch in together if isinstance(launch, Launch)] == [
        launch.job.id for launch in actions if isinstance(launch, Launch)
    ]
    for job in batch.state.jobs.values():
        assert job.status is not JobStatus.QUEUED or job.pending is not Pending.CLUSTER_UNSEEN


def test_a_restart_amid_a_batch_forgets_none_of_it() -> None:
    scheduler = Scheduler(State())
    scheduler.step(seen(node("a", devices=4)))
    for number in (1, 2):
        scheduler.step(replace(submitted(number, script({1: 500.0}), 3.0), more=True))
    anew = Scheduler(scheduler.state)
    launches = [
        action.job.id
        for action in anew.step(submitted(3, script({1: 500.0}), 3.0))
        if isinstance(action, Launch)
    ]
    assert launches == ["job-1", "job-2", "job-3"]
