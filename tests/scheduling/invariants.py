"""What must hold of every history of the core: `violations` names each breach in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import exp, log
from typing import Any
from zoneinfo import ZoneInfo

from orchestrator.backends.simulated_process import Process
from orchestrator.memory.calibration import corrected_bytes
from orchestrator.scheduling import step as core
from orchestrator.scheduling.desk import Desk
from orchestrator.scheduling.elastic import REST
from orchestrator.scheduling.fair import FORGOTTEN_DEVICE_S, fair_tree, used_s
from orchestrator.scheduling.moves import MOVE_GRACE_S
from orchestrator.specs.attempt import Attempt, AttemptStatus, FailureKind
from orchestrator.specs.clock import Window
from orchestrator.specs.cluster import Node
from orchestrator.specs.job import Retries
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
    Record,
    State,
    Stop,
    Woke,
)
from tests.scheduling.world import whole

# Said once more, on purpose: which budget pays for which failure. What is not here is never tried again.
BUDGET_OF = {
    FailureKind.DEVICE_OOM: "oom",
    FailureKind.HOST_OOM: "oom",
    FailureKind.CROWDED: "node",
    FailureKind.NODE_LOST: "node",
    FailureKind.PREEMPTED: "preemption",
    FailureKind.HUNG: "hang",
    FailureKind.STARTUP: "startup",
}
MOVED = FailureKind.MOVED
GOES_ON = (*BUDGET_OF, MOVED)  # moved at no cost
OUT_OF_MEMORY = (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM)


@dataclass(frozen=True)
class Transition:
    before: State  # with every job that was archived, as in `after`
    event: Event
    after: State
    actions: tuple[Action, ...]
    state: State  # as `step` left it


def history(events: Iterable[Event]) -> list[Transition]:
    """Every transition that `step` makes of the events."""
    transitions = []
    state, archived = State(), dict[str, Job]()
    for event in events:
        before = whole(state, archived)
        state, actions = core.step(state, event)
        archived |= {action.job.id: action.job for action in _of(Archive, actions)}
        transitions.append(Transition(before, event, whole(state, archived), actions, state))
    return transitions


def violations(
    transitions: Sequence[Transition], processes: Mapping[str, Process] | None = None, *, complete: bool = False
) -> list[str]:
    """Each breach of a law, once.

    `processes` is what the simulated world saw; `complete` says that the history was played to its end.
    """
    found = [
        f"{said} (event {index}: {transition.event.type})"
        for index, transition in enumerate(transitions)
        for law in LAWS
        for said in law(transition)
    ]
    launches = Counter(action.attempt.name for t in transitions for action in t.actions if isinstance(action, Launch))
    found += [f"{name} was launched {count} times" for name, count in launches.items() if count > 1]
    if transitions:
        last = transitions[-1].after
        found += [said for job in last.jobs.values() for said in _budgets(job)]
        found += _usage(transitions)
        found += _unfinished(last) if complete else []
        found += _world(last, processes or {})
    return list(dict.fromkeys(found))


def _final_ends(t: Transition) -> Iterator[str]:
    for job in t.before.jobs.values():
        after = t.after.jobs.get(job.id)
        if after is None:
            yield f"{job.id} was lost"
        elif job.status.ended and (after.status is not job.status or len(after.attempts) != len(job.attempts)):
            yield f"{job.id} ended twice: {job.status}, then {after.status}"


def _one_gang_per_device(t: Transition) -> Iterator[str]:
    holders: dict[tuple[str, int], str] = {}
    for attempt in _attempts(t.after):
        if not attempt.released:
            for device in devices(attempt):
                if device in holders:
                    yield f"{attempt.name} and {holders[device]} hold {device[0]}:{device[1]} together"
                holders[device] = attempt.name


def _ran_before(job: Job, attempt: Attempt) -> bool:
    """A plan that trained within its memory is tried again, whatever the family has taught since."""
    return any(
        earlier.plan == attempt.plan and earlier.evidence and any(b.steps_done for b in earlier.evidence.heartbeats)
        for earlier in job.attempts[: attempt.number - 1]
    )


def _launches(t: Transition) -> Iterator[str]:
    """A launch is a new attempt of a queued job, as wide as its plan, on nodes that live, for the batch asked."""
    nodes = {node.name: node for node in t.before.nodes} | {node.name: node for node in t.after.nodes}
    launched = set()
    for launch in _of(Launch, t.actions):
        attempt, job = launch.attempt, t.after.jobs[launch.job.id]
        launched.add(attempt.name)
        held = devices(attempt)
        if attempt.plan.global_batch_size != job.spec.global_batch_size:
            yield f"{attempt.name} trains with batch {attempt.plan.global_batch_size}, not {job.spec.global_batch_size}"
        if len(set(held)) != attempt.plan.world_size or len(held) != attempt.plan.world_size:
            yield f"{attempt.name} has {len(set(held))} devices for {attempt.plan.world_size} ranks"
        if any(name not in nodes or not 0 <= index < nodes[name].devices for name, index in held):
            yield f"{attempt.name} is placed on devices that are not there"
        elif not _ran_before(job, attempt) and corrected_bytes(attempt.estimate, attempt.correction) > min(
            nodes[name].device.memory for name, _ in held
        ):
            yield f"{attempt.name} is predicted not to fit its devices"
        if not job.spec.gpus.min <= attempt.plan.world_size <= job.spec.gpus.max:
            yield f"{attempt.name} takes {attempt.plan.world_size} devices, outside of what its job allows"
        if job.last != attempt or attempt.number != len(job.attempts):
            yield f"{attempt.name} is launched but is not its job's newest attempt"
    for attempt in _attempts(t.after):
        known = t.before.jobs.get(attempt.job_id)
        if (known is None or len(known.attempts) < attempt.number) and attempt.name not in launched:
            yield f"{attempt.name} began without a launch"


def _one_attempt_at_a_time(t: Transition) -> Iterator[str]:
    for job in t.after.jobs.values():
        if sum(attempt.status is not AttemptStatus.ENDED for attempt in job.attempts) > 1:
            yield f"{job.id} runs twice at the same time"
        if [attempt.number for attempt in job.attempts] != list(range(1, len(job.attempts) + 1)):
            yield f"{job.id} numbers its attempts wrongly"


def _refuted_stay_refuted(t: Transition) -> Iterator[str]:
    for launch in _of(Launch, t.actions):
        for earlier in launch.job.attempts[: launch.attempt.number - 1]:
            kind = earlier.failure.kind if earlier.failure else None
            if kind in OUT_OF_MEMORY and earlier.plan == launch.attempt.plan:
                yield f"{launch.attempt.name} repeats the plan that ran out of memory in {earlier.name}"
            no_smaller = launch.attempt.estimate.device_bytes >= earlier.estimate.device_bytes
            if kind is FailureKind.DEVICE_OOM and earlier.device == launch.attempt.device and no_smaller:
                yield f"{launch.attempt.name} needs no less memory than {earlier.name}, which had too little"


def _no_launch_for_the_unwanted(t: Transition) -> Iterator[str]:
    for launch in _of(Launch, t.actions):
        job = t.after.jobs[launch.job.id]
        if job.cancelling:
            yield f"{launch.attempt.name} is launched although its job is cancelled"
        if job.status is not JobStatus.RUNNING:
            yield f"{launch.attempt.name} is launched although its job is {job.status}"
    for job in t.after.jobs.values():
        if job.status is JobStatus.REFUSED and job.attempts:
            yield f"{job.id} was refused after it ran"
        for attempt in job.attempts[:-1]:
            if attempt.failure is None or (attempt.failure.kind not in GOES_ON and not attempt.probe):
                kind = attempt.failure.kind if attempt.failure else "success"
                yield f"{job.id} was tried again after {kind}"


def _cancels_are_obeyed(t: Transition) -> Iterator[str]:
    if not isinstance(t.event, CancelRequested) or t.event.job_id not in t.before.jobs:
        return
    before, after = t.before.jobs[t.event.job_id], t.after.jobs[t.event.job_id]
    if before.status is JobStatus.QUEUED and after.status is not JobStatus.CANCELLED:
        yield f"{after.id} waits on although it is cancelled"
    if before.status is JobStatus.RUNNING and not before.cancelling:
        stopped = [(stop.job_id, stop.number) for stop in _of(Stop, t.actions)]
        if before.last is None or stopped != [(before.id, before.last.number)]:
            yield f"{after.id} runs on although it is cancelled"


def _nobody_is_stopped_in_vain(t: Transition) -> Iterator[str]:
    """Who is stopped is cancelled, or moved for a reason that is true."""
    for stop in _of(Stop, t.actions):
        job = t.after.jobs[stop.job_id]
        assert job.last is not None, job.id
        in_maintenance = any(leaves(node, t.after.at_s) for node in t.after.nodes if node.name in nodes_of(job.last))
        if not job.cancelling and not in_maintenance:
            yield from _not_worth_it(t, job, job.last)


def _not_worth_it(t: Transition, job: Job, attempt: Attempt) -> Iterator[str]:
    """Who is moved saves when it is told to end, has run for a while, and grows, or makes way for one ahead of it."""
    spec, why = job.spec, attempt.moved_for
    saves = not spec.is_script or (spec.knobs.resume_from and spec.resume.on_sigterm)
    if not saves or spec.optimizer_steps is None or spec.between or job.deadline_s is not None:
        yield f"{attempt.name} is moved although it would lose by that"
    launch_s = max(node.launch_cost_s for node in t.after.nodes if node.name in nodes_of(attempt))
    if t.after.at_s - attempt.launched_at_s < (1 + REST) * launch_s - 1e-6:
        yield f"{attempt.name} is moved {t.after.at_s - attempt.launched_at_s:.0f} s after its launch"
    claimed = {(part.node, index) for part in attempt.claims for index in part.devices}
    if why.startswith("stopped to go on with"):
        if not len(devices(attempt)) < len(claimed) <= spec.gpus.max:
            yield f"{attempt.name} of {len(devices(attempt))} devices is to grow to {len(claimed)}"
        others = {one for other in _attempts(t.after) if not other.released for one in devices(other)}
        if taken := claimed & others - set(devices(attempt)):
            yield f"{attempt.name} is to grow onto {sorted(taken)}, which others hold"
        if drained := {node for node, _ in claimed} & {*t.after.drained}:
            yield f"{attempt.name} is to grow onto {sorted(drained)}, which is drained"
    elif why.startswith("stopped to make way for"):
        other = t.after.jobs[why.split(":")[0].split()[5]]
        if other.status is not JobStatus.QUEUED or other.spec.priority < spec.priority:
            yield f"{attempt.name} makes way for {other.id}, which is {other.status} and of a lower class or none"
        if other.spec.priority == spec.priority and t.after.policy is not None:
            yield f"{attempt.name} makes way for {other.id}, although it is not its turn"
    else:
        yield f"{attempt.name} is stopped although nobody asked"


def _claims_are_kept(t: Transition) -> Iterator[str]:
    """Nobody starts on what is kept for one that moves."""
    claims = {
        (part.node, index): job.id
        for job in t.after.jobs.values()
        if job.last is not None
        and not job.last.released
        and (job.last.failure is None or job.last.failure.kind is MOVED)
        for part in job.last.claims
        for index in part.devices
    }
    for launch in _of(Launch, t.actions):
        for device in devices(launch.attempt):
            if device in claims:
                yield f"{launch.attempt.name} takes {device[0]}:{device[1]}, which is kept for {claims[device]}"


def _drained_nodes_get_nothing(t: Transition) -> Iterator[str]:
    for launch in _of(Launch, t.actions):
        for name in nodes_of(launch.attempt) & {*t.after.drained}:
            yield f"{launch.attempt.name} is launched on {name}, which is drained"
    if isinstance(t.event, DrainRequested) and (t.event.node in t.after.drained) == t.event.undo:
        yield f"{t.event.node} is {'still' if t.event.undo else 'not'} drained"


def _nothing_runs_in_a_maintenance(t: Transition) -> Iterator[str]:
    """Nobody starts what is not expected to end before it, and who is there when it begins is told to go."""
    nodes = {node.name: node for node in t.after.nodes}
    launches = [launch.attempt for launch in _of(Launch, t.actions)]
    if any(node.maintenance for node in t.after.nodes) and launches:
        desk = Desk(t.after)
        for attempt in launches:
            ends_s = desk.end_of(t.after.jobs[attempt.job_id], attempt)
            for node in (nodes[name] for name in nodes_of(attempt) if name in nodes):
                for start_s, end_s in node.maintenance:
                    if t.after.at_s < end_s and ends_s > start_s + 1e-6:
                        yield f"{attempt.name} is launched on {node.name}, into its maintenance"
    for job in t.after.jobs.values():
        if job.status is JobStatus.RUNNING and job.last is not None and job.last.status is not AttemptStatus.STOPPING:
            for name in nodes_of(job.last):
                if name in nodes and leaves(nodes[name], t.after.at_s):
                    yield f"{job.last.name} runs on in the maintenance of {name}"


def leaves(node: Node, at_s: float) -> bool:
    """Whether what runs on a node has to go: it gets MOVE_GRACE_S to do so before the maintenance begins."""
    return any(start_s - MOVE_GRACE_S <= at_s < end_s for start_s, end_s in node.maintenance)


def _order(t: Transition) -> Iterator[str]:
    """The higher priority starts first, and nobody past an equal job that was ahead and could start as well."""
    launches = list(_of(Launch, t.actions))
    places = [-launch.job.spec.priority for launch in launches]
    if (t.after.policy is None or not t.after.policy.has_quotas) and places != sorted(places):
        yield f"jobs start out of order: {[launch.job.id for launch in launches]}"
    turn = _turns(t.after)
    for launch, is_own in zip(launches, _within_guarantees(t), strict=True):
        for other in t.after.jobs.values():
            ahead = turn(other) < turn(launch.job) and not is_own and not _is_overdue(t, launch)
            ready = other.status is JobStatus.QUEUED and other.not_before_s <= t.after.at_s and not other.waits_for
            fresh = not other.attempts and launch.attempt.number == 1
            if ahead and ready and fresh and _shape(other) == _shape(launch.job):
                yield f"{launch.job.id} starts before {other.id}, which is equal and ahead"


def _within_guarantees(t: Transition) -> list[bool]:
    """Of each launch, whether its team held no more than its quota then."""
    return [held <= quota for _, held, quota in _claims(t)]


def _claims(t: Transition) -> Iterator[tuple[Launch, int, int]]:
    """Each launch with what its team holds from then on, and the team's quota; the earlier are launched."""
    policy = t.after.policy
    held = _held_by_teams(t)
    for launch in _of(Launch, t.actions):
        team = None if policy is None else policy.team_of(launch.job.user)
        if team is None:
            yield launch, 0, -1
        else:
            held[team.name] += launch.attempt.plan.world_size
            yield launch, held[team.name], team.quota


