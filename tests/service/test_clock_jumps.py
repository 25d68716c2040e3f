"""A service whose clock jumps by an hour, to and fro, in a world that fails: no job is lost or run twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.events import Event, Finished, Released
from orchestrator.specs.job_record import JobStatus
from tests.scheduling.world import CLUSTERS, MortalBackend, script, settled

JUMPS_S = (-3600.0, 0.0, 3600.0)
JOBS, TURNS, TURN_S = 12, 2000, 60.0
WORLD = {
    FailureKind.NODE_LOST: 0.1,
    FailureKind.PREEMPTED: 0.15,
    FailureKind.HUNG: 0.1,
    FailureKind.STARTUP: 0.1,
}


class JumpingWorld(MortalBackend):
    """The simulated world, seen by a clock that is wrong by `offset_s`."""

    def __init__(self, seed: int) -> None:
        super().__init__(CLUSTERS[1], seed=seed, hazards=WORLD, repeat_chance=0.0)
        self.begin(1_700_000_000.0)
        self.offset_s = 0.0
        self.launched: list[str] = []

    def clock(self) -> float:
        return self.current_time_s() + self.offset_s

    def launch(self, action: Launch) -> None:
        self.launched.append(action.attempt.name)
        super().launch(action)

    def await_events(self, timeout_s: float) -> Sequence[Event]:
        return [
            replace(event, at_s=event.at_s + self.offset_s)
            for event in super().await_events(timeout_s)
        ]


@pytest.mark.parametrize("seed", range(12))
def test_every_job_ends_once_on_devices_of_its_own_however_the_clock_jumps(
    tmp_path: Path, seed: int
) -> None:
    drawn, world = random.Random(seed), JumpingWorld(seed)
    retries = {"node": 64, "startup": 64, "hang": 64, "preemption": 64}
    with closing(Journal(f"sqlite:///{tmp_path}/journal.db")) as journal:
        controller = Controller(journal, world, world.clock)
        submitted = [
            controller.submit(script(f"job{number}", retries=retries)) for number in range(JOBS)
        ]
        for _ in range(TURNS):
            if settled(controller.state):
                break
            if drawn.random() < 0.2:
                world.offset_s = drawn.choice(JUMPS_S)
            controller.run_once(TURN_S)
            devices = [
                (part.node, device)
                for job in controller.state.jobs.values()
                for attempt in job.attempts
                if not attempt.released
                for part in attempt.placement
                for device in part.devices
            ]
            assert len(devices) == len(set(devices)), "two attempts hold one device"
        jobs = [controller.find_job(job_id) for job_id in submitted]
        assert [job.status for job in jobs] == [JobStatus.SUCCEEDED] * JOBS
        assert len(world.launched) == len(set(world.launched))
        for kind in (Finished, Released):
            ends = [
                (event.job_id, event.number)
                for event in journal.iterate_events()
                if isinstance(event, kind)
            ]
            assert sorted(ends) == sorted(
                (job.id, attempt.number) for job in jobs for attempt in job.attempts
            )
