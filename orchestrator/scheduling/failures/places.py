"""Suspension of devices and nodes on which jobs ended for no known reason, and what lifts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from orchestrator.specs.attempt import (
    Attempt,
    Device,
    Ending,
    Failure,
    FailureKind,
    Placement,
    list_devices_of,
)
from orchestrator.specs.cluster import Node
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from orchestrator.specs.suspension import Suspension, UnexplainedEnd

RECENT_S = 600.0  # ends of other jobs within it tell of the same place or the same service
REMEMBERED_S = 86_400.0  # for so long an end counts against its device
ENDS_MAX = 256  # remembered at a time
SUSPENDED_FIRST_S = 1800.0
SUSPENDED_MAX_S = 43_200.0
TRUSTED_S = 1800.0  # who ran for so long had no trouble with the place
JOBS_MIN = 2  # whose ends suspend a place
REASON_CHARACTERS_MAX = 200


def update_suspensions(state: State, job: Job, attempt: Attempt, failure: Failure | None) -> State:
    """Return the state after an attempt's end, with its devices or nodes suspended (closed to
    attempts) or cleared.

    A success clears the attempt's devices; so does an end after long training. The job's earlier
    unexplained ends stop counting against devices where it ends the same way on two sets of
    devices, or where the program is to blame.
    """
    assert attempt.ended_at_s is not None
    at_s = attempt.ended_at_s
    devices = list_placement_devices(attempt.placement)
    nodes = list_placement_nodes(attempt.placement)
    ends = tuple(end for end in state.ends if at_s - end.at_s <= REMEMBERED_S)
    suspensions = state.suspensions
    if failure is None or at_s - attempt.launched_at_s >= TRUSTED_S:
        ends = tuple(end for end in ends if not devices & list_placement_devices(end.placement))
    ending = find_unexplained_ending(failure)
    if failure is None:
        suspensions = tuple(
            entry
            for entry in suspensions
            if get_suspended_device_or_node(entry) not in devices | nodes
        )
    elif ending is not None:
        if ended_alike_elsewhere(job, attempt, ending) or failure.kind is FailureKind.USER_ERROR:
            ends, suspensions = _withdraw_accusations(ends, suspensions, job)
        elif not ending.is_own and not attempt.facts.virtual:
            places, accusers = find_suspects_and_accusers(
                job, attempt, select_recent_ends_of_others(ends, job, at_s), state.nodes
            )
            if places and may_be_device_fault(ending):
                reason = f"{job.id} and others ended there: {failure.reason}"[
                    :REASON_CHARACTERS_MAX
                ]
                suspensions = _add_suspensions(state, places, reason, at_s, (job.key, *accusers))
            new = UnexplainedEnd(
                job=job.key,
                family=job.spec.family_name,
                ending=ending,
                placement=attempt.placement,
                at_s=at_s,
            )
            ends = (*ends, new)[-ENDS_MAX:]
    if ends == state.ends and suspensions == state.suspensions:
        return state
    return replace(state, ends=ends, suspensions=suspensions)


def find_suspects_and_accusers(
    job: Job, attempt: Attempt, ends_of_other_jobs: Sequence[UnexplainedEnd], nodes: Sequence[Node]
) -> tuple[tuple[Device | str, ...], tuple[str, ...]]:
    """Return (devices or else nodes that may have caused the attempt's end, keys of the other jobs
    that ended there too).

    `ends_of_other_jobs` are unexplained. Ends of the same family do not count: a sweep whose trials
    all end alike says nothing about devices. Both tuples are empty where no device would be left
    without the suspects.
    """
    at_s = attempt.ended_at_s or 0.0
    devices = list_placement_devices(attempt.placement)
    ends_of_other_jobs = [
        end
        for end in ends_of_other_jobs
        if end.family != job.spec.family_name and may_be_device_fault(end.ending)
    ]
    places: set[Device | str] = {
        device
        for end in ends_of_other_jobs
        for device in devices & list_placement_devices(end.placement)
    }
    if not places:
        ends_of_other_jobs = [end for end in ends_of_other_jobs if at_s - end.at_s <= RECENT_S]
        places = {
            node
            for node, _ in devices
            if any(node in list_placement_nodes(end.placement) for end in ends_of_other_jobs)
        }
    if not _leaves_any_device(nodes, places):
        return (), ()
    accusers = {
        end.job
        for end in ends_of_other_jobs
        if places & {*list_placement_devices(end.placement), *list_placement_nodes(end.placement)}
    }
    return tuple(sorted(places, key=str)), tuple(sorted(accusers))


def find_unexplained_ending(failure: Failure | None) -> Ending | None:
    """Return the ending of a failure that may be its devices' fault; None where something else
    explains the failure.

    A log that names broken hardware counts like an unexplained end, since the program wrote the
    log.
    """
    if failure is None or failure.broken is None:
        return None if failure is None else failure.ending
    return Ending(signature=failure.reason, step=None, elapsed_s=0.0, is_own=False, may_pass=False)


def may_be_device_fault(ending: Ending) -> bool:
    """Return whether a device may have caused this end: it came soon after launch, and neither the
    program nor an outside service (such as a model hub) explains it.
    """
    return not ending.is_own and not ending.may_pass and ending.elapsed_s < TRUSTED_S


def ended_alike_elsewhere(job: Job, attempt: Attempt, ending: Ending) -> bool:
    """Return whether an earlier attempt of the job ended the same way without any of this attempt's
    devices.
    """
    devices = list_placement_devices(attempt.placement)
    failures = [
        (earlier.placement, find_unexplained_ending(earlier.failure))
        for earlier in job.attempts[: attempt.number - 1]
    ]
    return any(
        previous is not None
        and previous.signature == ending.signature
        and not devices & list_placement_devices(placement)
        for placement, previous in failures
    )


def _withdraw_accusations(
    unexplained_ends: tuple[UnexplainedEnd, ...], suspensions: Sequence[Suspension], job: Job
) -> tuple[tuple[UnexplainedEnd, ...], tuple[Suspension, ...]]:
    """Return (unexplained ends, suspensions) without this job's part in them.

    A suspension stays only if at least two other jobs caused it.
    """
    left = [
        replace(entry, jobs=tuple(key for key in entry.jobs if key != job.key))
        for entry in suspensions
    ]
    return tuple(end for end in unexplained_ends if end.job != job.key), tuple(
        entry for entry in left if len(entry.jobs) >= JOBS_MIN
    )


def _add_suspensions(
    state: State,
    devices_or_nodes: Sequence[Device | str],
    reason: str,
    at_s: float,
    job_keys: tuple[str, ...],
) -> tuple[Suspension, ...]:
    """Return the state's suspensions with these devices or nodes added, each for twice as long as
    its last one.

    They are unchanged where more than half of the live devices would be suspended.
    """
    closed = {
        *devices_or_nodes,
        *(
            get_suspended_device_or_node(entry)
            for entry in state.suspensions
            if entry.until_s > at_s
        ),
    }
    live = [(node.name, index) for node in state.nodes for index in range(len(node.free_bytes))]
    if sum(device in closed or device[0] in closed for device in live) > len(live) // 2:
        return state.suspensions
    entries = {get_suspended_device_or_node(entry): entry for entry in state.suspensions}
    for place in devices_or_nodes:
        node, device = (place, None) if isinstance(place, str) else place
        before = entries.pop(place, None)
        count = 1 if before is None else before.count + (before.until_s <= at_s)
        entries[place] = Suspension(
            node=node,
            device=device,
            since_s=at_s,
            until_s=at_s + min(SUSPENDED_FIRST_S * 2 ** (count - 1), SUSPENDED_MAX_S),
            count=count,
            reason=reason,
            jobs=job_keys,
        )
    return tuple(entries.values())[-ENDS_MAX:]


def list_device_sets_to_avoid(
    job: Job, nodes: Sequence[Node], at_s: float
) -> tuple[set[Device], ...]:
    """Return the sets of devices that the job should avoid, the largest set first; () without any.

    The job ended on these devices for no known reason within a day. The first set has all devices
    of their nodes. The second has only the devices themselves, and a whole node once two of its
    devices count. Ends by a network or a service do not count.
    """
    if not job.attempts:
        return ()
    devices: set[Device] = set()
    for attempt in job.attempts:
        ending = find_unexplained_ending(attempt.failure)
        if (
            ending is not None
            and not ending.may_pass
            and at_s - attempt.end_or(at_s) <= REMEMBERED_S
        ):
            devices |= list_placement_devices(attempt.placement)
    if not devices:
        return ()
    count = Counter(node for node, _ in devices)
    live = {
        (node.name, index)
        for node in nodes
        for index in range(len(node.free_bytes))
        if node.name in count
    }
    devices |= {(node, index) for node, index in live if count[node] > 1}
    return (live, devices) if live > devices else (devices,)


def must_avoid_last_devices(job: Job) -> bool:
    """Return whether the job must not start again on the devices of its last failure."""
    failure = job.attempts[-1].failure if job.attempts else None
    return failure is not None and failure.verdict is not None and failure.verdict.elsewhere


def list_placement_devices(placement: Placement) -> set[Device]:
    """Return the (node, index) pairs of all devices in a placement."""
    return set(list_devices_of(placement))


def list_placement_nodes(placement: Placement) -> set[str]:
    """Return the names of all nodes in a placement."""
    return {part.node for part in placement}


def get_suspended_device_or_node(suspension: Suspension) -> Device | str:
    """Return the (node, device index) that is suspended; the node's name where the whole node is."""
    return suspension.node if suspension.device is None else (suspension.node, suspension.device)


def _leaves_any_device(nodes: Sequence[Node], excluded: Container[Device | str]) -> bool:
    """Return whether the live nodes have any device that is neither excluded itself nor on an
    excluded node.
    """
    return any(
        node.name not in excluded and (node.name, index) not in excluded
        for node in nodes
        for index in range(len(node.free_bytes))
    )


def select_recent_ends_of_others(
    unexplained_ends: Sequence[UnexplainedEnd], job: Job, at_s: float
) -> list[UnexplainedEnd]:
    """Return those of the unexplained ends that are of other jobs, and at most REMEMBERED_S seconds
    before `at_s`.
    """
    return [
        end for end in unexplained_ends if end.job != job.key and at_s - end.at_s <= REMEMBERED_S
    ]


def format_devices_or_nodes(devices_or_nodes: Sequence[Device | str] | set[Device]) -> str:
    """Return nodes or devices as text: `n0` for a node, `n0/0, n0/1` for devices."""
    return ", ".join(
        sorted(
            place if isinstance(place, str) else f"{place[0]}/{place[1]}"
            for place in devices_or_nodes
        )
    )