def _held_by_teams(t: Transition) -> Counter[str]:
    """Devices of each team before anything was launched."""
    held: Counter[str] = Counter()
    launched = {launch.attempt.name for launch in _of(Launch, t.actions)}
    for attempt in _attempts(t.after):
        if t.after.policy is not None and not attempt.released and attempt.name not in launched:
            held[t.after.policy.team_of(t.after.jobs[attempt.job_id].user).name] += len(devices(attempt))
    return held


def _nobody_borrows_what_its_owner_waits_for(t: Transition) -> Iterator[str]:
    """Beyond its quota no team starts what a team within its own could start there as well.

    Only jobs without a choice are held to it: one with a choice may wait for more of its own devices.
    """
    policy = t.after.policy
    if policy is None:
        return
    promised: Counter[str] = Counter()
    for one in t.after.reservations:
        promised[policy.team_of(t.after.jobs[one.job_id].user).name] += sum(len(part.devices) for part in one.placement)
    own = {one.job_id: sum(len(part.devices) for part in one.placement) for one in t.after.reservations}
    held = _held_by_teams(t)
    for launch, after, quota in _claims(t):
        width, team = launch.attempt.plan.world_size, policy.team_of(launch.job.user)
        for other in t.after.jobs.values():
            owner = policy.team_of(other.user)
            claimed = held[owner.name] + promised[owner.name] - own.get(other.id, 0) + width
            ready = other.status is JobStatus.QUEUED and other.not_before_s <= t.after.at_s and not other.waits_for
            fresh = not other.attempts and launch.attempt.number == 1
            alike = _shape(other) == _shape(launch.job) and other.spec.gpus.min == other.spec.gpus.max
            borrows = owner != team and after > quota and claimed <= owner.quota
            if borrows and ready and fresh and alike and not (held[team.name] == 0 and _is_overdue(t, launch)):
                yield f"{launch.job.id} borrows what is {owner.name}'s own while {other.id} waits"
        held[team.name] = after


