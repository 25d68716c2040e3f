"""A simulated `Backend` with its own clock, on which every attempt takes the predicted time and nothing fails."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from orchestrator.backends.simulated.process import SimulatedProcess, make_evidence
from orchestrator.scheduling.base.migration import SAVE_S, saves_on_request
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import Attempt, Device, Evidence, FailureKind
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.events import Event, NodesSeen
from orchestrator.specs.job_record import Job


class SimulatedBackend:
    """Simulated cluster whose clock jumps from event to event. Nothing sleeps or blocks."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.processes: dict[
            str, SimulatedProcess
        ] = {}  # every attempt ever launched, in order of launch
        self._launch_s = cluster.launch_cost
        self._checkpoints: dict[str, int] = {}  # newest complete step by job
        self._now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = itertools.count()
        nodes = make_idle_nodes(cluster)
        self._outbox: list[Event] = [
            NodesSeen(nodes=nodes, declared=nodes, policy=cluster.policy, at_s=0.0)
        ]

    @property
    def is_busy(self) -> bool:
        """Whether any event will still happen without a further call."""
        return bool(self._agenda or self._outbox)

    def find_physical_card(self, device: Device) -> Device:
        """Return the physical card of a device: here each device is a card."""
        return device

    def current_time_s(self) -> float:
        """Return the simulated seconds since the start, which the controller uses as its clock."""
        return self._now_s

    def launch(self, action: Launch) -> None:
        """Start a simulated attempt."""
        self.adopt(action.job, action.attempt)

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Start an attempt, since none runs before the simulation begins."""
        process = self._make_process(job, attempt)
        self.processes[attempt.name] = process
        self._schedule_course(process)

    def stop(self, action: Stop) -> None:
        """Schedule the attempt's end after it has saved a checkpoint; it trains no more, but may
        end by itself before.
        """
        process = self.processes[action.name]
        if process.evidence is None:
            step = self._compute_reached_step(process)
            self._schedule(SAVE_S, partial(self._end_attempt, process, FailureKind.CANCELLED, step))

    def await_events(self, timeout_s: float) -> Sequence[Event]:
        """Advance the clock to the next events, by at most `timeout_s`, and return these events."""
        until_s = self._now_s + timeout_s
        while not self._outbox and self._agenda and self._agenda[0][0] <= until_s:
            at_s, _, happen = heapq.heappop(self._agenda)
            self._now_s = max(self._now_s, at_s)
            happen()
        if not self._outbox:
            self._now_s = until_s
        events = self._outbox
        self._outbox = []
        return events

    def wake(self) -> None:
        """Do nothing, since no thread waits on a simulated clock."""

    def close(self) -> None:
        """Do nothing, since a simulation ends with its process."""

    def _make_process(self, job: Job, attempt: Attempt) -> SimulatedProcess:
        """Return the attempt's process, which continues from the newest checkpoint of its job."""
        saved_step = self._checkpoints.get(
            job.id, self._checkpoints.get(job.continues_from or "", 0)
        )
        return SimulatedProcess(
            job=job,
            attempt=attempt,
            first_step=0 if attempt.probe else saved_step,
            step_s=self._compute_true_step_s(job, attempt),
            launched_at_s=self._now_s,
        )

    def _compute_true_step_s(self, job: Job, attempt: Attempt) -> float:  # noqa: ARG002
        """Return the seconds that an optimizer step really takes: here the scheduler's
        prediction.
        """
        return attempt.step_s

    def _schedule_course(self, process: SimulatedProcess) -> None:
        """Schedule the start and the end of an attempt."""
        running_s = (process.last_step - process.first_step) * process.step_s
        ending = FailureKind.PROBED if process.attempt.probe else None
        self._schedule(self._launch_s, partial(self._start_attempt, process))
        self._schedule(
            self._launch_s + running_s,
            partial(self._end_attempt, process, ending, process.last_step),
        )

    def _start_attempt(self, process: SimulatedProcess) -> None:
        if process.evidence is None:
            process.started_at_s = self._now_s
            self._emit(process.make_started_event())

    def _end_attempt(
        self, process: SimulatedProcess, ending: FailureKind | None, step: int
    ) -> None:
        """End the attempt after `step`, and store the checkpoint from which a restart continues."""
        if process.evidence is not None:
            return
        spec = process.job.spec
        saves = ending is FailureKind.CANCELLED and saves_on_request(spec)
        saved = step if saves else step - step % spec.training.checkpoint_every_steps
        complete = max(process.first_step, saved)
        if process.attempt.probe:  # what it leaves is no progress
            complete = 0
        if complete:
            self._checkpoints[process.job.id] = complete
        process.ended_at_s = self._now_s
        process.ending = ending
        process.evidence = self._make_evidence(
            process, ending, step=step, checkpoint_step=complete or None
        )
        self._emit(process.make_finished_event())
        self._schedule(
            self._compute_seconds_until_release(process), partial(self._release_devices, process)
        )

    def _make_evidence(
        self,
        process: SimulatedProcess,
        ending: FailureKind | None,
        *,
        step: int,
        checkpoint_step: int | None,
    ) -> Evidence:
        return make_evidence(process, ending, step, checkpoint_step, self._now_s)

    def _compute_seconds_until_release(self, process: SimulatedProcess) -> float:  # noqa: ARG002
        """Return the seconds from the end of an attempt until its devices are free."""
        return 0.0

    def _compute_reached_step(self, process: SimulatedProcess) -> int:
        """Return the step that a running attempt has reached."""
        began_s = self._now_s if process.started_at_s is None else process.started_at_s
        steps = int((self._now_s - began_s) / process.step_s)
        return min(process.first_step + steps, process.last_step - 1)

    def _release_devices(self, process: SimulatedProcess) -> None:
        process.released_at_s = self._now_s
        self._emit(process.make_released_event())

    def _emit(self, event: Event) -> None:
        self._outbox.append(event)

    def _schedule(self, delay_s: float, happen: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (self._now_s + delay_s, next(self._sequence), happen))
