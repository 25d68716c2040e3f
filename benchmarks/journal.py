"""How fast is what must be durable, and how much does a service that has seen many jobs still hold?

The production controller on a real SQLite file; the world ends every attempt as soon as it began, so that what is
measured is deciding, keeping and telling.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.figure import Figure, at_least, at_most, informs
from orchestrator.backends.journal.journal import Journal
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import Attempt, Evidence, RankEnd
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.events import Event, Finished, NodesSeen, Released, Started
from orchestrator.specs.job_record import Job
from tests.scheduling.world import cluster, device, script

SUBMITS, CLIENTS = 4000, 40  # as many clients as the HTTP server has threads
ADMITTED, ENDED = 15_000, 80_000
BATCH = 50
QUEUED = 10_000
WIDE = cluster(("node", 16, 8, device("small", "512MiB")))
NARROW = cluster(("node", 1, 1, device("small", "512MiB")))
SPEC = script("lm", gpus=1)


class Instant:
    """A world in which every attempt succeeds at once."""

    def __init__(self, nodes: ClusterSpec) -> None:
        self._nodes = make_idle_nodes(nodes)
        self._told: list[Event] = [NodesSeen(nodes=self._nodes, declared=self._nodes, at_s=0.0)]

    def launch(self, action: Launch) -> None:
        self.adopt(action.job, action.attempt)

    def adopt(self, job: Job, attempt: Attempt) -> None:
        ranks = tuple(RankEnd(rank=rank, exit_code=0) for rank in range(attempt.plan.world_size))
        which = {"job_id": job.id, "number": attempt.number, "at_s": time.time()}
        self._told += (
            Started(**which),
            Finished(evidence=Evidence(ranks=ranks), **which),
            Released(**which),
        )

    def stop(self, action: Stop) -> None:
        raise AssertionError(action)

    def await_events(self, timeout_s: float) -> Sequence[Event]:  # noqa: ARG002
        told, self._told = self._told, []
        return told

    def wake(self) -> None:
        pass  # `await_events` never waits

    def close(self) -> None:
        pass


class Idle(Instant):
    """A world in which nothing that was begun ever ends."""

    def adopt(self, job: Job, attempt: Attempt) -> None:
        pass


def figures() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return [*_submits(Path(folder)), *_admissions(Path(folder)), *_restart(Path(folder))]


def _submits(folder: Path) -> list[Figure]:
    """Each client waits for its answer before it asks again; nothing is launched meanwhile."""
    with closing(Journal(f"sqlite:///{folder}/submits.sqlite")) as journal:
        controller = Controller(journal, Idle(NARROW), time.time)

        def client() -> None:
            for _ in range(SUBMITS // CLIENTS):
                controller.submit(SPEC)

        clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
        began_s = time.perf_counter()
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        took_s = time.perf_counter() - began_s
        assert controller.state.submitted == SUBMITS
        began_s = time.perf_counter()
        controller.submit_all([(SPEC, None)] * 1000)
        batch_s = time.perf_counter() - began_s
    return [
        at_least(f"durable submits of {CLIENTS} clients, in groups", SUBMITS / took_s, "1/s", 1000),
        informs("durable submits in a batch of 1,000", 1000 / batch_s, "1/s"),
    ]


def _admissions(folder: Path) -> list[Figure]:
    """Jobs submitted in batches, run to their ends, and archived."""
    with closing(Journal(f"sqlite:///{folder}/admissions.sqlite")) as journal:
        controller = Controller(journal, Instant(WIDE), time.time)
        controller.run_once(0.0)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        _through(controller, ADMITTED)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        first = _resident_bytes()
        _through(controller, ENDED - ADMITTED)
        last = _resident_bytes()
        assert len(journal.list_ended_jobs(1, None)) == 1
        assert not controller.state.jobs
    return [
        at_least(
            f"admission of {ADMITTED:,} jobs through controller and SQLite",
            ADMITTED / took_s,
            "1/s",
            500,
        ),
        informs("processor time of one job's admission and end", 1e3 * cpu_s / ADMITTED, "ms"),
        informs(f"memory of the service after {ENDED:,} ended jobs", last / 2**20, "MiB"),
        at_most(
            f"memory gained over the last {ENDED - ADMITTED:,} of them",
            (last - first) / 2**20,
            "MiB",
            32,
        ),
    ]


def _through(controller: Controller, jobs: int) -> None:
    for _ in range(jobs // BATCH):
        controller.submit_all([(SPEC, None)] * BATCH)
        controller.run_once(0.0)
    turns = 0
    while controller.state.jobs:
        controller.run_once(0.0)
        turns += 1
        assert turns < jobs, controller.state.jobs


def _restart(folder: Path) -> list[Figure]:
    """The service was killed: what its last snapshot lacks is decided again."""
    url = f"sqlite:///{folder}/restart.sqlite"
    with closing(Journal(url)) as journal:
        controller = Controller(journal, Idle(NARROW), time.time)
        controller.run_once(0.0)
        for _ in range(QUEUED // BATCH):
            controller.submit_all([(SPEC, None)] * BATCH)
    began_s = time.perf_counter()
    with closing(Journal(url)) as journal:
        restored = Controller(journal, Idle(NARROW), time.time).state
        took_s = time.perf_counter() - began_s
    assert restored == controller.state
    return [informs(f"restart with {QUEUED:,} queued jobs", took_s, "s")]


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