def _is_overdue(t: Transition, launch: Launch) -> bool:
    """Whether a job is due: where quotas are, it comes before them once its team holds nothing."""
    has_quotas = t.after.policy is not None and t.after.policy.has_quotas
    return has_quotas and Desk(t.after).seated(launch.job).due_s <= t.after.at_s


def _turns(state: State) -> Callable[[Job], tuple[float, ...]]:
    """Priority; then, on a shared cluster, who used less per share, first of the teams and then of their users."""
    if state.policy is None:
        return lambda job: (-job.spec.priority, job.order)
    tree = fair_tree(state.policy, used_s(state, state.jobs.values()))
    return lambda job: (-job.spec.priority, *tree.place(job.user), job.order)


def _no_reservation_is_delayed(t: Transition) -> Iterator[str]:
    """What starts on devices that are promised to another is expected to have left them by then."""
    promised = [one for one in t.after.reservations if t.after.jobs[one.job_id].status is JobStatus.QUEUED]
    if len(promised) < len(t.after.reservations):
        yield "devices are promised to a job that does not wait"
    launches = list(_of(Launch, t.actions))
    if not promised or not launches:
        return
    desk = Desk(t.after)
    for launch in launches:
        end_s = desk.end_of(t.after.jobs[launch.job.id], launch.attempt)
        for one in promised:
            shared = set(devices(launch.attempt)) & {(part.node, i) for part in one.placement for i in part.devices}
            if shared and end_s > one.start_s + 1e-6:
                yield f"{launch.attempt.name} holds devices until {end_s} that {one.job_id} has from {one.start_s} on"


