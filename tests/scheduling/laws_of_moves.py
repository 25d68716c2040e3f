"""Laws of who is stopped: for a reason that is true, at no cost, and to nobody's harm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from orchestrator.scheduling.base import tuning
from orchestrator.scheduling.base.drain import list_active_suspensions
from orchestrator.scheduling.base.migration import MOVE_GRACE_S
from orchestrator.scheduling.base.time_limits import compute_total_run_time_s
from orchestrator.scheduling.options.job_options import JobOptions
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import Attempt, AttemptStatus, FailureKind, StopCause
from orchestrator.specs.cluster import Node
from orchestrator.specs.events import DrainRequested, Finished, UpdateRequested
from orchestrator.specs.job_record import Job, JobStatus
from tests.scheduling.laws_of_attempts import MOVED
from tests.scheduling.transition import (
    Law,
    Transition,
    attempts,
    devices,
    nodes_of,
    of,
    priority_of,
)

REST = tuning.TUNING.rest  # as it is, whatever a planted bug makes of it


def _nobody_is_stopped_in_vain(t: Transition) -> Iterator[str]:
    """A stopped job is cancelled, held, over its time limit, or moved for a reason that is true."""
    for stop in of(Stop, t.actions):
        job = t.after.jobs[stop.job_id]
        assert job.last is not None, job.id
        # Jobs of a node leave one after another, ten seconds apart.
        devices_max = max((node.devices for node in t.after.nodes), default=0)
        soon_s = t.after.at_s + 10.0 * devices_max
        in_maintenance = any(
            leaves(node, t.after.at_s) or leaves(node, soon_s)
            for node in t.after.nodes
            if node.name in nodes_of(job.last)
        )
        is_held = (
            isinstance(t.event, UpdateRequested)
            and t.event.job_id == job.id
            and job.held_by is not None
        )
        is_over = (
            job.spec.time_limit is not None
            and compute_total_run_time_s(job, t.after.at_s) >= job.spec.time_limit - 1e-6
        )
        climbs = job.last.climbs_to is not None  # tests/scheduling/test_climb.py
        if not (
            job.cancelling
            or in_maintenance
            or is_held
            or climbs
            or hours_end(job, t.after.at_s)
            or (is_over and job.last.over_limit)
        ):
            yield from _not_worth_it(t, job, job.last)


def hours_end(job: Job, at_s: float) -> bool:
    """Return whether the hours end of a job that can be saved and does not stay."""
    window, spec = job.spec.start_window, job.spec
    saves = not spec.is_script or (spec.knobs.resume_from and spec.resume.on_sigterm)
    if window is None or spec.stays or not saves:
        return False
    return (
        window.find_first_opening(at_s)[0] > at_s
        or window.find_first_opening(at_s)[1] <= at_s + MOVE_GRACE_S
    )


def _not_worth_it(t: Transition, job: Job, attempt: Attempt) -> Iterator[str]:
    """A moved job saves on request, has run for a while, and grows or makes way for a job ahead of it."""
    spec, why = job.spec, attempt.moved_for
    resumes = not spec.is_script or spec.knobs.resume_from
    if not resumes or spec.start_window:
        yield f"{attempt.name} is moved although it would lose by that"
    yield from _deadline_lost(t, job, attempt)
    launch_s = max(node.launch_cost_s for node in t.after.nodes if node.name in nodes_of(attempt))
    if t.after.at_s - attempt.launched_at_s < (1 + REST) * launch_s - 1e-6:
        yield f"{attempt.name} is moved {t.after.at_s - attempt.launched_at_s:.0f} s after its launch"
    if (breach := _too_soon(t, job, attempt)) is not None:
        yield breach
    claimed = {(part.node, index) for part in attempt.held_placement for index in part.devices}
    if why.startswith("stopped to go on with"):
        if not (not spec.is_script or spec.resume.on_sigterm) or spec.optimizer_steps is None:
            yield f"{attempt.name} is to grow although it would lose by that"
        if not len(devices(attempt)) < len(claimed) <= spec.gpus.max:
            yield f"{attempt.name} of {len(devices(attempt))} devices is to grow to {len(claimed)}"
        others = {
            device for other in attempts(t.after) if not other.released for device in devices(other)
        }
        if taken := claimed & others - set(devices(attempt)):
            yield f"{attempt.name} is to grow onto {sorted(taken)}, which others hold"
        if drained := {node for node, _ in claimed} & {*t.after.drained}:
            yield f"{attempt.name} is to grow onto {sorted(drained)}, which is drained"
    elif why.startswith("stopped to make way for"):
        other = t.after.jobs[why.split(":")[0].split()[5]]
        if other.spec.guarantee is not None:
            if other.status is not JobStatus.QUEUED or spec.guarantee is not None:
                yield f"{attempt.name} makes way for {other.id}, which is {other.status}, or is guaranteed a speed"
            return
        urgent = priority_of(t.after, other), priority_of(t.after, job)
        if other.status is not JobStatus.QUEUED or urgent[0] < urgent[1]:
            yield f"{attempt.name} makes way for {other.id}, which is {other.status} and of a lower class or none"
        if attempt.stop_cause is StopCause.OWNER:
            yield from _not_owed(t, job, other)
        elif urgent[0] == urgent[1] and t.after.policy.has_teams:
            yield f"{attempt.name} makes way for {other.id}, although it is not its turn"
    else:
        yield f"{attempt.name} is stopped although nobody asked"


def _not_owed(t: Transition, job: Job, other: Job) -> Iterator[str]:
    """A team takes devices back only from a team that keeps its own, and only up to its own."""
    policy = t.after.policy
    teams = policy.find_team(job.user), policy.find_team(other.user)
    devices_by_team: Counter[str] = Counter()
    for attempt in attempts(t.after):
        if not attempt.released and attempt.status is not AttemptStatus.STOPPING:
            user = t.after.jobs[attempt.job_id].user
            devices_by_team[policy.find_team(user).name] += len(devices(attempt))
    if policy.has_quotas and devices_by_team[teams[0].name] < teams[0].quota:
        yield f"{job.id} makes way for an owner, and its team {teams[0].name} holds less than its own"
    if teams[0] == teams[1] or policy.reclaim == "never":
        yield f"{job.id} makes way for {other.id}, which owns none of its devices"


def _too_soon(t: Transition, job: Job, attempt: Attempt) -> str | None:
    """A job is stopped at most once in 30 minutes; for a gain at most once in 10, and in 10 times what that costs."""
    launch_s = max(node.launch_cost_s for node in t.after.nodes if node.name in nodes_of(attempt))
    is_for_gain = attempt.stop_cause in (StopCause.GAIN, StopCause.GROWTH)
    rest_s = max(600.0, 10.0 * launch_s) if is_for_gain else 1800.0
    stops_s = [
        earlier.ended_at_s
        for earlier in job.attempts[:-1]
        if earlier.moved_for and earlier.ended_at_s is not None
    ]
    since_s = t.after.at_s - max(stops_s, default=-inf)
    if since_s < rest_s - 1e-6:
        return f"{attempt.name} is stopped {since_s:.0f} s after its last stop"
    return None


def _deadline_lost(t: Transition, job: Job, attempt: Attempt) -> Iterator[str]:
    """A job that meets its deadline makes way only for an earlier one, and still meets its own after that."""
    index, at_s = make_index(t.after), t.after.at_s
    end_s = index.estimate_end_s(job, replace(attempt, leaves_by_s=None))
    if job.deadline_s is None or end_s > job.deadline_s:
        return
    other = t.after.jobs.get(attempt.moved_for.partition("make way for ")[2].partition(":")[0])
    if other is None or other.deadline_s is None or other.deadline_s >= job.deadline_s:
        yield f"{attempt.name} is moved for no earlier deadline although it would meet its own"
        return
    menus = [
        menu
        for _, menu in index.options.find_options(index.make_queue_entry(other))
        if isinstance(menu, JobOptions)
    ]
    shortest_s = min(entry.seconds for menu in menus for entry in menu.entries)
    launch_s = max(node.launch_cost_s for node in t.after.nodes if node.name in nodes_of(attempt))
    if at_s + shortest_s > other.deadline_s + 1e-6:
        yield f"{attempt.name} makes way for {other.id}, which is late all the same"
    if end_s + shortest_s + launch_s > job.deadline_s + 1e-6:
        yield f"{attempt.name} misses its deadline by making way"


def _claims_are_kept(t: Transition) -> Iterator[str]:
    """No job starts on devices that are kept for a job that moves."""
    held_placement = {
        (part.node, index): job.id
        for job in t.after.jobs.values()
        if job.last is not None
        and not job.last.released
        and (job.last.failure is None or job.last.failure.kind is MOVED)
        for part in job.last.held_placement
        for index in part.devices
    }
    for launch in of(Launch, t.actions):
        for device in devices(launch.attempt):
            if device in held_placement:
                yield f"{launch.attempt.name} takes {device[0]}:{device[1]}, which is kept for {held_placement[device]}"


def _growth_delays_no_promise(t: Transition) -> Iterator[str]:
    """A job that grows is expected to leave promised devices before their reservations begin."""
    grown = [
        (t.after.jobs[stop.job_id], t.after.jobs[stop.job_id].attempts[-1])
        for stop in of(Stop, t.actions)
    ]
    for job, attempt in (
        (job, attempt) for job, attempt in grown if attempt.held_placement and not job.cancelling
    ):
        index = make_index(t.after)
        pool, claimed = (
            index.find_pool(attempt),
            {(part.node, i) for part in attempt.held_placement for i in part.devices},
        )
        assert pool is not None, attempt.name
        left_s = index.estimate_end_s(job, replace(attempt, leaves_by_s=None)) - t.after.at_s
        entries = [
            entry
            for entry in index.options.find_options_of_running_job(job, pool)
            if entry.devices == len(claimed)
        ]
        slower = min(entry.candidate.step_s for entry in entries) / attempt.step_s
        end_s = t.after.at_s + pool.launch_cost_s + left_s * slower
        for reservation in t.after.reservations:
            if (
                claimed & {(part.node, i) for part in reservation.placement for i in part.devices}
                and end_s > reservation.start_s + 1e-6
            ):
                start_s, owner = reservation.start_s, reservation.job_id
                yield f"{attempt.name} grows until {end_s} onto what {owner} was promised from {start_s} on"


def _drained_nodes_get_nothing(t: Transition) -> Iterator[str]:
    for launch in of(Launch, t.actions):
        for name in nodes_of(launch.attempt) & {*t.after.drained}:
            yield f"{launch.attempt.name} is launched on {name}, which is drained"
    if isinstance(t.event, DrainRequested) and (t.event.node in t.after.drained) == t.event.undo:
        yield f"{t.event.node} is {'still' if t.event.undo else 'not'} drained"


def _suspended_places_get_nothing(t: Transition) -> Iterator[str]:
    for launch in of(Launch, t.actions):
        for entry in list_active_suspensions(t.after):
            if any((entry.node, entry.device) == place or (entry.node == place[0] and entry.device is None)
                   for place in devices(launch.attempt)):  # fmt: skip
                yield f"{launch.attempt.name} is launched on {entry.place}, which is suspended"


def _can_be_saved(job: Job) -> bool:
    """Return whether a job fills the time before a maintenance: it saves on request, and no time binds it."""
    spec = job.spec
    saves = not spec.is_script or (spec.knobs.resume_from and spec.resume.on_sigterm)
    bound = spec.start_window or spec.guarantee or job.deadline_s is not None
    return bool(saves and not bound)


def _nothing_runs_in_a_maintenance(t: Transition) -> Iterator[str]:
    """No job starts that is expected to run into a maintenance, and a job that still runs then is stopped."""
    nodes = {node.name: node for node in t.after.nodes}
    launches = [launch.attempt for launch in of(Launch, t.actions)]
    if any(node.maintenance for node in t.after.nodes) and launches:
        index = make_index(t.after)
        for attempt in launches:
            job = t.after.jobs[attempt.job_id]
            length = index.predict_duration(job, attempt)
            lasts_s = 0.0 if length is None else length.open_s
            if _can_be_saved(job) and not attempt.probe:
                launch_s = max(nodes[name].launch_cost_s for name in nodes_of(attempt))
                lasts_s = min(lasts_s, 10 * launch_s)
            ends_s = t.after.at_s + lasts_s
            for node in (nodes[name] for name in nodes_of(attempt) if name in nodes):
                for start_s, end_s in node.maintenance:
                    if t.after.at_s < end_s and ends_s > start_s + 1e-6:
                        yield f"{attempt.name} is launched on {node.name}, into its maintenance"
    for job in t.after.jobs.values():
        if (
            job.status is JobStatus.RUNNING
            and job.last is not None
            and job.last.status is not AttemptStatus.STOPPING
        ):
            for name in nodes_of(job.last):
                if name in nodes and leaves(nodes[name], t.after.at_s):
                    yield f"{job.last.name} runs on in the maintenance of {name}"


def leaves(node: Node, at_s: float) -> bool:
    """Return whether jobs must leave a node: they get MOVE_GRACE_S before the maintenance begins."""
    return any(start_s - MOVE_GRACE_S <= at_s < end_s for start_s, end_s in node.maintenance)


def _moves_cost_nothing(t: Transition) -> Iterator[str]:
    """An attempt that we ended is queued again, whatever budgets are left, unless it really failed by itself."""
    if not isinstance(t.event, Finished) or t.event.job_id not in t.before.jobs:
        return
    before, job = t.before.jobs[t.event.job_id], t.after.jobs[t.event.job_id]
    attempt = next(
        (earlier for earlier in before.attempts if earlier.number == t.event.number), None
    )
    if (
        attempt is None
        or attempt.status is AttemptStatus.ENDED
        or not attempt.moved_for
        or before.cancelling
    ):
        return
    failure, evidence = job.attempts[attempt.number - 1].failure, t.event.evidence
    reached = max((beat.step for beat in evidence.heartbeats), default=0)
    is_moved = attempt.held_placement and failure is not None and failure.kind is MOVED
    if is_moved and (evidence.checkpoint_step or 0) < reached:
        yield f"{attempt.name} was moved at step {reached} and goes on from {evidence.checkpoint_step}"
    kinds = (FailureKind.MOVED, FailureKind.TIME_LIMIT if attempt.over_limit else FailureKind.MOVED)
    is_own_end = (
        failure is None
        or attempt.probe
        or failure.kind in kinds
        or evidence.ooms
        or evidence.launch_error is not None
    )
    if evidence.stopped and not is_own_end and failure is not None:
        yield f"{attempt.name} was moved and is taken for {failure.kind}"


LAWS: tuple[Law, ...] = (
    _claims_are_kept,
    _drained_nodes_get_nothing,
    _suspended_places_get_nothing,
    _nothing_runs_in_a_maintenance,
    _growth_delays_no_promise,
    _moves_cost_nothing,
)
ADAPTIVE_LAWS: tuple[Law, ...] = (
    _nobody_is_stopped_in_vain,
)  # what one gains and another loses counts for no other policy
