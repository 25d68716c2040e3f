"""Drives a job to its end as the service does, on virtual devices of this machine, without Ray.

What decides (`step`), and what starts, watches and judges (`AttemptWatch`, `Launcher`), are the production's own. Only
the transport is another: launchers of this process.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.attempts.launcher import Launcher
from orchestrator.backends.attempts.nodes import NodeWatch
from orchestrator.backends.attempts.watch import AttemptWatch, WatchContext
from orchestrator.backends.local import drive as local
from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec, NodeSpec, make_idle_nodes
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.events import Event, Finished, NodesSeen, Released, Started, Submitted
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import JobFolder
from tests.backends.ray_jobs import Alone
from tests.local_cluster import LocalLaunchers, LocalNodes
from tests.processor_time import ProcessorTime

SCRIPTS = Path(__file__).parent
ATTEMPTS_MAX = 8
ATTEMPT_TIMEOUT_S = 300.0
LOOK_S = 1.0  # between two looks at the processor time


def device(memory: str) -> DeviceSpec:
    """A virtual device with so slow a link that one is always faster than two."""
    return DeviceSpec(
        name="virtual",
        kind=DeviceKind.VIRTUAL,
        memory=memory,  # type: ignore[arg-type]
        bf16_tflops=0.05,
        fp32_tflops=0.05,
        memory_bandwidth="10GB/s",  # type: ignore[arg-type]
        link_bandwidth="1MB/s",  # type: ignore[arg-type]
    )


def cluster(memory: str, devices: int = 2) -> ClusterSpec:
    """Return a cluster of one node."""
    node = NodeSpec(name="local", devices=devices, device=device(memory), host_memory="4GiB")  # type: ignore[arg-type]
    return ClusterSpec(name="local", nodes=(node,))


def card_cluster(cards: dict[str, str]) -> ClusterSpec:
    """Return a node with the cards that NVML reports under these variables; to all code they are real devices."""
    asks = (
        "from orchestrator.backends.devices import nvml; "
        "print(*(one.total_bytes for one in nvml.read_nvml().devices))"
    )
    process = subprocess.run(
        [sys.executable, "-c", asks], env={**os.environ, **cards}, capture_output=True, check=True
    )
    memory = [int(size) for size in process.stdout.split()]
    card = device("1GiB").model_copy(
        update={"name": "card", "kind": DeviceKind.CUDA, "memory": memory[0]}
    )
    node = NodeSpec(name="local", devices=len(memory), device=card, host_memory="4GiB")  # type: ignore[arg-type]
    return ClusterSpec(name="local", nodes=(node,))


class Overrun(AssertionError):
    """An attempt did not end in time; it has been stopped. The rest of the message is its log's end."""


@dataclass
class Drive:
    """A job in progress, in its own home, with a limit of an attempt's seconds and one of all processor seconds."""

    home: Path
    nodes: ClusterSpec
    attempt_timeout_s: float = ATTEMPT_TIMEOUT_S
    processor_limit_s: float = math.inf  # of all attempts together
    launcher: type[Launcher] = Launcher
    drive: local.LocalScheduler = field(default_factory=local.LocalScheduler)
    processor_s: float = 0.0  # of all attempts until now
    _clock_s: float = 0.0

    def __post_init__(self) -> None:
        self._processors = ProcessorTime(self.home)

    def run(self, spec: JobSpec, fault: Fault | None = None) -> Job:
        """The job after its last attempt; its first meets the fault. Raises Overrun."""
        nodes = make_idle_nodes(self.nodes)
        tell = self.drive.apply_event
        tell(NodesSeen(nodes=nodes, declared=nodes, at_s=0.0))
        tell(Submitted(job_id="job", order=1, spec=spec, fault=fault, at_s=0.0))
        for _ in range(ATTEMPTS_MAX):
            if not self.drive.launches:
                break
            launch = self.drive.launches[0]
            key = {"job_id": launch.job.id, "number": launch.attempt.number}
            tell(Started(**key, at_s=self._tick()))
            evidence = self._drive_attempt(launch.job, launch.attempt)
            tell(Finished(**key, evidence=evidence, at_s=self._tick()))
            tell(Released(**key, at_s=self._tick()))
            # a back-off is over
            tell(NodesSeen(nodes=nodes, declared=nodes, at_s=self._tick()))
        assert self.drive.job is not None
        return self.drive.job

    def _drive_attempt(self, job: Job, planned: Attempt) -> Evidence:
        """Drive an attempt on one node by the production's AttemptWatch; raise Overrun."""
        events: list[Event] = []
        world = WatchContext(
            home=self.home,
            python=sys.executable,
            nodes=NodeWatch(self.nodes, LocalNodes(self.nodes)),
            launchers=LocalLaunchers(self.launcher),
            clock=time.time,
            emit=events.append,
            closing=threading.Event(),
            ownership=Alone(),
            fence=None,
        )
        world.nodes.refresh()
        watch = AttemptWatch(job, planned, world)
        thread = threading.Thread(target=watch.run)
        thread.start()
        over = self._await_end(thread)
        if over:
            watch.stop(0.0)
            thread.join()
            end = log(self.home, planned.number)[-2000:]
            raise Overrun(f"attempt {planned.number} did not end in {over}: {end}")
        (finished,) = (event for event in events if isinstance(event, Finished))
        return finished.evidence

    def _await_end(self, thread: threading.Thread) -> str:
        """Wait for an attempt; return the limit that it passed, "" where it ended in time."""
        end_s = time.monotonic() + self.attempt_timeout_s
        while True:
            thread.join(LOOK_S)
            self.processor_s = self._processors.look_s()
            if not thread.is_alive():
                return ""
            if self.processor_s > self.processor_limit_s:
                return f"{self.processor_limit_s:.0f} s of processor time"
            if time.monotonic() > end_s:
                return f"{self.attempt_timeout_s:.0f} s"

    def _tick(self) -> float:
        self._clock_s += 1000.0
        return self._clock_s


def checkout(name: str, folder: Path) -> Path:
    """Return a fresh copy of a trainer, like a user's clone."""
    shutil.copytree(SCRIPTS / name, folder)
    return folder


def log(home: Path, number: int, rank: int = 0) -> str:
    """Return the output of an attempt's process."""
    return JobFolder(home, "job").attempt(number).log(rank).read_text()


def story(job: Job) -> list[str]:
    """Return the outcome of every attempt, for assertions and their messages."""
    return [
        str(attempt.failure.kind) if attempt.failure else "finished" for attempt in job.attempts
    ]