def _growth_delays_no_promise(t: Transition) -> Iterator[str]:
    """Who goes on with more devices is expected to have left by then what another was promised before."""
    grown = [(t.after.jobs[stop.job_id], t.after.jobs[stop.job_id].attempts[-1]) for stop in _of(Stop, t.actions)]
    for job, attempt in ((job, attempt) for job, attempt in grown if attempt.claims and not job.cancelling):
        desk = Desk(t.after)
        pool, claimed = desk.pool_of(attempt), {(part.node, i) for part in attempt.claims for i in part.devices}
        assert pool is not None, attempt.name
        left_s = desk.end_of(job, replace(attempt, leaves_by_s=None)) - t.after.at_s
        entries = [entry for entry in desk.entries_of(job, pool) if entry.devices == len(claimed)]
        slower = min(entry.candidate.step_s for entry in entries) / attempt.step_s
        end_s = t.after.at_s + pool.launch_cost_s + left_s * slower
        for one in t.after.reservations:
            if (
                claimed & {(part.node, i) for part in one.placement for i in part.devices}
                and end_s > one.start_s + 1e-6
            ):
                yield f"{attempt.name} grows until {end_s} onto what {one.job_id} was promised from {one.start_s} on"


def _dependants_wait(t: Transition) -> Iterator[str]:
    """Nobody begins before what it comes after has ended as it wants, nor waits for what has ended otherwise."""
    for launch in _of(Launch, t.actions):
        for one in launch.job.spec.after:
            other = t.after.jobs.get(one.job)
            status = other.status if other else None
            if status is not JobStatus.SUCCEEDED and (one.when == "success" or (status and not status.ended)):
                yield f"{launch.job.id} begins before {one.job}, after which it comes, has ended: it is {status}"
    for job in t.after.jobs.values():
        for one in job.spec.after if job.status is JobStatus.QUEUED else ():
            other = t.after.jobs.get(one.job)
            if one.when == "success" and other and other.status.ended and other.status is not JobStatus.SUCCEEDED:
                yield f"{job.id} waits for {one.job}, which is {other.status}"


