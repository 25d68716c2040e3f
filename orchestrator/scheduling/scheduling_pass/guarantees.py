"""Guarantees (`guarantee: requested` of a job file): the promised speed of a job, and which jobs it
displaces.

A guaranteed job never runs slower than its request: so many devices with the requested plan.
Guaranteed jobs go before all others, in the order of submission, whatever their priority. A job
that was due before keeps its place, so that no job starves. At submission a guaranteed job gets a
reservation, which no later job delays. It is promised to start by then, with a quarter more to
wait, since jobs may run longer than they say. A job is refused in three cases: its reservation
begins later than START_WITHIN_S, its request fits nowhere, or its team's guaranteed jobs would
exceed the team's quota. Jobs that can be moved make way for it. It is moved itself for a
maintenance only.
"""

from __future__ import annotations

from orchestrator.scheduling.base.migration import MOVE_GRACE_S
from orchestrator.scheduling.base.sentences import format_waiting_sentence
from orchestrator.scheduling.options.asks import Question
from orchestrator.scheduling.options.job_options import Infeasible, JobOptions
from orchestrator.scheduling.queue.policy import Preemption
from orchestrator.scheduling.queue.wait_queue import WaitingJob
from orchestrator.scheduling.scheduling_pass.decide import (
    Decision,
    StartDecision,
    Wait,
    repeat_wait,
)
from orchestrator.scheduling.scheduling_pass.index import OVERDUE, SchedulerIndex
from orchestrator.scheduling.scheduling_pass.preemption import (
    find_devices_after_stops,
    find_jobs_to_stop_for_option,
    list_movable_jobs,
    make_job_stops,
)
from orchestrator.specs.attempt import StopCause
from orchestrator.specs.replace import replace
from orchestrator.specs.state import Reservation, State
from orchestrator.specs.units import format_seconds

# From submission to the promised start. A day, as for a job of unknown length: later, a promise
# says nothing of use.
START_WITHIN_S = 86_400.0
LATE_S = 1.0  # after its start, that a slot is kept: ends are told to the second
TRIED_MAX = 3  # reservations, first come first, for which a preemption is looked for


def apply_guarantee(
    state: State,
    waiting: WaitingJob,
    decision: Decision | None,
    earlier_reservation: Reservation | None,
) -> Decision | None:
    """Return the decision on a waiting job, changed if the job has a guarantee; None if it waits as
    before.

    A guaranteed job keeps `earlier_reservation` unless it can start sooner. Without one, its first
    reservation sets the promised start, or the job is refused.
    """
    job = waiting.job
    if earlier_reservation is not None and not isinstance(
        decision, StartDecision | Infeasible | Question
    ):
        later = (
            decision is None
            or decision.reservation is None
            or decision.reservation.start_s > earlier_reservation.start_s
        )
        if not later:
            return decision
        if decision is None:
            return repeat_wait(job, earlier_reservation)
        return Wait(code=decision.code, facts=decision.facts, reservation=earlier_reservation)
    if (
        not job.spec.guaranteed_gpus
        or job.starts_by_s is not None
        or isinstance(decision, Infeasible | Question)
    ):
        return decision
    reason = _find_quota_excess(state, waiting)
    if reason is None:
        match decision:
            case StartDecision():
                starts_by_s = state.at_s
            case Wait(reservation=Reservation(start_s=start_s)) if (
                start_s <= job.submitted_at_s + START_WITHIN_S
            ):
                starts_by_s = state.at_s + OVERDUE * (start_s - state.at_s)
            case Wait(reservation=Reservation(start_s=start_s)):
                reason = f"could start only in {format_seconds(start_s - state.at_s)}"
            case Wait(code=code, facts=facts):
                reason = format_waiting_sentence(code, facts)
            case _:
                reason = "nobody can tell when it could start"
    if reason is None:
        waiting.job = replace(job, starts_by_s=starts_by_s)
        return decision
    gpus = job.spec.guaranteed_gpus
    refused = f"cannot be promised the speed of {gpus} device{'s' if gpus > 1 else ''}: {reason}"
    return Infeasible(why=lambda: f"{refused}; without `guarantee` it gets what is left")


