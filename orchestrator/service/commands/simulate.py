"""`orc simulate`: runs jobs on a simulated cluster, with the production controller and the simulated backend."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from math import ceil, inf
from statistics import fmean, median
from typing import TypedDict

from orchestrator.backends.ports import Decided, EventAndDecisionText, Submission, Totals
from orchestrator.backends.simulated.backend import SimulatedBackend
from orchestrator.backends.simulated.process import SimulatedProcess
from orchestrator.backends.simulated.sharing import SharedBackend
from orchestrator.backends.simulated.traces import Arrival, Trace
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Action
from orchestrator.specs.attempt import Device
from orchestrator.specs.clock import make_deadline
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Event
from orchestrator.specs.frozen import frozen
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

FOREVER_S = 1e9
TURNS_PER_JOB = 1000  # far more than budgets allow; a world that turns more often is our bug
ROUNDING_S = 1e-3
AS_FAST = 1 + 1e-9
# below it a slowdown says nothing (Feitelson and Rudolph, JSSPP 1998: bounded slowdown)
SHORTEST_S = 10.0


@frozen
class Outcome:
    """What became of one job in a simulation: its times and its attempts."""

    name: str
    submitted_at_s: float
    started_at_s: float | None  # launch of its first attempt
    ended_at_s: float | None  # None: it did not finish
    alone_s: float  # from its launch to its end, had it had the cluster for itself
    deadline_s: float | None
    attempts: tuple[SimulatedProcess, ...]
    guaranteed: bool = False  # it asks for a promise
    # true seconds of a step as it would run as requested; None: not told
    request_step_s: float | None = None
    starts_by_s: float | None = None  # as promised; None: it was promised nothing
    trial: tuple[str | None, int] | None = None  # of a sweep: its id, and the trial's number
    job_id: str = ""  # of a job of the live queue

    @property
    def keeps_start_promise(self) -> bool:
        """Whether the job started in time, and no attempt trained slower than on the devices that
        it asked for.

        Attempts of unknown speed do not count.
        """
        if self.starts_by_s is None or self.started_at_s is None:
            return False
        slowest_s = inf if self.request_step_s is None else self.request_step_s * AS_FAST
        in_time = self.started_at_s <= self.starts_by_s + ROUNDING_S
        return in_time and all(attempt.step_s <= slowest_s for attempt in self.attempts)

    @property
    def completion_s(self) -> float:
        return inf if self.ended_at_s is None else self.ended_at_s - self.submitted_at_s

    @property
    def slowdown(self) -> float:
        """The time from submission to end, divided by the time that the job takes alone; see
        SHORTEST_S for very short jobs.
        """
        return max(1.0, self.completion_s / max(self.alone_s, SHORTEST_S))

    @property
    def lateness_s(self) -> float:
        """Seconds from the job's deadline to its end; 0 where it is in time or has no deadline."""
        if self.deadline_s is None or self.in_time:
            return 0.0
        return inf if self.ended_at_s is None else self.ended_at_s - self.deadline_s

    @property
    def in_time(self) -> bool:
        return (
            self.deadline_s is not None
            and self.ended_at_s is not None
            and self.ended_at_s <= self.deadline_s
        )


class Report(TypedDict):
    """The metrics of a simulation. Equal lists of jobs, clusters and versions give equal reports."""

    trace: str
    cluster: str
    policy: str
    objective: str
    devices: int
    jobs: int
    finished: int
    mean_completion_s: float
    median_completion_s: float
    p99_completion_s: float
    makespan_s: float
    p99_slowdown: float
    worst_slowdown: float
    gpu_hours: float
    cost: float | None  # of these hours; None where the cluster file lacks a `price_per_hour`
    utilisation: float  # of all devices until the last end
    deadlines: int
    deadlines_met: int
    mean_lateness_s: float  # of those that ended after their deadlines
    guaranteed: int  # jobs that ask for a promised speed
    promised: int  # of them those that were not refused
    promises_kept: int
    restarts: int


@frozen
class Simulated:
    """The result of a simulation: metrics, each job's outcome, and the real seconds that each
    decision took.
    """

    report: Report
    outcomes: tuple[Outcome, ...]
    decisions_s: tuple[float, ...]