def _arrays_are_bounded(t: Transition) -> Iterator[str]:
    """Of an array never more run at once than it says."""
    running = Counter(job.array for job in t.after.jobs.values() if job.array and job.status is JobStatus.RUNNING)
    for job in t.after.jobs.values():
        most = job.spec.member.at_most if job.spec.member else None
        if job.array and most and running[job.array] > most:
            yield f"{running[job.array]} jobs of the array {job.array} run at once, {most} may"


def _windows_are_kept(t: Transition) -> Iterator[str]:
    """What says hours starts when the clocks of its zone show them, and is expected to end within them if it can."""
    launches = [launch for launch in _of(Launch, t.actions) if launch.job.spec.between is not None]
    if not launches:
        return
    desk = Desk(t.after)
    for launch in launches:
        window, begin_s = launch.job.spec.between, launch.attempt.launched_at_s
        assert window is not None
        local = datetime.fromtimestamp(begin_s, ZoneInfo(window.zone or "UTC"))
        if not _shows(window, local):
            yield f"{launch.attempt.name} starts at {local:%a %H:%M}, outside of {window}"
        seconds = desk.end_of(t.after.jobs[launch.job.id], launch.attempt) - begin_s
        spans = [window.span(begin_s + day * 86400) for day in range(7)]
        has_end = launch.job.spec.optimizer_steps is not None
        if has_end and begin_s + seconds > spans[0][1] + 1 and any(b - a >= seconds for a, b in spans[1:]):
            yield f"{launch.attempt.name} is expected to run on after {window}, and could end within it"


