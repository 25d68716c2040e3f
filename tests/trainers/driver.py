"""Drives a job to its end as the service does, on virtual devices of this machine, without Ray.

What decides (`step`), what is started (`launch_request`), who starts and watches it (`Launcher`, `Progress`), and what
is made of its end (`collect`, `classify`) are the production's own. Only the transport is not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.attempts.evidence import Ending, collect, write_ending
from orchestrator.backends.attempts.launch_request import LaunchNode, started_ranks
from orchestrator.backends.attempts.launcher import Launcher, free_port, write_durably
from orchestrator.backends.attempts.progress import Progress
from orchestrator.backends.attempts.script_output import output_folder
from orchestrator.backends.attempts.watch import PROBE_GRACE_S, request_of, write_files
from orchestrator.scheduling.step import step
from orchestrator.specs.actions import Launch, Record
from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.cluster import ClusterSpec, DeviceKind, DeviceSpec, NodeSpec, idle_nodes
from orchestrator.specs.events import Event, Finished, NodesSeen, Released, Started, Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import JobFolder
from orchestrator.specs.state import State

SCRIPTS = Path(__file__).parent
ATTEMPTS_MAX = 8
ATTEMPT_TIMEOUT_S = 300.0
TICK_S = 0.25
MARKED = "driver"


def device(memory: str) -> DeviceSpec:
    """A virtual device behind so slow a link that one of them is always faster than two."""
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
    """One node."""
    node = NodeSpec(name="local", devices=devices, device=device(memory), host_memory="4GiB")  # type: ignore[arg-type]
    return ClusterSpec(name="local", nodes=(node,))


def card_cluster(cards: dict[str, str]) -> ClusterSpec:
    """One node with the cards that NVML names under these variables: real devices, as far as anybody can tell."""
    asks = "from orchestrator.backends import nvml; print(*(one.total_bytes for one in nvml.devices().devices))"
    said = subprocess.run([sys.executable, "-c", asks], env={**os.environ, **cards}, capture_output=True, check=True)
    memory = [int(each) for each in said.stdout.split()]
    one = device("1GiB").model_copy(update={"name": "card", "kind": DeviceKind.CUDA, "memory": memory[0]})
    node = NodeSpec(name="local", devices=len(memory), device=one, host_memory="4GiB")  # type: ignore[arg-type]
    return ClusterSpec(name="local", nodes=(node,))


@dataclass
class Drive:
    """A job on its way, in a home of its own."""

    home: Path
    nodes: ClusterSpec
    state: State = field(default_factory=State)
    job: Job | None = None
    _waiting: list[Launch] = field(default_factory=list)
    _clock_s: float = 0.0

    def run(self, spec: JobSpec) -> Job:
        """The job after its last attempt."""
        nodes = idle_nodes(self.nodes)
        self._tell(NodesSeen(nodes=nodes, declared=nodes, at_s=0.0))
        self._tell(Submitted(job_id="job", order=1, spec=spec, at_s=0.0))
        for _ in range(ATTEMPTS_MAX):
            if not self._waiting:
                break
            launch = self._waiting.pop(0)
            key = {"job_id": launch.job.id, "number": launch.attempt.number}
            self._tell(Started(**key, at_s=self._tick()))
            evidence = attempt(launch.job, launch.attempt, self.home, self.nodes)
            self._tell(Finished(**key, evidence=evidence, at_s=self._tick()))
            self._tell(Released(**key, at_s=self._tick()))
            self._tell(NodesSeen(nodes=nodes, declared=nodes, at_s=self._tick()))  # a back-off is over
        assert self.job is not None
        return self.job

    def _tick(self) -> float:
        self._clock_s += 1000.0
        return self._clock_s

    def _tell(self, event: Event) -> None:
        self.state, actions = step(self.state, event)
        self._waiting += [action for action in actions if isinstance(action, Launch)]
        self.job = next((action.job for action in reversed(actions) if isinstance(action, Record)), self.job)


def attempt(job: Job, planned: Attempt, home: Path, nodes: ClusterSpec) -> Evidence:
    """One attempt on one node, as AttemptWatch leads it."""
    jobs, spec = JobFolder(home, job.id), job.spec
    folder = jobs.attempt(planned.number)
    for path in (folder.path, folder.output if planned.probe else jobs.output, jobs.checkpoints):
        path.mkdir(parents=True, exist_ok=True)
    write_durably(jobs.epoch, str(planned.number))
    node = nodes.nodes[0]
    seen = LaunchNode(name="local", address="127.0.0.1", device=node.device, devices=node.devices, cpus=2)
    request = request_of(job, planned, home, {"local": seen}, free_port(), sys.executable)
    write_files(request)
    launcher = Launcher(str(folder.path), str(jobs.epoch), planned.number, f"{folder.path}@{MARKED}")
    ((_, processes),) = request.ranks
    if request.before is not None:
        code = launcher.run_before(request.before, dict(processes[0].env), request.workdir)
        if code:
            return collect(spec, planned, jobs, Ending(launch_error=f"before: {code}"))
    started = started_ranks(spec, planned.placement)
    status = launcher.start(
        [(one.rank, one.argv, dict(one.env)) for one in processes],
        request.workdir,
        planned.plan.world_size // len(processes),
    )
    output = folder.output if planned.probe else output_folder(spec, jobs)
    progress = Progress(spec, folder, planned.plan.world_size, started, output)
    hung_for_s, stopped = None, False
    for _ in range(int(ATTEMPT_TIMEOUT_S / TICK_S)):
        if status["state"] == "ended":
            break
        status = launcher.wait(status["version"], TICK_S)
        if planned.probe and not stopped and progress.is_probed():
            stopped = True
            launcher.stop(PROBE_GRACE_S)
        if hung_for_s is None:
            hung_for_s = progress.hung_for_s(0.0, status["cpu_s"])
            if hung_for_s is not None:
                launcher.abort(0)
    else:
        launcher.abort(0)
        raise AssertionError(f"attempt {planned.number} did not end: {folder.log(0).read_text()[-2000:]}")
    ending = Ending(
        first_ended_rank=status["first_ended"][0] if status["first_ended"] else None,
        hung_for_s=hung_for_s,
        launch_error=None if status["pids"] else status["error"],
        no_program=status["no_program"],
        counts=progress.counts,
        stopped=stopped,
    )
    write_ending(folder, ending)
    return collect(spec, planned, jobs, ending)


def checkout(name: str, at: Path) -> Path:
    """A fresh copy of one of the trainers here, as a user has cloned it."""
    shutil.copytree(SCRIPTS / name, at)
    return at


def log(home: Path, number: int, rank: int = 0) -> str:
    """What a process of an attempt printed."""
    return JobFolder(home, "job").attempt(number).log(rank).read_text()


def story(job: Job) -> list[str]:
    """How every attempt ended, for assertions and their messages."""
    return [str(one.failure.kind) if one.failure else "finished" for one in job.attempts]