def _find_quota_excess(state: State, waiting: WaitingJob) -> str | None:
    """Return why the devices of the job's guarantee would exceed its team's quota, as text; None
    where they do not.
    """
    if not state.policy.has_quotas:
        return None
    team = state.policy.find_team(waiting.job.user)
    promised = sum(
        job.spec.guaranteed_gpus
        for job in state.jobs.values()
        if job.starts_by_s is not None
        and not job.status.ended
        and state.policy.find_team(job.user) == team
    )
    if promised + waiting.job.spec.guaranteed_gpus <= team.quota:
        return None
    return f"{promised} of the {team.quota} devices of team {team.name}'s quota are promised to its other jobs"


def find_reservations_to_keep(state: State, index: SchedulerIndex) -> dict[str, Reservation]:
    """Return {job id: reservation} of guaranteed jobs whose earlier reservations can still be met.

    A reservation is kept because, if all were made anew, a job that starts sooner elsewhere could
    delay the next one. Only a job whose devices do not come free in time gets another reservation,
    around those of all others.
    """
    slots = [
        reservation for reservation in state.reservations if reservation.job_id in index.guaranteed
    ]
    return {
        reservation.job_id: reservation
        for reservation in slots
        if reservation.start_s + LATE_S >= state.at_s
        and index.can_meet_reservation(reservation, LATE_S)
    }


def has_idle_guaranteed_devices(index: SchedulerIndex, waiting: WaitingJob) -> bool:
    """Return whether as many devices of one kind are idle as the job's promised speed needs, on any
    nodes.
    """
    return any(
        pool.idle >= menu.entries[0].devices
        for pool, menu in index.options.find_options(waiting)
        if isinstance(menu, JobOptions)
    )


def preempt_for_guarantee(state: State, index: SchedulerIndex) -> Preemption | None:
    """Return the jobs to stop so that a guaranteed job starts before its reservation; None where
    none need be stopped.
    """
    preemption: Preemption | None = None
    for reservation in [
        reservation for reservation in state.reservations if reservation.job_id in index.guaranteed
    ][:TRIED_MAX]:
        index.clear_reservations()
        index.reserve([other for other in state.reservations if other is not reservation])
        preemption = preemption or _find_preemption_for_job(
            index,
            index.guaranteed[reservation.job_id],
            reservation.start_s - state.at_s,
            state.at_s,
        )
    if index.guaranteed:
        index.clear_reservations()
        index.reserve(state.reservations)
    return preemption


def _find_preemption_for_job(
    index: SchedulerIndex, waiting: WaitingJob, wait_s: float, now_s: float
) -> Preemption | None:
    """Return the jobs of lower rank to stop so that this job can start; None without such jobs.

    They are those with the least relative delay. Nothing is stopped for devices that come free
    about as soon by themselves: `wait_s` is the time until then.
    """
    for pool, menu in index.options.find_options(waiting):
        if not isinstance(menu, JobOptions) or wait_s <= MOVE_GRACE_S + pool.launch_cost_s:
            continue
        entry = menu.entries[0]
        able = [
            moving
            for moving in list_movable_jobs(
                index, index.list_stoppable_job_ids_latest_first(), now_s
            )
            if moving.pool is pool and index.policy.rank(moving.job) > waiting.rank
        ]
        stopped = find_jobs_to_stop_for_option(pool, able, entry, now_s)
        placement = find_devices_after_stops(pool, stopped, entry, now_s) if stopped else None
        if placement is not None:
            why = f"stopped to make way for {waiting.job.id}: it is guaranteed the speed of its request"
            start_s = now_s + MOVE_GRACE_S
            return Preemption(
                moves=make_job_stops(stopped, StopCause.GUARANTEE, why),
                slot=Reservation(
                    job_id=waiting.job.id,
                    start_s=start_s,
                    end_s=start_s + entry.seconds,
                    placement=placement,
                ),
            )
    return None