def _shows(window: Window, local: datetime) -> bool:
    """Said once more, on purpose: whether a clock that shows this time shows one of the window."""
    begin = local.date() if local.hour * 60 + local.minute >= window.opens_min else local.date() - timedelta(days=1)
    length_min = (window.closes_min - window.opens_min) % 1440 or 1440
    shown_min = (local.date() - begin).days * 1440 + local.hour * 60 + local.minute - window.opens_min
    return begin.weekday() in window.days and 0 <= shown_min < length_min


def _status_agrees(t: Transition) -> Iterator[str]:
    for job in t.after.jobs.values():
        live = bool(job.last and job.last.status is not AttemptStatus.ENDED)
        if live != (job.status is JobStatus.RUNNING):
            yield f"{job.id} is {job.status} with {'a' if live else 'no'} live attempt"
        succeeded = bool(job.last and job.last.status is AttemptStatus.ENDED and job.last.failure is None)
        if succeeded != (job.status is JobStatus.SUCCEEDED):
            yield f"{job.id} is {job.status} but its last attempt {'succeeded' if succeeded else 'did not succeed'}"


def _everything_is_recorded(t: Transition) -> Iterator[str]:
    """The tracker hears of every new status of a job, and of every end of an attempt."""
    recorded = {(record.job.id, record.job.status) for record in _of(Record, t.actions)}
    ended = {record.attempt.name for record in _of(Record, t.actions) if record.attempt and record.attempt.evidence}
    for job in t.after.jobs.values():
        before = t.before.jobs.get(job.id)
        if (before is None or before.status is not job.status) and (job.id, job.status) not in recorded:
            yield f"{job.id} became {job.status} and no record says so"
    known = {attempt.name: attempt for attempt in _attempts(t.before)}
    for attempt in _attempts(t.after):
        news = attempt.evidence is not None and attempt.name in known and known[attempt.name].evidence is None
        if news and attempt.name not in ended:
            yield f"{attempt.name} ended and no record says so"


def _budgets_are_used(t: Transition) -> Iterator[str]:
    """Nobody is given up at the end of an attempt while the budget of that failure lasts."""
    for job in t.after.jobs.values():
        before = t.before.jobs.get(job.id)
        if before and before.status is JobStatus.RUNNING and job.status is JobStatus.FAILED:
            kinds = [attempt.failure.kind for attempt in job.attempts if attempt.failure and not attempt.probe]
            budget = BUDGET_OF.get(kinds[-1]) if kinds else None
            used = sum(BUDGET_OF.get(kind) == budget for kind in kinds)
            if budget and used <= getattr(job.spec.retries, budget):
                yield f"{job.id} was given up after {kinds[-1]} with retries.{budget} left"


