"""A simulated `Backend`: its own clock, hidden true memory peaks, every fault, all from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from orchestrator.backends.attempts.progress import ANOTHER_PACE, PACE_STEPS
from orchestrator.backends.simulated.nature import Hidden, Nature, Span, stream
from orchestrator.backends.simulated.process import Process, evidence_of
from orchestrator.backends.simulated.sharing import NO_SHARING, Sharing
from orchestrator.scheduling.base.migration import saves_on_request
from orchestrator.scheduling.failures.observation import ran_out
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import LEARNED_STEPS, Attempt, AttemptStatus, Device, FailureKind
from orchestrator.specs.cluster import ClusterSpec, Node, idle_nodes
from orchestrator.specs.events import Event, Finished, NodesSeen, PaceReported, Released, Started
from orchestrator.specs.fault import FaultKind
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace

NODE_DOWN_S = (30.0, 900.0)
REPEAT_S = (0.0, 120.0)
OOM_WITHIN_STEPS = 3  # the peak of a training comes in its first steps
ROUNDING_S = 1e-6
FOREIGN_S = (10.0, 300.0)  # how long another process keeps the memory that it took

REHEARSED = {
    FaultKind.OOM: FailureKind.DEVICE_OOM,
    # a SIGKILL without a kernel counter says no more than this
    FaultKind.KILL: FailureKind.PREEMPTED,
    FaultKind.NODE: FailureKind.NODE_LOST,
    FaultKind.PREEMPT: FailureKind.PREEMPTED,
    FaultKind.HANG: FailureKind.HUNG,
}


class SimulatedBackend:
    """Simulated cluster whose clock jumps from event to event. Nothing sleeps or blocks."""

    def __init__(
        self,
        cluster: ClusterSpec,
        *,
        seed: int,
        hazards: Mapping[FailureKind, float],
        repeat_chance: float,
        nature: Nature | None = None,
        sharing: Sharing = NO_SHARING,
    ) -> None:
        """`hazards` are chances per attempt (user errors: per job), `repeat_chance` that of an event told twice.

        `nature` knows the true step times and peaks; None: they are drawn for each family. With `sharing` the cluster
        is that of `add_guests`: an attempt holds its planned bytes of a card.
        """
        own_causes = {FailureKind.DEVICE_OOM, FailureKind.CANCELLED}
        assert not own_causes & set(hazards), hazards
        self._seed = seed
        self._nature = nature or Hidden(seed)
        self._hazards = hazards
        self._repeat_chance = repeat_chance
        self._sharing = sharing
        self._nodes = idle_nodes(cluster)
        self._policy = cluster.policy
        self._memory_bytes = {node.name: node.device.memory for node in self._nodes}
        self._down: set[str] = set()
        self._processes: dict[str, Process] = {}
        self._running: dict[str, Process] = {}  # those of them that have not ended
        # by our attempts, by node and device
        self._used_bytes: Counter[tuple[str, int]] = Counter()
        # of attempts on cards that may be shared: seconds at full speed, and what then happens
        self._ends: dict[str, tuple[float, Callable[[], object]]] = {}
        self._checkpoints: dict[str, int] = {}  # newest complete step by job
        self._foreign_bytes: dict[
            tuple[str, int], int
        ] = {}  # held by other processes, by node and device
        self._now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = itertools.count()
        self._watched: set[str] = set()
        self._outbox: list[Event] = []
        self._told_nodes: tuple[Node, ...] | None = None
        self._nodes_changed = True
        self._repeats = self._stream("repeats")

    @property
    def processes(self) -> Mapping[str, Process]:
        """Every attempt ever launched, by name, in order of launch."""
        return self._processes

    @property
    def is_busy(self) -> bool:
        """Whether any event is still to come without a further call."""
        return bool(self._agenda or self._outbox)

    def now(self) -> float:
        """Return the simulated seconds since the start, which is the controller's clock."""
        return self._now_s

    def launch(self, action: Launch) -> None:
        """Start an attempt, or resume watching it where it already runs."""
        self.adopt(action.job, action.attempt)

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Watch an attempt and repeat its events; start it if it never began."""
        self._watched.add(attempt.name)
        process = self._processes.get(attempt.name)
        if process is None and attempt.status is AttemptStatus.ENDED:
            self._tell(Released(job_id=job.id, number=attempt.number, at_s=self._now_s))
        elif process is None:
            self._begin(job, attempt)
        else:
            self._retell(process)

    def stop(self, action: Stop) -> None:
        """End an attempt within its grace period; it may end by itself before."""
        process = self._processes.get(action.name)
        if process is not None and process.evidence is None:
            delay_s = action.grace_s * self._uniform(self._nature.stop_share, "stop", action.name)
            step = None
            if self._nature.save_s:  # it trains no more
                step = self._step_of(process)
                delay_s += self._nature.save_s
            self._after(delay_s, partial(self._end, process, FailureKind.CANCELLED, step))

    def events(self, timeout_s: float) -> Sequence[Event]:
        """Advance the clock to the next events, at most `timeout_s`, and return them."""
        until_s = self._now_s + timeout_s
        self._tell_nodes()
        while not self._outbox and self._agenda and self._agenda[0][0] <= until_s:
            at_s, _, happen = heapq.heappop(self._agenda)
            self._now_s = max(self._now_s, at_s)
            happen()
            self._tell_nodes()
        if not self._outbox:
            self._now_s = until_s
        events = self._outbox
        self._outbox = []
        return events

    def wake(self) -> None:
        """Do nothing: the simulated clock waits for nobody."""

    def close(self) -> None:
        """Drop listeners and undelivered events; running attempts continue."""
        self._watched.clear()
        self._outbox.clear()
        self._told_nodes = None
        self._nodes_changed = True

    def _begin(self, job: Job, attempt: Attempt) -> None:
        estimate = attempt.estimate
        nature = self._nature
        around_bytes = estimate.device_bytes - estimate.allocated_bytes
        capacity_bytes = (
            min(self._memory_bytes[part.node] for part in attempt.placement) - around_bytes
        )
        process = Process(
            job=job,
            attempt=attempt,
            first_step=0
            if attempt.probe
            else self._checkpoints.get(job.id, self._checkpoints.get(job.continues_from or "", 0)),
            step_s=nature.step_s(job, attempt),
            peak_bytes=nature.peak_bytes(job, attempt, capacity_bytes),
            capacity_bytes=capacity_bytes,
            launched_at_s=self._now_s,
        )
        self._processes[attempt.name] = self._running[attempt.name] = process
        process.held_bytes = estimate.device_bytes if self._sharing.cards else process.peak_bytes
        self._hold(process, process.held_bytes)
        self._decide(process)

    def _decide(self, process: Process) -> None:
        """Schedule the start and the end of an attempt."""
        starting_s, ending, step = self._fate(process)
        if self._down.intersection(process.nodes):
            self._after(starting_s, partial(self._end, process, FailureKind.NODE_LOST, None))
        elif ending is FailureKind.STARTUP:
            self._after(starting_s, partial(self._end, process, FailureKind.STARTUP, None))
        else:
            running_s = (step - process.first_step) * process.step_s
            if ending is FailureKind.HUNG:
                running_s += process.job.spec.hang_timeout
            meet = partial(self._meet, process, ending, step)
            self._after(starting_s, partial(self._start, process, running_s, meet))
            if not self._sharing.cards:
                self._after(starting_s + running_s, meet)

    def _fate(self, process: Process) -> tuple[float, FailureKind | None, int]:
        """Return (seconds until it starts, how it ends by itself, step after which it ends)."""
        shortest_s, longest_s = self._nature.startup_s
        fits = process.peak_bytes <= process.capacity_bytes
        if shortest_s == longest_s and fits and process.fault is None and not self._hazards:
            return shortest_s, None, process.last_step  # nothing is left to chance
        draw = self._stream("fate", process.attempt.name)
        return (draw.uniform(shortest_s, longest_s), *self._destiny(process, draw))

    def _destiny(self, process: Process, fate: random.Random) -> tuple[FailureKind | None, int]:
        first_step = process.first_step
        last_step = process.last_step
        step = fate.randint(first_step, max(first_step, last_step - 1))
        fault = process.fault
        if fault is not None:
            return REHEARSED[fault.kind], max(first_step, min(fault.step, last_step))
        if self._chance(FailureKind.STARTUP) > fate.random():
            return FailureKind.STARTUP, first_step
        if process.peak_bytes > process.capacity_bytes:
            return FailureKind.DEVICE_OOM, min(
                first_step + fate.randrange(OOM_WITHIN_STEPS), last_step
            )
        bug = self._stream("user error", process.job.id)
        if self._chance(FailureKind.USER_ERROR) > bug.random():  # at the same step in every attempt
            return FailureKind.USER_ERROR, max(
                first_step, bug.randint(0, max(0, process.last_step - 1))
            )
        for kind in FailureKind:
            if (
                kind not in (FailureKind.STARTUP, FailureKind.USER_ERROR)
                and self._chance(kind) > fate.random()
            ):
                return kind, step
        return None, last_step

    def _start(self, process: Process, running_s: float, meet: Callable[[], object]) -> None:
        """Start an attempt; on a shared card it meets its end when it has trained `running_s` at full speed."""
        if process.evidence is None:
            process.started_at_s = process.paced_at_s = self._now_s
            if self._sharing.cards:
                self._ends[process.attempt.name] = (running_s, meet)
                self._share(process)
            self._tell(process.started())
            planned_s = process.attempt.step_s
            if not 1 / ANOTHER_PACE < process.step_s / max(planned_s, 1e-9) < ANOTHER_PACE:
                self._after(PACE_STEPS * process.step_s, partial(self._pace, process, PACE_STEPS))
            if any(ran_out(attempt) for attempt in process.job.attempts):
                self._after(
                    LEARNED_STEPS * process.step_s, partial(self._pace, process, LEARNED_STEPS)
                )

    def _share(self, process: Process) -> None:
        """Set anew the rates and the ends of all that train on the cards of an attempt that starts or ends.

        A rank waits for the slowest one, so a plan of several cards is slowed as soon as one of them is shared.
        """
        training = [other for other in self._running.values() if other.started_at_s is not None]
        crowd = Counter[Device]()
        for other in training:
            crowd.update(self._cards_of(other))
        changed = self._cards_of(process)
        for other in training:
            cards = self._cards_of(other)
            if changed.isdisjoint(cards):
                continue
            other.trained_s = other.trained_until(self._now_s)
            other.paced_at_s = self._now_s
            other.rate = self._sharing.rate if any(crowd[card] > 1 for card in cards) else 1.0
            running_s, _ = self._ends[other.attempt.name]
            left_s = max(0.0, running_s - other.trained_s)
            self._after(left_s / other.rate, partial(self._meet_shared, other))

    def _cards_of(self, process: Process) -> set[Device]:
        return {self._sharing.card_of(device) for device in process.devices}

    def _meet_shared(self, process: Process) -> None:
        """Meet the attempt's end, unless its rate has changed since this was set."""
        running_s, meet = self._ends[process.attempt.name]
        if process.trained_until(self._now_s) >= running_s - ROUNDING_S:
            meet()

    def _pace(self, process: Process, steps_done: int) -> None:
        if process.evidence is None:
            self._tell(process.paced(steps_done, self._now_s))

    def _meet(self, process: Process, ending: FailureKind | None, step: int) -> None:
        """End the attempt as decided; a lost node ends every attempt on it."""
        if process.evidence is not None:
            return
        if process.attempt.probe and ending is None:
            ending = FailureKind.PROBED
        if ending is not FailureKind.NODE_LOST:
            self._end(process, ending, step)
            return
        lost = self._stream("node", process.attempt.name).choice(process.nodes)
        self._down.add(lost)
        self._nodes_changed = True
        self._after(
            self._stream("down", process.attempt.name).uniform(*NODE_DOWN_S),
            partial(self._return, lost),
        )
        for other in list(self._running.values()):
            if lost in other.nodes:
                self._end(other, FailureKind.NODE_LOST, None)

    def _return(self, node: str) -> None:
        self._down.discard(node)
        self._nodes_changed = True

    def _end(self, process: Process, ending: FailureKind | None, step: int | None) -> None:
        """End the attempt after `step`; at None, after the steps that its running time allows."""
        if process.evidence is not None:
            return
        if step is None:
            step = self._step_of(process)
        every = process.job.spec.training.checkpoint_every_steps
        saves = ending is FailureKind.CANCELLED and saves_on_request(process.job.spec)
        saved = step if saves else step - step % every
        complete = max(process.first_step, saved)
        if process.attempt.probe:  # what it leaves is no progress
            complete = 0
        if complete:
            self._checkpoints[process.job.id] = complete
        del self._running[process.attempt.name]
        if self._sharing.cards:
            self._share(process)
        process.ended_at_s = self._now_s
        process.ending = ending
        process.evidence = self._evidence(
            process,
            ending,
            step=step,
            checkpoint_step=complete or None,
            nodes_lost=tuple(name for name in process.nodes if name in self._down),
            draw=self._stream("evidence", process.attempt.name),
            at_s=self._now_s,
        )
        if ending is FailureKind.MEMORY_CONTENTION:
            self._crowd(process, process.evidence.ooms[0].foreign_bytes)
        self._tell(process.finished())
        delay_s = self._uniform(self._nature.release_s, "release", process.attempt.name)
        self._after(delay_s, partial(self._release, process))

    def _step_of(self, process: Process) -> int:
        """Return the step that a running attempt has reached."""
        steps = int(process.trained_until(self._now_s) / process.step_s)
        return min(process.first_step + steps, process.last_step - 1)

    _evidence = staticmethod(evidence_of)  # tests show other symptoms

    def _release(self, process: Process) -> None:
        process.released_at_s = self._now_s
        self._hold(process, -process.held_bytes)
        self._tell_nodes()
        self._tell(process.released())

    def _crowd(self, process: Process, foreign_bytes: int) -> None:
        """Let a foreign process occupy memory of the attempt's first device for a while."""
        device = process.devices[0]
        self._foreign_bytes[device] = foreign_bytes
        self._nodes_changed = True
        leaves_s = self._stream("foreign", process.attempt.name).uniform(*FOREIGN_S)
        self._after(leaves_s, partial(self._uncrowd, device))

    def _uncrowd(self, device: tuple[str, int]) -> None:
        self._foreign_bytes.pop(device, None)
        self._nodes_changed = True

    def _hold(self, process: Process, more_bytes: int) -> None:
        """Account for memory that an attempt takes from its devices, or gives back."""
        if more_bytes:
            self._used_bytes.update(dict.fromkeys(process.devices, more_bytes))
            self._nodes_changed = True

    def _retell(self, process: Process) -> None:
        """Repeat the process's events to a new listener, since an earlier one may have lost them."""
        if process.started_at_s is not None:
            self._tell(process.started())
        if process.evidence is not None:
            self._tell(process.finished())
        if process.released_at_s is not None:
            self._tell(process.released())

    def _tell(self, event: Started | PaceReported | Finished | Released) -> None:
        if f"{event.job_id}-{event.number}" not in self._watched:
            return
        self._outbox.append(event)
        if self._repeat_chance and self._repeats.random() < self._repeat_chance:
            self._after(self._repeats.uniform(*REPEAT_S), partial(self._tell_again, event))

    def _tell_again(self, event: Event) -> None:
        self._outbox.append(event)

    def _tell_nodes(self) -> None:
        """The live cluster, where it changed since it was last told."""
        if not self._nodes_changed:
            return
        self._nodes_changed = False
        nodes = self._live_nodes()
        if nodes != self._told_nodes:
            self._told_nodes = nodes
            event = NodesSeen(
                nodes=nodes, declared=self._nodes, policy=self._policy, at_s=self._now_s
            )
            self._outbox.append(event)

    def _live_nodes(self) -> tuple[Node, ...]:
        """Every node that is up, with what a newcomer could take of each device now."""
        nodes = []
        for node in self._nodes:
            if node.name not in self._down:
                places = [(node.name, index) for index in range(node.devices)]
                free_bytes = map(self._free_bytes, places, node.free_bytes)
                nodes.append(replace(node, free_bytes=tuple(free_bytes)))
        return tuple(nodes)

    def _free_bytes(self, place: Device, memory_bytes: int) -> int:
        """Return the bytes that a newcomer could take; 0 for a guest where nobody holds the card."""
        card = self._sharing.card_of(place)
        if place != card and not self._used_bytes[card]:
            return 0
        used_bytes = self._used_bytes[card] + self._used_bytes[self._sharing.guest_of(card)]
        return max(0, memory_bytes - used_bytes - self._foreign_bytes.get(place, 0))

    def _chance(self, kind: FailureKind) -> float:
        return self._hazards.get(kind, 0.0)

    def _after(self, delay_s: float, happen: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (self._now_s + delay_s, next(self._sequence), happen))

    def _uniform(self, span: Span, *what: str) -> float:
        """Return a random number within the span; a span of one value draws nothing."""
        low, high = span
        return low if low == high else self._stream(*what).uniform(low, high)

    def _stream(self, *what: str) -> random.Random:
        return stream(self._seed, *what)