class NullJournal:
    """A journal that stores and finds nothing, for a simulated service."""

    def load_state_and_events(self) -> tuple[State | None, Sequence[EventAndDecisionText]]:
        return None, ()

    def confirm_ownership(self, *, may_wait: bool = True) -> None:
        pass

    def append(self, decided: Sequence[Decided]) -> None:
        pass

    def find_submissions(self, idempotency_keys: Sequence[str]) -> Mapping[str, Submission]:  # noqa: ARG002
        return {}

    def round_trip_event(self, event: Event) -> Event:
        return event

    def describe_unreadable_rows(self) -> str | None:
        return None

    def load_live_jobs(self) -> Jobs:
        return Jobs()

    def store_snapshot(self, state: State) -> None:
        pass

    def find_ended_job(self, job_id: str) -> Job | None:  # noqa: ARG002
        return None

    def list_ended_jobs(self, jobs_max: int, before_job_id: str | None = None) -> list[Job]:  # noqa: ARG002
        return []

    def read_first_event_at_s(self) -> float | None:
        return None

    def count_rows(self) -> Totals:
        return Totals(ended={}, undelivered={}, notices={}, oldest_notices_s={})


class TimedScheduler(Scheduler):
    """A scheduler that appends the seconds that each of its steps took to the list `taken_s`."""

    def __init__(self, state: State, taken_s: list[float]) -> None:
        super().__init__(state)
        self._taken_s = taken_s

    def step(self, event: Event) -> tuple[Action, ...]:
        begin_s = time.perf_counter()
        actions = super().step(event)
        self._taken_s.append(time.perf_counter() - begin_s)
        return actions


def simulate_trace(
    trace: Trace, cluster: ClusterSpec, shared_card_rate: float | None = None
) -> Simulated:
    """Simulate the trace on the cluster until nothing more can happen, and return the result.

    Outcomes are in the order of submission. Later trials of a sweep are submitted as soon as the
    sweep allows. With `shared_card_rate` two one-device jobs share a card if their planned bytes
    fit; each then runs at this share of its full speed. No service shares a card yet.
    """
    backend = (
        SimulatedBackend(cluster)
        if shared_card_rate is None
        else SharedBackend(cluster, shared_card_rate)
    )
    return simulate_on(trace, cluster, [], backend)


def simulate_on(
    trace: Trace, cluster: ClusterSpec, arrivals: list[Arrival], backend: SimulatedBackend
) -> Simulated:
    """Simulate the trace on this backend, and return the result; append each job to `arrivals` when
    it is submitted.
    """
    taken_s: list[float] = []
    controller = Controller(
        NullJournal(),
        backend,
        backend.current_time_s,
        lambda state: TimedScheduler(state, taken_s),
    )
    controller.run_once(0.0)  # the cluster is seen
    to_come = {sweep: deque(trials) for sweep, trials in trace.trials.items()}
    turns = TURNS_PER_JOB * (len(trace.arrivals) + sum(map(len, to_come.values())))

    def submit(together: Sequence[Arrival]) -> None:
        arrivals.extend(together)
        controller.submit_all([(_add_deadline(arrival), None) for arrival in together])

    def turn(wait_s: float) -> None:
        controller.run_once(wait_s)
        if to_come:
            _submit_next_trials(
                controller.state, arrivals, to_come, backend.current_time_s(), submit
            )

    for at_s, together in groupby(trace.arrivals, key=lambda arrival: arrival.at_s):
        while backend.current_time_s() < at_s:
            turn(at_s - backend.current_time_s())
            turns -= 1
        submit(list(together))
    turn(0.0)  # what was decided of the last is done
    while controller.state.jobs and (backend.is_busy or controller.wake_at_s() is not None):
        turn(FOREVER_S)
        turns -= 1
        assert turns > 0, "events beget events"
    arrivals += [
        replace(trial, at_s=backend.current_time_s()) for rest in to_come.values() for trial in rest
    ]  # never submitted
    submitted_trace = replace(trace, arrivals=tuple(arrivals))
    outcomes = list_outcomes(submitted_trace, cluster, backend.processes)
    return Simulated(
        report=make_report(submitted_trace, cluster, outcomes, backend.find_physical_card),
        outcomes=outcomes,
        decisions_s=tuple(taken_s),
    )


