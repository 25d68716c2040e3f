"""Other people's queues, on the same simulated world as ours: same jobs, same true times, same launch cost.

All of them take jobs as their users asked for them: a fixed number of devices, with the best plan that was measured on
so many. What each knows of a job beyond that is said in `knows`.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.backends.simulated.backend import SimulatedBackend
from orchestrator.backends.simulated.traces import Arrival, Trace
from orchestrator.planning.frontier import Candidate
from orchestrator.planning.search import frontier
from orchestrator.scheduling.base.node_groups import groups_of
from orchestrator.service.commands.simulate import Simulated, Trouble, backend_for, outcomes_of, report_on
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import Attempt, NodeDevices, Placement
from orchestrator.specs.cluster import ClusterSpec, idle_nodes
from orchestrator.specs.events import Finished, Released
from orchestrator.specs.job_record import Job

BACKFILL_DEPTH = 100  # jobs that are tried behind one that waits (Slurm, bf_max_job_test)
DEMOTED_S = (
    3600.0 * 16
)  # device-seconds after which Tiresias' second queue begins, as its own simulator has it: 16 GPU-hours
ROUND_S = 60.0  # between looks of a preemptive queue (Sia, SOSP'23: the best of those tried)
FOREVER_S = 1e9


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """One job in a peer's queue."""

    job: Job
    arrival: Arrival
    devices: int
    estimate_s: float  # launch and training, as told
    attempts: int = 0
    attained_s: float = 0.0  # device-seconds of attempts that ended
    launched_at_s: float = 0.0
    placement: Placement = ()

    def attained_by(self, now_s: float) -> float:
        """Device-seconds so far."""
        return self.attained_s + (self.devices * (now_s - self.launched_at_s) if self.placement else 0.0)


Key = Callable[[Task, float], tuple[float, ...]]  # of a task at a time: smallest first


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A queue: its order, whether jobs may pass one that waits, whether it takes devices back."""

    name: str
    knows: str
    key: Key
    backfills: bool = False
    preempts: bool = False


FIFO = Peer(name="FIFO", knows="nothing", key=lambda task, _: (task.job.order,))
EASY = Peer(name="FIFO + EASY backfill", knows="told lengths", key=FIFO.key, backfills=True)
SJF = Peer(
    name="shortest job first + EASY",
    knows="told lengths",
    key=lambda task, _: (task.estimate_s, task.job.order),
    backfills=True,
)
LAS = Peer(
    name="least attained service (Tiresias, two queues)",
    knows="attained service",
    key=lambda task, now_s: (float(task.attained_by(now_s) >= DEMOTED_S), task.job.order),
    preempts=True,
)
EDF = Peer(
    name="EDF + EASY backfill",
    knows="told lengths, deadlines",
    key=lambda task, _: (task.arrival.deadline_s or FOREVER_S, task.job.order),
    backfills=True,
)


def play(peer: Peer, trace: Trace, cluster: ClusterSpec, *, seed: int) -> Simulated:
    """What became of each job of the trace under a peer's queue; its decisions with the launches that they made."""
    backend = backend_for(trace, cluster, seed=seed, trouble=Trouble())
    queue = _Queue(peer, backend, cluster)
    arrivals = deque(enumerate(trace.arrivals, start=1))
    decisions_s = list[float]()
    while arrivals or queue.waiting or queue.running:
        until_s = arrivals[0][1].at_s if arrivals else FOREVER_S
        if peer.preempts and (queue.waiting or queue.running):
            until_s = min(until_s, backend.now() + ROUND_S)
        if until_s > backend.now():
            queue.hear(until_s)
        while arrivals and arrivals[0][1].at_s <= backend.now():
            queue.add(*arrivals.popleft())
        began_s = time.perf_counter()
        queue.decide()
        decisions_s.append(time.perf_counter() - began_s)
    outcomes = outcomes_of(trace, cluster, backend.processes)
    report = report_on(trace, cluster, seed, outcomes)
    return Simulated(report=report, outcomes=outcomes, decisions_s=tuple(decisions_s))


