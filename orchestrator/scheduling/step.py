"""Every decision about jobs: `step(state, event) -> (state, actions)`. No clock, no randomness, no world.

1. absorb the fact   2. order the waiting   3. plan and place   4. return what to do
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from orchestrator.memory.calibration import remembered
from orchestrator.scheduling.classify import classify
from orchestrator.scheduling.decide import (
    PRICE_IDLE,
    RESERVATIONS_MAX,
    Chosen,
    Wait,
    admitted,
    crowded,
    decide,
    price_of,
)
from orchestrator.scheduling.demand import asked
from orchestrator.scheduling.dependence import entered, heard
from orchestrator.scheduling.desk import Desk, Waiting
from orchestrator.scheduling.drain import drain_requested, next_change_s
from orchestrator.scheduling.elastic import growth, making_way
from orchestrator.scheduling.fair import charged
from orchestrator.scheduling.menu import NeverFits
from orchestrator.scheduling.moves import can_move, claims_of, moved
from orchestrator.scheduling.outcome import observe
from orchestrator.scheduling.quotas import Turns
from orchestrator.scheduling.windows import opening_s
from orchestrator.specs.attempt import Attempt, AttemptStatus, Evidence, Failure, FailureKind
from orchestrator.specs.plan import changes
from orchestrator.specs.state import (
    Action,
    Archive,
    CancelRequested,
    DrainRequested,
    Event,
    Finished,
    Job,
    JobStatus,
    Launch,
    NodesSeen,
    Observation,
    Observed,
    Paced,
    Record,
    Released,
    Reservation,
    Started,
    State,
    Stop,
    Submitted,
    Woke,
)

CANCEL_GRACE_S = 10.0  # between SIGTERM and SIGKILL: time for a small checkpoint
BACK_OFF_FIRST_S = 2.0  # doubled with each failure of the same budget
BACK_OFF_MAX_S = 300.0

# Which of the job's budgets a failure uses up. A failure without a budget is final.
BUDGETS = {
    FailureKind.DEVICE_OOM: "oom",
    FailureKind.HOST_OOM: "oom",
    FailureKind.CROWDED: "node",
    FailureKind.NODE_LOST: "node",
    FailureKind.PREEMPTED: "preemption",
    FailureKind.HUNG: "hang",
    FailureKind.STARTUP: "startup",
}
REFUTING = (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM)  # the plan itself is to blame
AT_ONCE = (*REFUTING, FailureKind.PREEMPTED)  # waiting would change nothing


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The state after `event`, and what to do about it. Late, repeated and unknown events change nothing."""
    before = replace(state, at_s=event.at_s) if event.at_s > state.at_s else state
    desk = _take_desk(state)
    desk.state = before
    state, told = _absorb(before, event)
    desk = _told(desk, before, state, event)
    state = desk.state = _with_demand(before, state, desk, event)
    state, stopped = _empty_nodes(state, desk)
    actions, news = (*told, *stopped), told
    while True:
        state, followed = _followed(state, desk, news)
        state, news = _schedule(state, desk)
        actions = (*actions, *followed, *news)
        if not _ended(news):  # otherwise a job was refused, for which others may wait
            break
    _keep_desk(desk, state)
    return state, actions


def wake_at_s(state: State) -> float | None:
    """When a back-off ends, hours begin, a node closes or opens, or a job has left room long enough; None: never."""
    for desk in _DESKS:
        if desk.state is state:
            next_s = desk.wake_at_s(state.at_s)
            break
    else:
        waiting = [job for job in state.jobs.values() if job.status is JobStatus.QUEUED and not job.waits_for]
        times = (time_s for job in waiting for time_s in (job.not_before_s, opening_s(job.spec, state.at_s)))
        times_s = (*times, next_change_s(state.nodes, state.at_s))
        next_s = min((time_s for time_s in times_s if state.at_s < time_s < inf), default=None)
    known = [one for one in (next_s, state.look_at_s) if one is not None and one > state.at_s]
    return min(known, default=None)


# 1. absorb the fact


