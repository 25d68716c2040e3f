"""A decision round: starts waiting jobs, makes reservations, and stops running jobs for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from orchestrator.memory.calibration.calibrate import calibrate
from orchestrator.planning.explain import describe_choice
from orchestrator.planning.profiles import find_reference_settings
from orchestrator.planning.request import read_plan_request
from orchestrator.scheduling.base.credit import STOPS, spend_credit
from orchestrator.scheduling.base.job_updates import archive_if_done, replace_job
from orchestrator.scheduling.base.migration import (
    can_move,
    get_placement_kept_for_next_attempt,
    make_migration,
)
from orchestrator.scheduling.base.time_limits import stop_at_time_limit
from orchestrator.scheduling.failures.observation import make_running_observation
from orchestrator.scheduling.options.asks import Question, compute_learning_rate_factor
from orchestrator.scheduling.options.climb import find_faster_option, may_move_to_faster_plan
from orchestrator.scheduling.options.job_options import Infeasible, JobOptions
from orchestrator.scheduling.options.probe import set_measured_memory
from orchestrator.scheduling.queue.policy import JobStop
from orchestrator.scheduling.queue.wait_queue import (
    WaitingJob,
    WaitingWithDeadline,
    WaitingWithReservation,
)
from orchestrator.scheduling.scheduling_pass.decide import (
    Decision,
    StartDecision,
    Wait,
    compute_device_second_price,
    decide_on_job,
    explain_wait,
    find_array_wait,
    repeat_wait,
)
from orchestrator.scheduling.scheduling_pass.guarantees import (
    apply_guarantee,
    find_reservations_to_keep,
    has_idle_guaranteed_devices,
)
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.scheduling_pass.quotas import QuotaRound
from orchestrator.specs.actions import Action, Launch, Record, Transition
from orchestrator.specs.attempt import Attempt, FailureKind, StopCause, count_devices
from orchestrator.specs.events import PaceReported
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import UNTIMED, OwnSettings
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import Change, list_changed_settings
from orchestrator.specs.state import Reservation, State

ASKS_S = 7 * 86_400.0  # over a weekend and a holiday
NO_PROMISES = Infeasible(why=lambda: "`guarantee` needs the cluster's `policy: {order: adaptive}`")


def stop_leaving_jobs(state: State, index: SchedulerIndex) -> Transition:
    """Return (new state, Stop actions) for jobs that must leave: their nodes' maintenance begins,
    or their start window closes.

    The jobs resume later.
    """
    stops = []
    for at_s, job_id, cause in sorted(index.list_leaving_jobs()):
        if at_s > state.at_s:
            break
        job = index.running[job_id]
        if not can_move(job):
            continue
        why = f"stopped at the end of its hours ({job.spec.start_window})"
        if cause is StopCause.MAINTENANCE:
            nodes = ", ".join(part.node for part in job.attempts[-1].placement)
            why = f"stopped for the maintenance of {nodes}"
        leaving, stop = make_migration(job, cause, why, state.at_s)
        index.update_job(job, leaving)
        state = replace_job(state, leaving)
        stops.append(stop)
    return state, tuple(stops)


def stop_jobs_over_time_limit(state: State, index: SchedulerIndex) -> Transition:
    """Return (new state, Stop actions) for jobs whose time limit is used up; they save and end."""
    stops = []
    for job_id in index.list_job_ids_over_time_limit(state.at_s):
        job, stop = stop_at_time_limit(index.running[job_id], state.at_s)
        index.update_job(index.running[job_id], job)
        state = replace_job(state, job)
        stops.append(stop)
    return state, tuple(stops)


def move_to_faster_plan(state: State, index: SchedulerIndex, event: PaceReported) -> Transition:
    """Return (new state, Stop actions) that restart the event's job with a faster plan, if its
    measurements show one.

    Only a job that recovered from an out-of-memory failure is moved so.
    """
    job = index.running.get(event.job_id)
    if job is None or not may_move_to_faster_plan(job):
        return state, ()
    attempt = job.attempts[-1]
    pool = index.find_pool(attempt)
    observation = make_running_observation(job, attempt)
    if pool is None or observation is None:
        return state, ()
    calibrated = calibrate(
        (*state.observations, observation),
        device=attempt.device,
        family=job.spec.family_name,
        job_key=job.key,
    )
    option = find_faster_option(job, pool.group, calibrated, pool.launch_cost_s)
    if option is None:
        return state, ()
    # an index that is made anew knows of no reservation: both look at those of the state
    index.clear_reservations()
    index.reserve(state.reservations)
    placement = pool.find_devices_without_attempt(
        attempt.placement, option.shape, state.at_s + option.seconds, option.least_bytes
    )
    if placement is None:
        return state, ()
    assert attempt.pace is not None, "it told what it measured"
    changed = ", ".join(map(str, list_changed_settings(attempt.plan, option.candidate.plan)))
    why = f"stopped to go on faster with {changed}: fits by the peak of {attempt.pace.steps_done} steps"
    leaving, stop = make_migration(
        job, StopCause.FASTER_PLAN, why, state.at_s, placement, next_plan=option.candidate.plan
    )
    index.update_job(job, leaving)
    index.reserve_for_migration(leaving)
    return replace_job(state, leaving), (stop,)


def fail_jobs_with_unanswered_questions(state: State, index: SchedulerIndex) -> Transition:
    """Return (new state, actions) in which jobs fail whose questions nobody answered within a week."""
    actions: list[Action] = []
    for job_id in index.pop_unanswered_job_ids(state.at_s):
        job = state.jobs.get(job_id)
        if job is not None and job.asks and not job.status.ended and job.asks_until_s <= state.at_s:
            failed = replace(
                job,
                status=JobStatus.FAILED,
                asks="",
                reason=f"nobody allowed it within a week: {job.asks}",
            )
            index.update_job(job, failed)
            state, archived = archive_if_done(state, failed)
            actions += (Record(job=failed), *archived)
    return state, tuple(actions)


def run_decision_round(state: State, index: SchedulerIndex) -> Transition:
    """Return (new state, actions) that start waiting jobs, reserve devices for others, and stop
    running ones.

    No later job delays a reservation. All reservations are made anew whenever devices are idle and
    a job came, devices came free, or more is known. Without such a change, the round does nothing.
    """
    if not state.nodes:  # what was promised is not there any more
        return replace(state, reservations=(), reevaluate_at_s=None), ()
    if not (index.is_stale or index.arrived):
        return state, ()
    state, refused = _refuse_impossible_jobs(state, index)
    if refused:  # for which others may have waited: who they are is asked before anybody starts
        return state, refused
    actions: list[Action] = []
    arrived = list(index.arrived)
    undecided = {waiting.job.id: waiting for waiting in arrived}
    is_settled = False
    waits = list[WaitingWithReservation]()
    late = list[WaitingWithDeadline]()
    while not is_settled:
        waited = len(index.waiting)
        state, done, waits, late = _decide_waiting_jobs(state, index, undecided)
        actions += done
        if (
            index.guaranteed and not index.running and state.reservations
        ):  # for whose end could they wait?
            state, done, waits, late = _decide_waiting_jobs(
                replace(state, reservations=()), index, undecided
            )
            actions += done
        # until deciding once more would change nothing: who starts changes what is left of its
        # team's quota
        has_quotas = state.policy.has_quotas
        is_settled = not has_quotas or not index.idle_devices or len(index.waiting) == waited
    of_array = Counter[str | None]()
    if any(waiting.job.array is not None for waiting in undecided.values()):
        of_array.update(state.jobs[reservation.job_id].array for reservation in state.reservations)
    for waiting in undecided.values():
        outcome = find_array_wait(index, waiting.job, of_array) or explain_wait(
            state, index, waiting
        )
        state, done = _apply_decision(state, index, waiting, outcome)
        actions += done
    index.is_stale = False
    index.arrived = [
        waiting for waiting in index.arrived if all(waiting is not other for other in arrived)
    ]
    state, stops = _preempt_jobs(state, index, waits, late)
    return state, (*actions, *stops)


def _refuse_impossible_jobs(state: State, index: SchedulerIndex) -> Transition:
    """Return (new state, actions) for jobs which arrived and can never start: they are refused, or
    a person is asked.
    """
    actions: list[Action] = []
    for waiting in index.arrived:
        asks = waiting.job.spec.guarantee is not None and waiting.job.starts_by_s is None
        if asks and not index.policy.promises_speed:
            state, done = _apply_decision(state, index, waiting, NO_PROMISES)
            actions += done
        elif not any(
            isinstance(menu, JobOptions) for _, menu in index.options.find_options(waiting)
        ):
            outcome = explain_wait(state, index, waiting)
            if isinstance(outcome, Infeasible | Question):
                state, done = _apply_decision(state, index, waiting, outcome)
                actions += done
    if actions:
        index.arrived = [
            waiting for waiting in index.arrived if index.waiting.get(waiting.job.id) is waiting
        ]
    return state, tuple(actions)


def _preempt_jobs(
    state: State,
    index: SchedulerIndex,
    jobs_with_reservations: Sequence[WaitingWithReservation],
    late_jobs: Sequence[WaitingWithDeadline],
) -> Transition:
    """Return (new state, Stop actions) for the running jobs that the queue policy decides to stop."""
    moves, slot = index.policy.decide_preemption(state, jobs_with_reservations, late_jobs)
    if not moves:
        return state, ()
    stopped, stops = _stop_jobs(state, index, moves)
    if slot is not None and stops:
        sooner = [
            slot if reservation.job_id == slot.job_id else reservation
            for reservation in stopped.reservations
        ]
        stopped = replace(stopped, reservations=tuple(sooner))
    return stopped, stops


def _stop_jobs(state: State, index: SchedulerIndex, job_stops: Sequence[JobStop]) -> Transition:
    """Return (new state, Stop actions) that stop all these jobs.

    If some have not run for long enough, none is stopped. The state then says when to run the round
    again.
    """
    from_s = max(move.from_s for move in job_stops)
    if from_s == inf:
        return state, ()
    if from_s > state.at_s:
        reevaluate_at_s = (
            from_s if state.reevaluate_at_s is None else min(state.reevaluate_at_s, from_s)
        )
        return replace(state, reevaluate_at_s=reevaluate_at_s), ()
    stops = []
    for move in job_stops:
        leaving, stop = make_migration(
            move.job, move.cause, move.why, state.at_s, move.held_placement
        )
        state = spend_credit(state, STOPS, index.devices, move.cost_device_s)
        index.update_job(move.job, leaving)
        if move.held_placement:
            index.reserve_for_migration(leaving)
        state = replace_job(state, leaving)
        stops.append(stop)
    return state, tuple(stops)


def _decide_waiting_jobs(
    state: State, index: SchedulerIndex, undecided: dict[str, WaitingJob]
) -> tuple[State, tuple[Action, ...], list[WaitingWithReservation], list[WaitingWithDeadline]]:
    """Decide once on each waiting job, and remove the decided ones from `undecided`.

    Returns (new state, actions, jobs that wait with a reservation, jobs that will end later than
    they should).
    """
    actions: list[Action] = []
    waits: list[WaitingWithReservation] = []
    late: list[WaitingWithDeadline] = []
    if not (index.idle_devices or index.is_stale or index.stoppable or index.guaranteed):
        return state, (), waits, late
    promised: list[Reservation] = []
    looks_s: list[float] = []
    slots = find_reservations_to_keep(state, index)
    index.clear_reservations()
    index.reserve(slots.values())
    price = compute_device_second_price(index)
    of_array = Counter[str | None]()
    quota_pass = QuotaRound(index)
    for waiting, by_s, devices_max in quota_pass:
        may_reserve = len(promised) < index.policy.reservations_max
        slot = slots.pop(waiting.job.id, None)
        if slot is not None and not has_idle_guaranteed_devices(index, waiting):
            promised.append(slot)
            quota_pass.record_decision(waiting, repeat_wait(waiting.job, slot))
            continue
        if slot is not None:
            index.clear_reservations()
            index.reserve((*slots.values(), *promised))
        if held_placement := get_placement_kept_for_next_attempt(waiting.job):
            devices_max = count_devices(held_placement)
            job_price = index.tuning.price_idle
        else:
            job_price = price
        limited = find_array_wait(index, waiting.job, of_array)
        outcome = limited or decide_on_job(
            state,
            index,
            waiting,
            job_price,
            may_reserve=may_reserve,
            end_by_s=by_s,
            devices_max=devices_max,
        )
        waits_for_devices = limited is None and (outcome is None or isinstance(outcome, Wait))
        if waits_for_devices and not index.policy.lets_later_jobs_overtake(waiting):
            break
        outcome = apply_guarantee(state, waiting, outcome, slot)
        if outcome is None:
            if by_s < inf and waiting.urgent_from_s <= state.at_s:
                late.append((waiting, by_s))
            continue
        if isinstance(outcome, Wait) and outcome.reservation is not None:
            index.reserve((outcome.reservation,))
            promised.append(outcome.reservation)
            of_array[waiting.job.array] += 1
            if outcome.reevaluate_at_s is not None:
                looks_s.append(outcome.reevaluate_at_s)
            if outcome.reevaluate_at_s is None and waiting.job.spec.start_window is None:
                waits.append((waiting, outcome.reservation))
        quota_pass.record_decision(waiting, outcome)
        undecided.pop(waiting.job.id, None)
        state, done = _apply_decision(state, index, waiting, outcome)
        actions += done
    look_s = index.policy.find_next_change_at_s()
    if look_s is not None:
        looks_s.append(look_s)
    state = replace(state, reservations=tuple(promised), reevaluate_at_s=min(looks_s, default=None))
    return state, tuple(actions), waits, [turn for turn in late if turn[0].job.id in index.waiting]


def _apply_decision(
    state: State, index: SchedulerIndex, waiting: WaitingJob, decision: Decision
) -> Transition:
    """Return (new state, actions) after this decision on a waiting job."""
    job = waiting.job
    actions: tuple[Action, ...] = ()
    match decision:
        case StartDecision() as chosen:
            job, attempt = _start_attempt(state, index, job, chosen)
            if waiting.fund is not None:
                state = spend_credit(state, waiting.fund, index.devices, waiting.device_s)
            actions = (Record(job=job, attempt=attempt), Launch(job=job, attempt=attempt))
        case Wait() as wait:
            is_as_before = (wait.code, wait.facts, "") == (job.pending, job.facts, job.reason)
            if is_as_before and job is state.jobs.get(job.id):
                return state, ()
            job = replace(job, pending=wait.code, facts=wait.facts, reason="")
        case Question(text=text, allowed=JobSpec() as spec):  # it waits anew, as what it now is
            left = replace(job, asks=text)
            index.update_job(job, left)
            job = replace(job, spec=spec, reason=text)
            index.update_job(left, job)
            return replace_job(state, job), (Record(job=job),)
        case Question(text=text, answer=answer):
            job = replace(
                job, asks=text, answer=answer, asks_until_s=state.at_s + ASKS_S, reason=""
            )
            actions = (Record(job=job),)
        case Infeasible() as never:
            status = JobStatus.FAILED if job.attempts else JobStatus.REFUSED
            job = replace(job, status=status, reason=_describe_impossible(job, never))
            actions = (Record(job=job),)
    index.update_job(waiting.job, job)
    state, archived = archive_if_done(state, job)
    return state, (*actions, *archived)


def _describe_impossible(job: Job, infeasible: Infeasible) -> str:
    """Return why no plan is left for the job, as text."""
    failure = job.last and job.last.failure
    if failure and failure.kind is FailureKind.HOST_OOM:
        return f"{failure.kind}: {failure.reason}; no other plan is left"
    return infeasible.why()


def _start_attempt(
    state: State, index: SchedulerIndex, job: Job, decision: StartDecision
) -> tuple[Job, Attempt]:
    """Return (the job with its new attempt, that attempt) after a decision to start it."""
    before = job.trained[-1] if job.trained else None
    attempt = Attempt(
        job_id=job.id,
        number=len(job.attempts) + 1,
        plan=decision.candidate.plan,
        placement=decision.placement,
        device=decision.device,
        estimate=decision.candidate.estimate,
        correction=decision.correction,
        step_s=decision.candidate.step_s,
        busy_share=decision.candidate.busy_share,
        needed_bytes=decision.needed_bytes,
        fit_probability=decision.fit_probability,
        change=_list_plan_changes(job.spec, before.plan, decision.candidate.plan) if before else (),
        change_reason=before.failure.reason if before and before.failure else "",
        launched_at_s=state.at_s,
        relative_to=_find_script_settings_of_estimate(index, job, decision),
        probe=decision.probe,
    )
    job = replace(
        job,
        status=JobStatus.RUNNING,
        attempts=(*job.attempts, attempt),
        reason=_describe_start(decision, before),
        pending=None,
        facts=(),
    )
    return job, attempt


def _list_plan_changes(spec: JobSpec, earlier_plan: Plan, new_plan: Plan) -> tuple[Change, ...]:
    """Return the settings that differ between two plans; also the learning rate if a smaller batch
    changed it.
    """
    different = list_changed_settings(earlier_plan, new_plan)
    rate = spec.learning_rate
    factor = compute_learning_rate_factor(
        spec, new_plan.global_batch_size / earlier_plan.global_batch_size
    )
    if rate is None or factor == 1:
        return different
    return (
        *different,
        Change(setting="learning_rate", before=f"{rate / factor:.6g}", after=f"{rate:.6g}"),
    )


def _find_script_settings_of_estimate(
    index: SchedulerIndex, job: Job, decision: StartDecision
) -> OwnSettings | None:
    """Return the script's own settings on which the plan's memory estimate is based; None where the
    model is known.
    """
    if decision.candidate.estimate.source not in UNTIMED:
        return None
    spec = set_measured_memory(job.spec, index.options.find_calibration(job, decision.device))
    return find_reference_settings(read_plan_request(spec))


def _describe_start(decision: StartDecision, earlier_attempt: Attempt | None) -> str:
    """Return why the job starts with this plan and these devices, as text."""
    candidate = decision.candidate
    if decision.probe:
        return f"is measured at micro-batch {candidate.plan.micro_batch_size}: its need is unknown"
    if earlier_attempt is None or earlier_attempt.failure is None:
        return f"runs {describe_choice(decision.fit_probability, decision.passed_over)}"
    changed = ", ".join(
        str(change) for change in list_changed_settings(earlier_attempt.plan, candidate.plan)
    )
    if earlier_attempt.failure.kind is FailureKind.MOVED:
        return f"goes on with {changed or 'the same plan'}: {earlier_attempt.failure.reason}"
    if earlier_attempt.plan == candidate.plan:
        return f"runs the same plan again after {earlier_attempt.failure.kind}"
    return f"runs a cheaper plan after {earlier_attempt.failure.kind}: {changed}"