def shift_maintenance(cluster: ClusterSpec, begins_s: float | None) -> ClusterSpec:
    """Return the cluster with maintenance times as seconds after `begins_s` (seconds since 1970).

    Raises SpecError where the cluster has maintenance and `begins_s` is None: the list of jobs has
    no date.
    """
    if not cluster.maintenance:
        return cluster
    if begins_s is None:
        hint = "play a list of jobs with `begins: 2026-11-23T18:00`, or leave `maintenance` out"
        raise SpecError("the jobs have no date", source=cluster.name, path="maintenance", hint=hint)
    windows = [
        window.model_copy(
            update={
                "start": datetime.fromtimestamp(max(0.0, window.start.timestamp() - begins_s), UTC),
                "end": datetime.fromtimestamp(window.end.timestamp() - begins_s, UTC),
            }
        )
        for window in cluster.maintenance
        if window.end.timestamp() > begins_s
    ]
    return cluster.model_copy(update={"maintenance": tuple(windows)})


def _submit_next_trials(
    state: State,
    arrivals: Sequence[Arrival],
    coming_trials: dict[str, deque[Arrival]],
    now_s: float,
    submit: Callable[[Sequence[Arrival]], None],
) -> None:
    """Submit the trials for which their sweeps have room, as a service does; drop sweeps that may
    submit no more.
    """
    trials = [job for job in state.live_jobs if job.spec.trial is not None]
    live = Counter(job.array for job in trials)
    waits_for = {job.array: job.waits_for for job in trials}
    begun_sweeps = {arrival.spec.trial.of for arrival in arrivals if arrival.spec.trial is not None}
    for sweep in [sweep_id for sweep_id in coming_trials if sweep_id in begun_sweeps]:
        rest = coming_trials[sweep]
        while (
            rest
            and (trial := rest[0].spec.trial) is not None
            and live[sweep] < trial.max_concurrent
        ):
            spec = rest[0].spec.model_copy(update={"depends_on": waits_for.get(sweep, ())})
            arrival = replace(rest[0], at_s=now_s, spec=spec)
            if arrival.deadline_s is not None and arrival.deadline_s <= now_s:
                break
            submit([arrival])
            rest.popleft()
            live[sweep] += 1
        if not rest:
            del coming_trials[sweep]


def _add_deadline(arrival: Arrival) -> JobSpec:
    """Return the arrival's job with its deadline as a part of its spec."""
    if arrival.deadline_s is None:
        return arrival.spec
    return arrival.spec.model_copy(update={"deadline": make_deadline(arrival.deadline_s)})


def list_outcomes(
    trace: Trace, cluster: ClusterSpec, processes: Mapping[str, SimulatedProcess]
) -> tuple[Outcome, ...]:
    """Return the outcome of each job, in the order of their arrivals. `processes` are the attempts
    by name.
    """
    attempts = group_values((process.job.order, process) for process in processes.values())
    devices = cluster.device_count
    return tuple(
        _find_job_outcome(arrival, tuple(attempts.get(order, ())), cluster.launch_cost, devices)
        for order, arrival in enumerate(trace.arrivals, start=1)
    )


def _find_job_outcome(
    arrival: Arrival, attempts: tuple[SimulatedProcess, ...], launch_cost_s: float, devices: int
) -> Outcome:
    done = (
        attempts[-1] if attempts and attempts[-1].evidence and attempts[-1].ending is None else None
    )
    return Outcome(
        name=arrival.spec.name,
        submitted_at_s=arrival.at_s,
        started_at_s=attempts[0].launched_at_s if attempts else None,
        ended_at_s=done.ended_at_s if done else None,
        alone_s=launch_cost_s + compute_training_time_alone_s(arrival, devices, attempts),
        deadline_s=arrival.deadline_s,
        attempts=attempts,
        guaranteed=arrival.spec.guarantee is not None,
        request_step_s=_find_step_time_on_requested_devices_s(arrival),
        starts_by_s=attempts[0].job.starts_by_s if attempts else None,
        trial=None
        if arrival.spec.trial is None
        else (arrival.spec.trial.of, arrival.spec.trial.number),
    )


def _find_step_time_on_requested_devices_s(arrival: Arrival) -> float | None:
    guarantee = arrival.spec.guarantee
    if guarantee is None:
        return None
    return guarantee.step or dict(arrival.spec.speeds).get(arrival.spec.guaranteed_gpus)