@dataclass(kw_only=True)
class _Free:
    """How many devices are free on each node; what a gang takes of it is on as few nodes as possible."""

    counts: dict[str, int]
    per_node: int

    def find(self, devices: int) -> tuple[tuple[str, int], ...] | None:
        """(node, devices) of a gang: one node, the fullest that holds it, or equal shares of the fewest nodes."""
        nodes = -(-devices // self.per_node)
        while devices % nodes:
            nodes += 1
        share = devices // nodes
        if nodes == 1:
            holders = [(count, name) for name, count in self.counts.items() if count >= share]
            return ((min(holders)[1], share),) if holders else None
        names = [name for name, count in self.counts.items() if count >= share]
        return tuple((name, share) for name in names[:nodes]) if len(names) >= nodes else None

    def change(self, parts: Iterable[tuple[str, int]], sign: int) -> None:
        for name, count in parts:
            self.counts[name] += sign * count


@dataclass
class _Queue:
    """A peer's queue over the simulated backend."""

    peer: Peer
    backend: SimulatedBackend
    cluster: ClusterSpec
    waiting: list[Task] = field(default_factory=list)
    running: dict[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = idle_nodes(self.cluster)
        (self._group,) = groups_of(nodes)
        self._indexes = {node.name: list(range(node.devices)) for node in nodes}
        self._free = _Free(counts={node.name: node.devices for node in nodes}, per_node=nodes[0].devices)
        self._candidates: dict[tuple[object, int], Candidate] = {}

    def add(self, order: int, arrival: Arrival) -> None:
        spec = arrival.spec
        devices = arrival.rigid_devices or spec.gpus.max
        job = Job(id=f"{spec.name}-{order}", spec=spec, order=order, submitted_at_s=arrival.at_s)
        assert spec.steps is not None, "peers know jobs by their steps and speeds"
        estimate_s = self.cluster.launch_cost + spec.steps * dict(spec.speeds)[devices]
        task = Task(job=job, arrival=arrival, devices=devices, estimate_s=estimate_s)
        insort(self.waiting, task, key=lambda one: self.peer.key(one, 0.0))

    def hear(self, until_s: float) -> None:
        """What happens next, at `until_s` at the latest."""
        for event in self.backend.events(until_s - self.backend.now()):
            if isinstance(event, Finished):
                task = self.running[event.job_id]
                task.attained_s = task.attained_by(event.at_s)
            if isinstance(event, Released):
                task = self.running.pop(event.job_id)
                for part in task.placement:
                    self._indexes[part.node] += part.devices
                    self._free.counts[part.node] += len(part.devices)
                task.placement = ()
                process = self.backend.processes[f"{task.job.id}-{task.attempts}"]
                if process.ending is not None:  # preempted: its checkpoint stays
                    self.waiting.append(task)

    def decide(self) -> None:
        if self.peer.preempts:
            wanted = self._wanted()
            for task in [one for one in self.running.values() if one.job.id not in wanted]:
                self.backend.stop(Stop(job_id=task.job.id, number=task.attempts, grace_s=0.0))
            for task in [one for one in self.waiting if one.job.id in wanted]:
                self._start(task)
            return
        while self.waiting and self._start(self.waiting[0]):
            pass
        if self.waiting and self.peer.backfills:
            self._backfill(self.waiting[0])

    def _wanted(self) -> set[str]:
        """Whom the order has devices for, of those that run and those that wait."""
        now_s = self.backend.now()
        ordered = sorted((*self.waiting, *self.running.values()), key=lambda task: self.peer.key(task, now_s))
        left = len(self._free.counts) * self._free.per_node
        wanted: set[str] = set()
        for task in ordered:
            if task.devices <= left:
                left -= task.devices
                wanted.add(task.job.id)
        return wanted

    def _start(self, task: Task) -> bool:
        parts = self._free.find(task.devices)
        if parts is None:
            return False
        self._free.change(parts, -1)
        taken = []
        for name, count in parts:
            indexes = self._indexes[name]
            taken.append(NodeDevices(node=name, devices=tuple(sorted(indexes[:count]))))
            del indexes[:count]
        task.placement, task.launched_at_s = tuple(taken), self.backend.now()
        task.attempts += 1
        self.waiting.remove(task)
        self.running[task.job.id] = task
        self.backend.launch(Launch(job=task.job, attempt=self._attempt(task)))
        return True

    def _attempt(self, task: Task) -> Attempt:
        candidate = self._candidate(task)
        return Attempt(
            job_id=task.job.id,
            number=task.attempts,
            plan=candidate.plan,
            placement=task.placement,
            device=self._group.hardware.device.name,
            estimate=candidate.estimate,
            correction=1.0,
            step_s=candidate.step_s,
            launched_at_s=task.launched_at_s,
        )

    def _candidate(self, task: Task) -> Candidate:
        key = (task.job.spec.speeds, task.devices)
        if key not in self._candidates:
            found = frontier(task.job.spec, self._group.hardware).candidates
            self._candidates[key] = next(one for one in found if one.plan.world_size == task.devices)
        return self._candidates[key]

    def _backfill(self, head: Task) -> None:
        """Start those behind `head` that do not delay it (EASY: Lifka, JSSPP 1995)."""
        now_s = self.backend.now()
        then = _Free(counts=dict(self._free.counts), per_node=self._free.per_node)
        shadow_s = FOREVER_S
        for task in sorted(self.running.values(), key=lambda one: one.launched_at_s + one.estimate_s):
            then.change(_parts(task), 1)
            if then.find(head.devices) is not None:
                shadow_s = max(now_s, task.launched_at_s + task.estimate_s)
                break
        for task in self.waiting[1:BACKFILL_DEPTH]:
            parts = self._free.find(task.devices)
            if parts is None:
                continue
            if now_s + task.estimate_s > shadow_s:
                then.change(parts, -1)
                if then.find(head.devices) is None:
                    then.change(parts, 1)
                    continue
            self._start(task)


def _parts(task: Task) -> Sequence[tuple[str, int]]:
    return [(part.node, len(part.devices)) for part in task.placement]