def _moves_cost_nothing(t: Transition) -> Iterator[str]:
    """An attempt that we ended is queued again, whatever budgets are left, unless it really failed by itself."""
    if not isinstance(t.event, Finished) or t.event.job_id not in t.before.jobs:
        return
    before, job = t.before.jobs[t.event.job_id], t.after.jobs[t.event.job_id]
    attempt = next((one for one in before.attempts if one.number == t.event.number), None)
    if attempt is None or attempt.status is AttemptStatus.ENDED or not attempt.moved_for or before.cancelling:
        return
    failure, evidence = job.attempts[attempt.number - 1].failure, t.event.evidence
    reached = max((beat.step for beat in evidence.heartbeats), default=0)
    is_moved = attempt.claims and failure is not None and failure.kind is MOVED
    if is_moved and (evidence.checkpoint_step or 0) < reached:
        yield f"{attempt.name} was moved at step {reached} and goes on from {evidence.checkpoint_step}"
    own = failure is None or failure.kind is FailureKind.MOVED or evidence.ooms or evidence.launch_error is not None
    if evidence.stopped and not own and failure is not None:
        yield f"{attempt.name} was moved and is taken for {failure.kind}"


def _archived_for_good(t: Transition) -> Iterator[str]:
    """A job is handed to the archive once, when it has ended and given everything back, and the state forgets it."""
    handed = [archive.job for archive in _of(Archive, t.actions)]
    for job in handed:
        if not job.status.ended or not all(attempt.released for attempt in job.attempts):
            yield f"{job.id} was archived although it is {job.status} or holds devices"
        if job.id in t.state.jobs:
            yield f"{job.id} was archived and is still remembered"
    for job in t.state.jobs.values():
        if job.status.ended and all(attempt.released for attempt in job.attempts):
            yield f"{job.id} has ended and released everything, and is still remembered"


def _waking_ends(t: Transition) -> Iterator[str]:
    wake_s = core.wake_at_s(t.after)
    if wake_s is not None and wake_s <= t.after.at_s:
        yield f"asks to be woken at {wake_s}, which is over at {t.after.at_s}"
    if isinstance(t.event, Woke) and t.after.at_s < t.before.at_s:
        yield "time ran backwards"


def _probes(t: Transition) -> Iterator[str]:
    """Two at most, before anything else of a job whose memory nobody knows; what they leave is no progress."""
    for launch in _of(Launch, t.actions):
        before = launch.job.attempts[: launch.attempt.number - 1]
        if not launch.attempt.probe:
            continue
        spec = launch.job.spec
        if len(before) >= 2 or not all(one.probe for one in before):
            yield f"{launch.attempt.name} probes what has been tried {len(before)} times"
        if not spec.is_script or spec.profile is not None or spec.probe == "never":
            yield f"{launch.attempt.name} probes what is known, or not to be probed"
        micro = launch.attempt.plan.micro_batch_size
        if any(one.plan.micro_batch_size >= micro for one in before):
            yield f"{launch.attempt.name} probes micro-batch {micro} after one that was no smaller"
        known = [seen for seen in t.before.observations if seen.family == spec.family_name and not seen.probe]
        if any(seen.device == launch.attempt.device for seen in known):
            yield f"{launch.attempt.name} probes although its family has run here"
    for attempt in _attempts(t.after):
        if attempt.probe and attempt.evidence is not None and attempt.evidence.checkpoint_step:
            yield f"{attempt.name} is a probe and counts as progress"


LAWS: tuple[Callable[[Transition], Iterator[str]], ...] = (
    _final_ends,
    _one_gang_per_device,
    _launches,
    _one_attempt_at_a_time,
    _refuted_stay_refuted,
    _no_launch_for_the_unwanted,
    _cancels_are_obeyed,
    _nobody_is_stopped_in_vain,
    _claims_are_kept,
    _drained_nodes_get_nothing,
    _nothing_runs_in_a_maintenance,
    _order,
    _nobody_borrows_what_its_owner_waits_for,
    _probes,
    _no_reservation_is_delayed,
    _growth_delays_no_promise,
    _dependants_wait,
    _arrays_are_bounded,
    _windows_are_kept,
    _status_agrees,
    _everything_is_recorded,
    _budgets_are_used,
    _moves_cost_nothing,
    _archived_for_good,
    _waking_ends,
)


def _budgets(job: Job) -> Iterator[str]:
    """Each budget bounds its own retries."""
    real = [attempt for attempt in job.attempts if not attempt.probe]
    kinds = [attempt.failure.kind for attempt in real if attempt.failure]
    retried = Counter(BUDGET_OF[kind] for kind in kinds[: max(0, len(real) - 1)] if kind in BUDGET_OF)
    for budget, count in retried.items():
        if count > getattr(job.spec.retries, budget):
            yield f"{job.id} was tried again {count} times on retries.{budget}={getattr(job.spec.retries, budget)}"