def compute_training_time_alone_s(
    arrival: Arrival, device_count: int, attempts: Sequence[SimulatedProcess] = ()
) -> float:
    """Return the seconds that the job trains if it is alone, on the best number of at most
    `device_count` devices.

    A job without known speeds counts with the fastest of these attempts.
    """
    speeds = [step_s for count, step_s in arrival.spec.speeds if count <= device_count]
    steps = (
        arrival.spec.training.max_steps
        if arrival.spec.optimizer_steps is None
        else arrival.spec.optimizer_steps
    )
    return steps * min(speeds or [process.step_s for process in attempts], default=0.0)


def make_report(
    trace: Trace,
    cluster: ClusterSpec,
    outcomes: Sequence[Outcome],
    card_of_device: Callable[[Device], Device] = lambda device: device,
) -> Report:
    """Return the metrics of a simulation from its outcomes.

    `card_of_device` returns the card of a device: several devices may share one, whose hours count
    once.
    """
    finished = [outcome for outcome in outcomes if outcome.ended_at_s is not None]
    completions = sorted(outcome.completion_s for outcome in finished) or [0.0]
    slowdowns = sorted(outcome.slowdown for outcome in finished) or [0.0]
    devices = cluster.device_count
    makespan_s = max((outcome.ended_at_s or 0.0 for outcome in finished), default=0.0)
    occupied_s = _sum_occupied_device_s_by_node(outcomes, card_of_device)
    held_s = sum(occupied_s.values())
    return Report(
        trace=trace.name,
        cluster=cluster.name,
        policy=cluster.policy.order.value,
        objective=cluster.policy.objective.value,
        devices=devices,
        jobs=len(outcomes),
        finished=len(finished),
        mean_completion_s=fmean(completions),
        median_completion_s=median(completions),
        p99_completion_s=compute_quantile(completions, 0.99),
        makespan_s=makespan_s,
        p99_slowdown=compute_quantile(slowdowns, 0.99),
        worst_slowdown=slowdowns[-1],
        gpu_hours=held_s / 3600,
        cost=_price_of_device_seconds(cluster, occupied_s),
        utilisation=held_s / (devices * makespan_s) if makespan_s else 0.0,
        deadlines=sum(outcome.deadline_s is not None for outcome in outcomes),
        deadlines_met=sum(outcome.in_time for outcome in outcomes),
        mean_lateness_s=fmean(
            [outcome.lateness_s for outcome in finished if outcome.lateness_s] or [0.0]
        ),
        guaranteed=sum(outcome.guaranteed for outcome in outcomes),
        promised=sum(outcome.starts_by_s is not None for outcome in outcomes),
        promises_kept=sum(outcome.keeps_start_promise for outcome in outcomes),
        restarts=sum(max(0, len(outcome.attempts) - 1) for outcome in outcomes),
    )


def _sum_occupied_device_s_by_node(
    outcomes: Sequence[Outcome], card_of_device: Callable[[Device], Device]
) -> Mapping[str, float]:
    """Return {node: seconds in which jobs occupied its cards, summed over the cards}."""
    spans = []
    for outcome in outcomes:
        for process in outcome.attempts:
            if process.ended_at_s is not None:
                for device in process.devices:
                    spans.append(
                        (card_of_device(device), process.launched_at_s, process.ended_at_s)
                    )
    held_s = dict[str, float]()
    last_card = None
    until_s = 0.0
    for card, begin_s, end_s in sorted(spans):
        if card != last_card:
            last_card = card
            until_s = begin_s
        seconds = max(0.0, end_s - max(begin_s, until_s))
        held_s[card[0]] = held_s.get(card[0], 0.0) + seconds
        until_s = max(until_s, end_s)
    return held_s


def _price_of_device_seconds(
    cluster: ClusterSpec, device_s_by_node: Mapping[str, float]
) -> float | None:
    """Return the price of these device-seconds by node; None where the price of any of the nodes is
    unknown.
    """
    cost = 0.0
    for node in cluster.nodes:
        seconds = sum(device_s_by_node.get(name, 0.0) for name in node.names)
        price = node.device.price_per_hour
        if seconds and price is None:
            return None
        cost += seconds / 3600 * (price or 0.0)
    return cost if device_s_by_node else None


def compute_quantile(sorted_values: Sequence[float], fraction: float) -> float:
    """Return the smallest of the values such that this fraction (0 to 1) of all values is no larger
    (nearest-rank quantile).
    """
    return sorted_values[max(0, ceil(fraction * len(sorted_values)) - 1)]
