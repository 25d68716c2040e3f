"""Jobs of a few lines for tests of launching, and a reader of a backend's events."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from orchestrator.backends.ports import Backend
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import Attempt, NodeDevices, Placement
from orchestrator.specs.choices import Engine, ParallelLayout
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec, NodeSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.events import Event, Finished, NodesSeen, Released, Started
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.run import AttemptFolder, JobFolder

DEADLINE_S = 60.0
MIB = 2**20
PROGRAM = Path(__file__).parent / "rank_program.py"
Found = TypeVar("Found")

DEVICE = DeviceSpec(
    name="virtual-256mib",
    kind=DeviceKind.VIRTUAL,
    memory="256MiB",  # type: ignore[arg-type]
    bf16_tflops=0.05,
    fp32_tflops=0.05,
    memory_bandwidth="10GB/s",  # type: ignore[arg-type]
    link_bandwidth="1GB/s",  # type: ignore[arg-type]
)
FAKE_GPU = DEVICE.model_copy(
    update={"name": "fake-h200", "kind": DeviceKind.CUDA, "memory": 1000 * MIB}
)
CLUSTER = ClusterSpec(
    name="three-virtual-and-a-gpu",
    nodes=(
        NodeSpec(name="gpu", devices=2, device=FAKE_GPU, host_memory="4GiB"),  # type: ignore[arg-type]
        NodeSpec(name="n", count=3, devices=2, device=DEVICE, host_memory="4GiB"),  # type: ignore[arg-type]
    ),
)
BOTH = (NodeDevices(node="n0", devices=(0, 1)), NodeDevices(node="n1", devices=(0, 1)))
ONE = (NodeDevices(node="n0", devices=(0,)),)


class Alone:
    """The ownership of a journal that no other service wants."""

    fence = None

    def confirm_ownership(self, *, may_wait: bool = True) -> None:  # noqa: ARG002
        return


def script(*behaviours: str, **changes: object) -> JobSpec:
    """A job whose rank `r` does what `behaviours[r]` says; see rank_program.py. The guard is not in its way."""
    spec = {
        "name": "ranks",
        "command": (str(PROGRAM), *behaviours),
        "global_batch_size": 1,
        **changes,
    }
    return JobSpec.model_validate(spec)


def launch_of(job_id: str, spec: JobSpec, placement: Placement = ONE, number: int = 1) -> Launch:
    """The action that starts attempt `number` of `spec`."""
    world_size = sum(len(part.devices) for part in placement)
    estimate = MemoryEstimate(
        moment="-", by_cause=(), allocated_bytes=0, reserved_bytes=0, device_bytes=0
    )
    attempt = Attempt(
        job_id=job_id,
        number=number,
        plan=Plan(engine=Engine.SCRIPT, micro_batch_size=1, layout=ParallelLayout(dp=world_size)),
        placement=placement,
        device=DEVICE.name,
        estimate=estimate,
        correction=1.0,
        step_s=0.1,
        launched_at_s=0.0,
    )
    return Launch(
        job=Job(id=job_id, spec=spec, order=0, submitted_at_s=0.0, attempts=(attempt,)),
        attempt=attempt,
    )


def until(
    condition: Callable[[], Found | None], what: str, deadline_s: float = DEADLINE_S
) -> Found:
    """The first true answer of `condition`; fails the test after `deadline_s`."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline_s} s: {what}")


@dataclass(slots=True)
class Reader:
    """The reader of a backend, with all events so far."""

    backend: Backend
    received: list[Event] = field(default_factory=list)

    def poll(self, timeout_s: float = 0.1) -> None:
        self.received += self.backend.await_events(timeout_s)

    def find(self, launch: Launch, kind: type[Found]) -> Found | None:
        for event in self.received:
            if isinstance(event, kind) and (event.job_id, event.number) == _key(launch):  # type: ignore[attr-defined]
                return event
        return None

    def wait(self, launch: Launch, kind: type[Found], deadline_s: float = DEADLINE_S) -> Found:
        def poll_once() -> Found | None:
            self.poll()
            return self.find(launch, kind)

        return until(poll_once, f"{kind.__name__} of {launch.attempt.name}", deadline_s)

    def await_nodes(self) -> None:
        """Wait until nodes were told, and forget that there were none before."""

        def has_nodes() -> bool:
            self.poll()
            return any(isinstance(event, NodesSeen) and event.nodes for event in self.received)

        until(has_nodes, "nodes")
        self.received = [
            event for event in self.received if not isinstance(event, NodesSeen) or event.nodes
        ]

    def forget(self, launch: Launch) -> None:
        """Drop the events of `launch`, as if none had come yet."""
        self.received = [
            event for event in self.received if getattr(event, "job_id", None) != launch.job.id
        ]

    def await_start(self, launch: Launch) -> Started:
        return self.wait(launch, Started)

    def await_end(self, launch: Launch) -> Finished:
        """The end, once its devices are released too."""
        self.wait(launch, Released)
        return self.wait(launch, Finished)


def _key(launch: Launch) -> tuple[str, int]:
    return launch.job.id, launch.attempt.number


def folder_of(home: Path, launch: Launch) -> AttemptFolder:
    return JobFolder(home, launch.job.id).attempt(launch.attempt.number)


def first_line(folder: AttemptFolder, rank: int) -> dict[str, object]:
    """Return the first line of rank_program.py: pid, environment, working directory."""

    def line() -> dict[str, object] | None:
        try:
            return json.loads(folder.log(rank).read_text().splitlines()[0])
        except (OSError, IndexError, ValueError):
            return None

    return until(line, f"first line of rank {rank}")


def alive(pids: Sequence[int]) -> list[int]:
    """Return the `pids` that run (a zombie does not)."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            running.append(pid)
    return running


def descendants_of(folder: AttemptFolder, ranks: Sequence[int]) -> list[int]:
    """Pids of the ranks and of the daemons that they started."""
    pids = []
    for rank in ranks:
        first = first_line(folder, rank)
        pids += [
            int(str(first["pid"])),
            *([int(str(first["child"]))] if first.get("child") else []),
        ]
    assert all(pid != os.getpid() for pid in pids)
    return pids


def launcher_hosts() -> list[int]:
    """Return the processes of this machine's launchers under Ray, by the title that Ray gives them."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().startswith(b"ray::LauncherHost"):
                pids.append(int(entry.name))
    return pids


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