def _absorb(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    match event:
        case Submitted():
            return _submitted(state, event)
        case CancelRequested():
            return _cancel_requested(state, event)
        case DrainRequested():
            return drain_requested(state, event), ()
        case NodesSeen():
            return replace(state, nodes=event.nodes, declared=event.declared, policy=event.policy), ()
        case Started():
            return _started(state, event)
        case Paced():
            return _paced(state, event)
        case Finished():
            return _finished(state, event)
        case Released():
            return _released(state, event)
        case Observed():
            return _with_observations(state, event.observations), ()
        case Woke():
            return state, ()


def _submitted(state: State, event: Submitted) -> tuple[State, tuple[Action, ...]]:
    if event.order <= state.submitted:
        return state, ()
    job = Job(
        id=event.job_id,
        spec=event.spec,
        order=event.order,
        submitted_at_s=event.at_s,
        array=event.array,
        deadline_s=event.spec.by.due_s(event.at_s) if event.spec.by else None,
        fault=event.fault,
        reason="waiting for the cluster to be seen",
    )
    job = entered(job, state.jobs, event.met)
    state, archived = _settled(state, job)
    return replace(state, submitted=event.order), (Record(job=job), *archived)


def _cancel_requested(state: State, event: CancelRequested) -> tuple[State, tuple[Action, ...]]:
    job = state.jobs.get(event.job_id)
    if job is None or job.status.ended or job.cancelling:
        return state, ()
    attempt = _live(job)
    if attempt is None:
        job = replace(job, status=JobStatus.CANCELLED, cancelling=True, reason="cancelled before it ran")
        state, archived = _settled(state, job)
        return state, (Record(job=job), *archived)
    job = _with_attempt(replace(job, cancelling=True), replace(attempt, status=AttemptStatus.STOPPING))
    return _with_job(state, job), (Stop(job_id=job.id, number=attempt.number, grace_s=CANCEL_GRACE_S),)


def _started(state: State, event: Started) -> tuple[State, tuple[Action, ...]]:
    job, attempt = _find(state, event.job_id, event.number)
    if job is None or attempt is None or attempt.status is not AttemptStatus.LAUNCHING:
        return state, ()
    attempt = replace(attempt, status=AttemptStatus.RUNNING)
    job = _with_attempt(job, attempt)
    return _with_job(state, job), (Record(job=job, attempt=attempt),)


def _paced(state: State, event: Paced) -> tuple[State, tuple[Action, ...]]:
    job, attempt = _find(state, event.job_id, event.number)
    if job is None or attempt is None or attempt.status is AttemptStatus.ENDED:
        return state, ()
    if attempt.pace is not None and event.pace.at_s <= attempt.pace.at_s:
        return state, ()
    return _with_job(state, _with_attempt(job, replace(attempt, pace=event.pace))), ()


def _released(state: State, event: Released) -> tuple[State, tuple[Action, ...]]:
    job, attempt = _find(state, event.job_id, event.number)
    if job is None or attempt is None or attempt.status is not AttemptStatus.ENDED or attempt.released:
        return state, ()
    state = replace(state, usage=charged(state, job, attempt))
    return _settled(state, _with_attempt(job, replace(attempt, released=True)))


def _finished(state: State, event: Finished) -> tuple[State, tuple[Action, ...]]:
    job, attempt = _find(state, event.job_id, event.number)
    if job is None or attempt is None or attempt.status is AttemptStatus.ENDED:
        return state, ()
    capacity_bytes = _capacity_bytes(state, attempt)
    failure = classify(job, attempt, event.evidence, capacity_bytes)
    attempt = replace(
        attempt, status=AttemptStatus.ENDED, ended_at_s=event.at_s, evidence=event.evidence, failure=failure
    )
    job = _with_attempt(job, attempt)
    job = _succeeded(job, event.evidence) if failure is None else _failed(job, attempt, failure, event.at_s)
    observed = observe(job, attempt, capacity_bytes)
    state = _with_observations(state, () if observed is None else (observed,))
    return _with_job(state, job), (Record(job=job, attempt=attempt),)


def _succeeded(job: Job, evidence: Evidence) -> Job:
    lost = f"; its last start did not take up again {', '.join(evidence.lost)}" if evidence.lost else ""
    return replace(job, status=JobStatus.SUCCEEDED, reason=f"finished{lost}")


def _failed(job: Job, attempt: Attempt, failure: Failure, at_s: float) -> Job:
    """The job after a failure: queued again while the failure's own budget lasts, ended otherwise."""
    if job.cancelling or failure.kind is FailureKind.CANCELLED:
        return replace(job, status=JobStatus.CANCELLED, cancelling=True, reason="cancelled while it ran")
    if failure.kind is FailureKind.MOVED:
        step = attempt.evidence.checkpoint_step if attempt.evidence else None
        saved = "" if step is None else f"; saved at step {step}"
        return replace(job, status=JobStatus.QUEUED, reason=f"{failure.reason}{saved}")
    if failure.kind in REFUTING:
        job = replace(job, refuted=job.refuted | {attempt.plan})
    if attempt.probe:  # whatever it met costs nothing: a real attempt would meet it, too
        return replace(job, status=JobStatus.QUEUED, reason=f"probed: {failure.reason}")
    budget = BUDGETS.get(failure.kind)
    if budget is None:
        return replace(job, status=JobStatus.FAILED, reason=f"{failure.kind}: {failure.reason}")
    used = sum(1 for a in job.attempts if a.failure and not a.probe and BUDGETS.get(a.failure.kind) == budget)
    allowed = getattr(job.spec.retries, budget)
    if used > allowed:
        reason = f"{failure.kind}: {failure.reason} (retries.{budget} of {allowed} used up)"
        return replace(job, status=JobStatus.FAILED, reason=reason)
    wait_s = 0.0 if failure.kind in AT_ONCE else min(BACK_OFF_FIRST_S * 2 ** (used - 1), BACK_OFF_MAX_S)
    reason = f"restarts after {failure.kind}: {failure.reason}"
    return replace(job, status=JobStatus.QUEUED, not_before_s=at_s + wait_s, reason=reason)


# 2. order the waiting

# The desk of the newest state, which nobody else has while `step` works at it. It says nothing that the state does not
# say, only faster: tests make a new one for every event and see the same.
_DESKS: list[Desk] = []


def _take_desk(state: State) -> Desk:
    try:
        desk = _DESKS.pop()
    except IndexError:
        return Desk(state)
    return desk if desk.state is state else Desk(state)


def _keep_desk(desk: Desk, state: State) -> None:
    desk.state = state
    _DESKS[:] = [desk]


def _told(desk: Desk, before: State, after: State, event: Event) -> Desk:
    """The desk after the event."""
    desk.state = after
    if after.observations is not before.observations:
        desk.observe(before.observations, after)
    match event:
        case NodesSeen():
            desk = desk.see(after)
        case DrainRequested():
            desk.close(after)
        case Observed():
            desk.is_stale = True
        case Woke():
            pass
        case _:
            known, now = before.jobs.get(event.job_id), after.jobs.get(event.job_id)
            if known is not now:
                desk.learn(known, now)
            if any(one.job_id == event.job_id for one in after.reservations):  # cancelled: nobody waits for these
                desk.is_stale = True
    if after.look_at_s is not None and after.look_at_s <= after.at_s:
        desk.is_stale = True
    desk.wake(after.at_s)
    return desk


def _followed(state: State, desk: Desk, actions: Sequence[Action]) -> tuple[State, tuple[Action, ...]]:
    """What becomes of those who waited for a job that has ended, and in turn of those who waited for them."""
    done: list[Action] = []
    ended = _ended(actions)
    for one in ended:
        for job_id in desk.followers_of(one.id):
            known = state.jobs[job_id]
            job = heard(known, one)
            state, archived = _settled(state, job)
            desk.learn(known, job)
            if job.status.ended:
                ended.append(job)
                done += (Record(job=job), *archived)
    return state, tuple(done)


def _ended(actions: Sequence[Action]) -> list[Job]:
    return [action.job for action in actions if isinstance(action, Record) and action.job.status.ended]


# 3. plan and place


def _empty_nodes(state: State, desk: Desk) -> tuple[State, tuple[Stop, ...]]:
    """Whoever runs where a maintenance begins is asked to end, to go on elsewhere or later."""
    stops = []
    for job in [*desk.running.values()] if desk.maintained else ():
        left = [part.node for part in job.attempts[-1].placement if part.node in desk.maintained]
        if left and can_move(job):
            gone, stop = moved(job, f"stopped for the maintenance of {', '.join(left)}", state.at_s)
            desk.learn(job, gone)
            state = _with_job(state, gone)
            stops.append(stop)
    return state, tuple(stops)


def _schedule(state: State, desk: Desk) -> tuple[State, tuple[Action, ...]]:
    """Start whom to start. Whoever is ahead has its devices promised, so that nobody behind delays it.

    All is promised anew whenever devices are idle and a job came, devices came free, or other things are known.
    """
    if not state.nodes or not (desk.is_stale or desk.arrived):
        return state, ()
    actions: list[Action] = []
    unheard = {waiting.job.id: waiting for waiting in desk.arrived}
    is_settled, waits = False, list[tuple[Waiting, Reservation]]()
    while not is_settled:
        waited = len(desk.waiting)
        state, done, waits = _round(state, desk, unheard)
        actions += done
        # until deciding once more would change nothing: who starts changes what is left of its team's quota
        has_quotas = state.policy is not None and state.policy.has_quotas
        is_settled = not has_quotas or not desk.idle or len(desk.waiting) == waited
    of_array = Counter(state.jobs[one.job_id].array for one in state.reservations if unheard)
    for waiting in unheard.values():
        outcome = crowded(desk, waiting.job, of_array) or admitted(state, desk, waiting)
        state, done = _answered(state, desk, waiting, outcome)
        actions += done
    desk.is_stale, desk.arrived = False, []
    state, stops = _move(state, desk, waits)
    return state, (*actions, *stops)


def _move(state: State, desk: Desk, waits: Sequence[tuple[Waiting, Reservation]]) -> tuple[State, tuple[Stop, ...]]:
    """Stop one that others gain more by than it loses, or else one that gains by what is idle."""
    move = making_way(desk, waits, state.at_s) or (growth(desk, state.at_s) if desk.idle else None)
    if move is None:
        return state, ()
    if move.from_s > state.at_s:
        look_at_s = move.from_s if state.look_at_s is None else min(state.look_at_s, move.from_s)
        return replace(state, look_at_s=look_at_s), ()
    gone, stop = moved(move.job, move.why, state.at_s, move.claims)
    desk.learn(move.job, gone)
    if move.claims:
        desk.keep(gone)
    return _with_job(state, gone), (stop,)


def _round(
    state: State, desk: Desk, unheard: dict[str, Waiting]
) -> tuple[State, tuple[Action, ...], list[tuple[Waiting, Reservation]]]:
    """One look at all who wait; `unheard` loses those who get an answer. Who waits for devices is told as well."""
    actions: list[Action] = []
    waits: list[tuple[Waiting, Reservation]] = []
    if not (desk.idle or desk.is_stale or desk.elastic):
        return state, (), waits
    promised: list[Reservation] = []
    looks_s: list[float] = []
    desk.forget_promises()
    price = price_of(desk)
    of_array = Counter[str | None]()
    turns = Turns(desk)
    for waiting, by_s, devices_max in turns:
        may_reserve = len(promised) < RESERVATIONS_MAX
        if claims := claims_of(waiting.job):
            devices_max, its_price = sum(len(part.devices) for part in claims), PRICE_IDLE
        else:
            its_price = price
        outcome = crowded(desk, waiting.job, of_array) or decide(
            state, desk, waiting, its_price, may_reserve=may_reserve, by_s=by_s, devices_max=devices_max
        )
        if outcome is None:
            continue
        if isinstance(outcome, Wait) and outcome.reservation is not None:
            desk.promise((outcome.reservation,))
            promised.append(outcome.reservation)
            of_array[waiting.job.array] += 1
            looks_s += [] if outcome.look_at_s is None else [outcome.look_at_s]
            if outcome.look_at_s is None and waiting.job.spec.between is None:
                waits.append((waiting, outcome.reservation))
        turns.heard(waiting, outcome)
        unheard.pop(waiting.job.id, None)
        state, done = _answered(state, desk, waiting, outcome)
        actions += done
    state = replace(state, reservations=tuple(promised), look_at_s=min(looks_s, default=None))
    return state, tuple(actions), waits


def _answered(
    state: State, desk: Desk, waiting: Waiting, outcome: Chosen | Wait | NeverFits
) -> tuple[State, tuple[Action, ...]]:
    """The state after what was decided of a waiting job."""
    job = waiting.job
    actions: tuple[Action, ...] = ()
    match outcome:
        case Chosen() as chosen:
            job, attempt = _begin(state, job, chosen)
            actions = (Record(job=job, attempt=attempt), Launch(job=job, attempt=attempt))
        case Wait() as wait:
            if wait.reason == job.reason:
                return state, ()
            job = replace(job, reason=wait.reason)
        case NeverFits() as never:
            status = JobStatus.FAILED if job.attempts else JobStatus.REFUSED
            job = replace(job, status=status, reason=never.reason)
            actions = (Record(job=job),)
    desk.learn(waiting.job, job)
    state, archived = _settled(state, job)
    return state, (*actions, *archived)


def _begin(state: State, job: Job, chosen: Chosen) -> tuple[Job, Attempt]:
    before = next((one for one in reversed(job.attempts) if not one.probe), None)
    attempt = Attempt(
        job_id=job.id,
        number=len(job.attempts) + 1,
        plan=chosen.candidate.plan,
        placement=chosen.placement,
        device=chosen.device,
        estimate=chosen.candidate.estimate,
        correction=chosen.correction,
        step_s=chosen.candidate.step_s,
        needed_bytes=chosen.needed_bytes,
        fit_probability=chosen.fit_probability,
        change=changes(before.plan, chosen.candidate.plan) if before else (),
        change_reason=before.failure.reason if before and before.failure else "",
        launched_at_s=state.at_s,
        probe=chosen.probe,
    )
    job = replace(job, status=JobStatus.RUNNING, attempts=(*job.attempts, attempt), reason=_why(chosen, before))
    return job, attempt


def _why(chosen: Chosen, before: Attempt | None) -> str:
    candidate = chosen.candidate
    if chosen.probe:
        return f"is measured at micro-batch {candidate.plan.micro_batch_size}: nobody knows what it needs"
    if before is None or before.failure is None:
        return "runs the fastest plan that fits"
    changed = ", ".join(str(change) for change in changes(before.plan, candidate.plan))
    if before.failure.kind is FailureKind.MOVED:
        return f"goes on with {changed or 'the same plan'}: {before.failure.reason}"
    if before.plan == candidate.plan:
        return f"runs the same plan again after {before.failure.kind}"
    return f"runs a cheaper plan after {before.failure.kind}: {changed}"


# access


def _find(state: State, job_id: str, number: int) -> tuple[Job | None, Attempt | None]:
    job = state.jobs.get(job_id)
    if job is None or not 1 <= number <= len(job.attempts):
        return job, None
    return job, job.attempts[number - 1]


def _live(job: Job) -> Attempt | None:
    return job.last if job.last and job.last.status is not AttemptStatus.ENDED else None


def _all_released(job: Job) -> bool:
    return all(attempt.released for attempt in job.attempts)


def _with_job(state: State, job: Job) -> State:
    return replace(state, jobs=state.jobs.with_job(job))


def _settled(state: State, job: Job) -> tuple[State, tuple[Archive, ...]]:
    """The state with the job; without it, and the job handed over, once it has ended and given back all devices."""
    if job.status.ended and _all_released(job):
        return replace(state, jobs=state.jobs.without(job.id)), (Archive(job=job),)
    return _with_job(state, job), ()


def _with_observations(state: State, observed: Sequence[Observation]) -> State:
    return replace(state, observations=remembered((*state.observations, *observed))) if observed else state


def _with_attempt(job: Job, attempt: Attempt) -> Job:
    attempts: Sequence[Attempt] = job.attempts
    return replace(job, attempts=(*attempts[: attempt.number - 1], attempt, *attempts[attempt.number :]))


def _with_demand(before: State, state: State, desk: Desk, event: Event) -> State:
    """The state that remembers what was submitted."""
    waiting = desk.waiting.get(event.job_id) if isinstance(event, Submitted) else None
    if waiting is None or not desk.devices or state.submitted == before.submitted:
        return state
    _, length_s, device_s = desk.size_of(waiting.job)
    return replace(state, demand=asked(state.demand, state.at_s, length_s, device_s))


def _capacity_bytes(state: State, attempt: Attempt) -> int | None:
    return next((node.device.memory for node in state.nodes if node.device.name == attempt.device), None)