def _usage(transitions: Sequence[Transition]) -> Iterator[str]:
    """Everybody has used what the attempts of their jobs held, from launch to release, less what is forgotten."""
    policy = transitions[-1].after.policy
    if policy is None or any(t.after.policy != policy for t in transitions if any(_attempts(t.after))):
        return
    spans: dict[str, list[Any]] = {}  # user, devices, from, to
    for t in transitions:
        for attempt in _attempts(t.after):
            user = t.after.jobs[attempt.job_id].user
            span = spans.setdefault(attempt.name, [user, len(devices(attempt)), t.after.at_s, None])
            if attempt.released and span[3] is None:
                span[3] = t.after.at_s
    now_s, life_s = transitions[-1].after.at_s, policy.half_life / log(2)
    held: Counter[str] = Counter()
    for user, count, from_s, to_s in spans.values():
        ages_s = now_s - (now_s if to_s is None else to_s), now_s - from_s
        held[user] += count * life_s * (exp(-ages_s[0] / life_s) - exp(-ages_s[1] / life_s))
    used = used_s(transitions[-1].state, transitions[-1].state.jobs.values())
    for user in {*held, *used}:
        if abs(held[user] - used.get(user, 0.0)) > 1e-6 * held[user] + FORGOTTEN_DEVICE_S * len(spans):
            yield f"{user or 'nobody'} is said to have used {used.get(user)} device-seconds, and held {held[user]}"


def _unfinished(state: State) -> Iterator[str]:
    for job in state.jobs.values():
        if not job.status.ended:
            yield f"{job.id} never ended: {job.status} ({job.reason})"
        if not all(attempt.released for attempt in job.attempts):
            yield f"{job.id} never gave its devices back"


def _world(state: State, processes: Mapping[str, Process]) -> Iterator[str]:
    """The core believes what the world saw, and the world never held two gangs on one device."""
    last_on: dict[tuple[str, int], Process] = {}
    for name, process in processes.items():
        for device in process.devices:
            earlier = last_on.get(device)
            if earlier and (earlier.released_at_s is None or earlier.released_at_s > process.launched_at_s):
                yield f"{name} began on {device[0]}:{device[1]} before {earlier.attempt.name} had left it"
            last_on[device] = process
    for name, process in processes.items():
        for node in (node for node in state.declared if node.name in process.nodes):
            for start_s, end_s in node.maintenance:
                if process.launched_at_s < end_s and (process.ended_at_s is None or process.ended_at_s > start_s):
                    yield f"{name} ran on {node.name} in its maintenance"
    for attempt in _attempts(state):
        process = processes.get(attempt.name)
        if process is not None and attempt.status is AttemptStatus.ENDED:
            believed = attempt.failure.kind if attempt.failure else None
            if believed is FailureKind.MOVED and attempt.moved_for:
                believed = FailureKind.CANCELLED  # the world knows no reasons
            if believed is not process.ending:
                yield f"{attempt.name} ended by {process.ending or 'success'} but is taken for {believed or 'success'}"
    if processes:
        unknown = set(processes) - {attempt.name for attempt in _attempts(state)}
        yield from (f"{name} runs and the core does not know it" for name in unknown)
        absent = {attempt.name for attempt in _attempts(state)} - set(processes)
        yield from (f"{name} was never begun" for name in absent)


def devices(attempt: Attempt) -> list[tuple[str, int]]:
    return [(part.node, index) for part in attempt.placement for index in part.devices]


def nodes_of(attempt: Attempt) -> set[str]:
    return {part.node for part in attempt.placement}


def _attempts(state: State) -> Iterator[Attempt]:
    return (attempt for job in state.jobs.values() for attempt in job.attempts)


def _of(kind: type[Any], actions: tuple[Action, ...]) -> Iterator[Any]:
    return (action for action in actions if isinstance(action, kind))


def _shape(job: Job) -> object:
    """What makes two jobs equal for placement: all but name, priority, user and what comes after a start."""
    return job.spec.model_copy(update={"priority": 0, "user": None, "retries": Retries()}), job.deadline_s
