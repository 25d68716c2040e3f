"""A backend that outlives the service: a folder in which each attempt is a file with its end time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import Attempt, AttemptStatus, Evidence, RankEnd
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.events import Event, Finished, NodesSeen, Released, Started
from orchestrator.specs.job_record import Job

RUNS_S = 0.03
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Run:
    """An attempt as the backend recorded it."""

    name: str
    order: int  # of its job
    devices: tuple[tuple[str, int], ...]
    began_s: float
    ends_s: float


class FolderBackend:
    """Every attempt succeeds RUNS_S after its launch, even while no service runs."""

    def __init__(self, folder: Path, cluster: ClusterSpec) -> None:
        self._folder = folder
        self._nodes = make_idle_nodes(cluster)
        self._told_nodes = False
        self._watched: dict[str, tuple[Attempt, float]] = {}
        self._outbox: list[Event] = []
        self._woken = threading.Event()

    def launch(self, action: Launch) -> None:
        self.adopt(action.job, action.attempt)

    def adopt(self, job: Job, attempt: Attempt) -> None:
        path = self._folder / f"{attempt.name}.json"
        if not path.exists() and attempt.status is not AttemptStatus.ENDED:
            _begin(path, job, attempt)
        ends_s = json.loads(path.read_text())["ends_s"] if path.exists() else 0.0
        self._watched[attempt.name] = attempt, ends_s
        self._outbox.append(Started(job_id=job.id, number=attempt.number, at_s=time.time()))

    def stop(self, action: Stop) -> None:
        raise AssertionError(f"nobody asked for the end of {action.name}")

    def await_events(self, timeout_s: float) -> Sequence[Event]:
        deadline_s = time.time() + timeout_s
        while True:
            self._look()
            if self._outbox or time.time() >= deadline_s or self._woken.is_set():
                self._woken.clear()
                events, self._outbox = self._outbox, []
                return events
            self._woken.wait(POLL_S)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._watched.clear()

    def _look(self) -> None:
        now_s = time.time()
        if not self._told_nodes:
            self._told_nodes = True
            self._outbox.append(NodesSeen(nodes=self._nodes, declared=self._nodes, at_s=now_s))
        over = [attempt for attempt, ends_s in self._watched.values() if ends_s <= now_s]
        for attempt in over:
            del self._watched[attempt.name]
            ranks = tuple(
                RankEnd(rank=rank, exit_code=0) for rank in range(attempt.plan.world_size)
            )
            which = {"job_id": attempt.job_id, "number": attempt.number, "at_s": now_s}
            self._outbox += (Finished(evidence=Evidence(ranks=ranks), **which), Released(**which))


def _begin(path: Path, job: Job, attempt: Attempt) -> None:
    """Write the file atomically; a second one of that name is an error."""
    now_s = time.time()
    devices = [(part.node, index) for part in attempt.placement for index in part.devices]
    text = {"order": job.order, "devices": devices, "began_s": now_s, "ends_s": now_s + RUNS_S}
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(text))
    os.link(draft, path)
    draft.unlink()


def runs(folder: Path) -> list[Run]:
    """Every attempt ever started, in start order."""
    started = []
    for path in folder.glob("*.json"):
        fields = json.loads(path.read_text())
        devices = tuple((node, index) for node, index in fields.pop("devices"))
        started.append(Run(name=path.stem, devices=devices, **fields))
    return sorted(started, key=lambda run: run.began_s)
