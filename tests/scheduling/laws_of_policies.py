"""Laws of each queue policy alone; the laws in the other files hold for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from benchmarks.peers import Peer, tiresias
from orchestrator.scheduling.options.job_options import JobOptions
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.scheduling_pass.decide import find_array_wait
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.order import Order
from orchestrator.specs.state import State
from tests.scheduling import laws_of_moves, laws_of_turns
from tests.scheduling.transition import Law, Transition, of

Key = Callable[[Job, State], float]


def in_order_of(key: Key) -> Law:
    """No job starts past one that is first by `key`, then by submission, and that waits for nothing but devices."""

    def law(t: Transition) -> Iterator[str]:
        launches = [launch.job for launch in of(Launch, t.actions)]
        places = [_place(key, job, t.after) for job in launches]
        if places != sorted(places):
            yield f"jobs start out of order: {[job.id for job in launches]}"
        for job in launches:
            for other in _eligible(t.after):
                if _place(key, other, t.after) < _place(key, job, t.after):
                    yield f"{job.id} starts past {other.id}, which is first"

    return law


def only_the_first_is_promised(key: Key) -> Law:
    """The first job that waits for existing devices has the only reservation, if there is any."""

    def law(t: Transition) -> Iterator[str]:
        if len(t.after.reservations) > 1:
            yield f"{len(t.after.reservations)} jobs have reservations"
        launched = {launch.job.id for launch in of(Launch, t.actions)}
        for reservation in t.after.reservations if launched else ():
            head = t.after.jobs[reservation.job_id]
            for other in _eligible(t.after):
                if _could_run(t.after, other) and _place(key, other, t.after) < _place(
                    key, head, t.after
                ):
                    yield f"{reservation.job_id} has a reservation and {other.id}, which is first, has none"

    return law


def _may_stop_under_any_policy(t: Transition, job: Job) -> bool:
    """Return whether a cancellation, a maintenance or the end of its hours stops the job."""
    in_maintenance = "maintenance" in job.attempts[-1].moved_for
    return job.cancelling or in_maintenance or laws_of_moves.hours_end(job, t.after.at_s)


def nothing_is_preempted(t: Transition) -> Iterator[str]:
    """Only a cancellation, a maintenance or the end of its hours stops a job."""
    for stop in of(Stop, t.actions):
        job = t.after.jobs[stop.job_id]
        if not _may_stop_under_any_policy(t, job):
            yield f"{stop.job_id} is stopped: {job.attempts[-1].moved_for}"


def only_more_service_is_preempted(t: Transition) -> Iterator[str]:
    """A job is stopped only while one waits that is ahead of it by attained service, then by submission."""
    for stop in of(Stop, t.actions):
        job = t.after.jobs[stop.job_id]
        if _may_stop_under_any_policy(t, job):
            continue
        places = [_place(attained, other, t.after) for other in _eligible(t.after)]
        if not any(place < _place(attained, job, t.after) for place in places):
            yield f"{stop.job_id} is stopped for no job that has attained less"


def least_service_first(t: Transition) -> Iterator[str]:
    """The job with less attained service starts first, among jobs of equal width on one kind of device."""
    if len({node.device.name for node in t.after.nodes}) != 1:
        return
    for launch in of(Launch, t.actions):
        for other in _eligible(t.after):
            is_ahead = _place(attained, other, t.after) < _place(attained, launch.job, t.after)
            widths = _widths(t.after, other)
            if (
                is_ahead
                and widths
                and max(widths) <= launch.attempt.plan.world_size
                and _could_run(t.after, other)
            ):
                yield f"{launch.job.id} starts past {other.id}, which has attained less and is no wider"


def submission(_job: Job, _state: State) -> float:
    return 0.0


def deadline(job: Job, _state: State) -> float:
    return float("inf") if job.deadline_s is None else job.deadline_s


def length(job: Job, state: State) -> float:
    return make_index(state).options.find_remaining_work(job).duration_s


def attained(job: Job, state: State) -> float:
    """The queue of the job: 0, or 1 with DEMOTED_DEVICE_S of service."""
    served = (
        attempt.plan.world_size
        * (
            (state.at_s if attempt.ended_at_s is None else attempt.ended_at_s)
            - attempt.launched_at_s
        )
        for attempt in job.attempts
    )
    return float(sum(served) >= tiresias.DEMOTED_DEVICE_S - tiresias.ROUNDING_DEVICE_S)


def _place(key: Key, job: Job, state: State) -> tuple[float, int]:
    return key(job, state), job.order


def _eligible(state: State) -> list[Job]:
    """Queued jobs that wait for devices only: no dependency, back-off, closed window or full array holds them."""
    index, at_s = make_index(state), state.at_s
    promised = Counter(state.jobs[reservation.job_id].array for reservation in state.reservations)
    return [
        waiting.job
        for waiting in index.waiting.values()
        if waiting.job.status is JobStatus.QUEUED
        and waiting.job.not_before_s <= at_s
        and (
            waiting.job.spec.start_window is None
            or waiting.job.spec.start_window.find_first_opening(at_s)[0] <= at_s
        )
        and find_array_wait(index, waiting.job, promised) is None
    ]


def _widths(state: State, job: Job) -> list[int]:
    index = make_index(state)
    menus = [
        menu
        for _, menu in index.options.find_options(index.make_queue_entry(job))
        if isinstance(menu, JobOptions)
    ]
    return [menu.entries[-1].devices for menu in menus]


def _could_run(state: State, job: Job) -> bool:
    """Return whether present nodes, open for ever, could hold the job at the width that it requests."""
    index = make_index(state)
    return any(
        pool.has_enough_devices_when_idle(menu.entries[-1].shape, menu.entries[-1].least_bytes)
        for pool, menu in index.options.find_options(index.make_queue_entry(job))
        if isinstance(menu, JobOptions) and not index.closed
    )


LAWS: Mapping[str, tuple[Law, ...]] = {
    Order.ADAPTIVE: (*laws_of_moves.ADAPTIVE_LAWS, *laws_of_turns.ADAPTIVE_LAWS),
    Order.FIFO: (nothing_is_preempted, in_order_of(submission)),
    Peer.EASY: (nothing_is_preempted, only_the_first_is_promised(submission)),
    Peer.EDF: (nothing_is_preempted, only_the_first_is_promised(deadline)),
    Peer.SJF: (nothing_is_preempted, only_the_first_is_promised(length)),
    Peer.TIRESIAS: (only_more_service_is_preempted, least_service_first),
}
