"""Which devices and nodes do unexplained ends accuse, for how long, and what clears them?"""

from __future__ import annotations

from collections.abc import Container, Sequence

from orchestrator.specs.attempt import Attempt, Ending, Extent, Failure, Placement
from orchestrator.specs.cluster import Node
from orchestrator.specs.job_record import Job
from orchestrator.specs.suspension import Suspension, UnexplainedEnd

RECENT_S = 600.0  # ends of other jobs within it tell of the same place or the same service
REMEMBERED_S = 86_400.0  # for so long an end counts against its device
ENDS_MAX = 256  # remembered at a time
SUSPENDED_FIRST_S, SUSPENDED_MAX_S = 1800.0, 43_200.0

Device = tuple[str, int]  # node, index


def suspects(
    placement: Placement, others: Sequence[UnexplainedEnd], at_s: float, nodes: Sequence[Node]
) -> tuple[Device | str, ...]:
    """Return the devices, or else the nodes, of a placement on which other jobs ended unexplained, too.

    Empty where nothing would be left without them.
    """
    devices = devices_of(placement)
    shared = {device for end in others for device in devices & devices_of(end.placement)}
    if shared:
        places: set[Device | str] = {*shared}
    else:
        recent = [end for end in others if at_s - end.at_s <= RECENT_S]
        places = {node for node, _ in devices if any(node in nodes_of(end.placement) for end in recent)}
    return tuple(sorted(places, key=str)) if places and _left(nodes, places) else ()


def remember(
    ends: Sequence[UnexplainedEnd], job: Job, attempt: Attempt, ending: Ending, at_s: float
) -> tuple[UnexplainedEnd, ...]:
    """Return the ends with a new one; those of a job that ended alike on two places accuse no place any more."""
    recent = [end for end in ends if at_s - end.at_s <= REMEMBERED_S]
    alike = [
        end
        for end in recent
        if end.job == job.key
        and end.ending.signature == ending.signature
        and not devices_of(end.placement) & devices_of(attempt.placement)
    ]
    if ending.is_own or alike:
        return tuple(end for end in recent if end.job != job.key)
    new = UnexplainedEnd(job=job.key, ending=ending, placement=attempt.placement, at_s=at_s)
    return (*recent, new)[-ENDS_MAX:]


def suspend(
    suspensions: Sequence[Suspension],
    places: Sequence[Device | str],
    reason: str,
    at_s: float,
    nodes: Sequence[Node],
) -> tuple[Suspension, ...]:
    """Return the suspensions with these places, each for twice as long as the last time.

    Nothing is suspended where no place of the live nodes would be left.
    """
    if not _left(nodes, {*places, *(_key(entry) for entry in suspensions if entry.until_s > at_s)}):
        return tuple(suspensions)
    new = list(suspensions)
    for place in places:
        node, device = (place, None) if isinstance(place, str) else place
        before = next((suspension for suspension in new if _key(suspension) == place), None)
        count = 1 if before is None else before.count + (before.until_s <= at_s)
        until_s = at_s + min(SUSPENDED_FIRST_S * 2 ** (count - 1), SUSPENDED_MAX_S)
        if before is not None:
            new.remove(before)
        new.append(Suspension(node=node, device=device, since_s=at_s, until_s=until_s, count=count, reason=reason))
    return tuple(new[-ENDS_MAX:])


def clear(suspensions: Sequence[Suspension], placement: Placement) -> tuple[Suspension, ...]:
    """Return the suspensions without those of a placement on which an attempt has trained well."""
    devices, nodes = devices_of(placement), nodes_of(placement)
    return tuple(
        entry
        for entry in suspensions
        if (entry.node not in nodes if entry.device is None else (entry.node, entry.device) not in devices)
    )


def avoided(job: Job, nodes: Sequence[Node], at_s: float) -> tuple[set[Device], ...]:
    """Return the devices that the job should not get, the most first: whole nodes, then the devices themselves.

    Those on which it ended for no known reason within a day; none where a network or a service had refused.
    """
    if not job.attempts:
        return ()
    devices: set[Device] = set()
    for attempt in job.attempts:
        ending = attempt.failure.ending if attempt.failure else None
        if ending is not None and not ending.may_pass and at_s - (attempt.ended_at_s or at_s) <= REMEMBERED_S:
            devices |= devices_of(attempt.placement)
    if not devices:
        return ()
    names = {node for node, _ in devices}
    whole = {(node.name, index) for node in nodes if node.name in names for index in range(len(node.free_bytes))}
    return (whole, devices) if whole > devices else (devices,)


def is_sent_elsewhere(job: Job) -> bool:
    """Return whether the verdict on its last end is that the job waits for other devices."""
    failure = job.attempts[-1].failure if job.attempts else None
    return failure is not None and failure.verdict is not None and failure.verdict.elsewhere


def devices_of(placement: Placement) -> set[Device]:
    """Return (node, index) of every device of a placement."""
    return {(part.node, index) for part in placement for index in part.devices}


def nodes_of(placement: Placement) -> set[str]:
    return {part.node for part in placement}


def _key(suspension: Suspension) -> Device | str:
    return suspension.node if suspension.device is None else (suspension.node, suspension.device)


def _left(nodes: Sequence[Node], places: Container[Device | str]) -> bool:
    """Whether a device of the live nodes is none of these places and on none of them."""
    return any(
        node.name not in places and (node.name, index) not in places
        for node in nodes
        for index in range(len(node.free_bytes))
    )


def broken_places(placement: Placement, failure: Failure) -> tuple[Device | str, ...]:
    """Return the device or node that a failure of hardware names; the nodes of all ranks where it names no rank."""
    devices = [(part.node, index) for part in placement for index in part.devices]
    if failure.rank is not None and failure.rank < len(devices):
        device = devices[failure.rank]
        return (device,) if failure.broken is Extent.DEVICE else (device[0],)
    return tuple(devices) if failure.broken is Extent.DEVICE else tuple(sorted(nodes_of(placement)))


def others_of(ends: Sequence[UnexplainedEnd], job: Job, at_s: float) -> list[UnexplainedEnd]:
    """Return the ends of other jobs that are not older than REMEMBERED_S."""
    return [end for end in ends if end.job != job.key and at_s - end.at_s <= REMEMBERED_S]


def names_of(places: Sequence[Device | str] | set[Device]) -> str:
    """Return `n0` or `n0/0, n0/1` for nodes and devices."""
    return ", ".join(sorted(place if isinstance(place, str) else f"{place[0]}/{place[1]}" for place in places))
