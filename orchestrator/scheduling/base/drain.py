"""Nodes and devices closed to new attempts (launches): drained, suspended, or in a maintenance window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

from orchestrator.scheduling.base.migration import MOVE_GRACE_S, SAVE_S, can_move
from orchestrator.specs.cluster import Node, Window
from orchestrator.specs.events import DrainRequested, NodesSeen
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State, UnreadableDevice
from orchestrator.specs.suspension import Suspension

ALWAYS: tuple[Window, ...] = ((-inf, inf),)


def apply_drain(state: State, event: DrainRequested) -> State:
    """Return the state in which no new attempt starts on the event's node (a drain).

    With `event.undo` the drain ends, and the node's suspensions are lifted.
    """
    others = set(state.drained) - {event.node}
    if not event.undo:
        return replace(state, drained=tuple(sorted({*others, event.node})))
    trusted = tuple(entry for entry in state.suspensions if entry.node != event.node)
    ends = tuple(
        end for end in state.ends if all(part.node != event.node for part in end.placement)
    )
    return replace(state, drained=tuple(sorted(others)), suspensions=trusted, ends=ends)


def list_closed_windows_by_node(state: State) -> dict[str, tuple[Window, ...]]:
    """Return {node: windows (begin, end) in which no attempt may start there}, in seconds since
    1970.

    Only live nodes with such windows are keys; the windows are in order of time. The begin of a
    window that has begun is minus infinity. A suspended node is closed until its suspension ends, a
    drained one for ever.
    """
    closed = {}
    suspended = {
        entry.node: entry.until_s
        for entry in list_active_suspensions(state)
        if entry.device is None
    }
    for node in state.nodes:
        ahead = (
            (start_s, end_s)
            for start_s, end_s in _list_maintenance_windows(node)
            if end_s > state.at_s
        )
        windows = tuple(
            (-inf if start_s <= state.at_s else start_s, end_s) for start_s, end_s in ahead
        )
        if node.name in suspended:
            windows = ((-inf, suspended[node.name]), *windows)
        if node.name in state.drained or windows:
            closed[node.name] = ALWAYS if node.name in state.drained else windows
    return closed


def list_suspended_until_s_by_device(state: State) -> dict[tuple[str, int], float]:
    """Return {(node, device index): first time at which a new attempt may start there}, in seconds
    since 1970.

    The keys are the suspended devices, and those that the driver cannot read. An unreadable device
    has infinity, since nobody knows when it can be read again.
    """
    suspended = {
        (entry.node, entry.device): entry.until_s
        for entry in list_active_suspensions(state)
        if entry.device is not None
    }
    for node in state.nodes:
        suspended |= {(node.name, index): inf for index in node.unreadable}
    return suspended


def apply_nodes(state: State, event: NodesSeen) -> State:
    """Return the state with the nodes and the policy of the event, and with its list of unreadable
    devices updated.

    A device of a lost node stays in that list until the node comes back and shows that the device
    can be read.
    """
    alive = {node.name: node for node in event.nodes}
    declared = {node.name for node in event.declared}
    since_s = {(entry.node, entry.device): entry.since_s for entry in state.unreadable}
    # those of a node that went away stay: it may come back as it was, and that is no news
    entries = {
        place: time_s for place, time_s in since_s.items() if place[0] in declared - set(alive)
    }
    for node in event.nodes:
        for index in node.unreadable:
            entries[node.name, index] = since_s.get((node.name, index), event.at_s)
    unreadable = tuple(
        UnreadableDevice(node=name, device=index, since_s=time_s)
        for (name, index), time_s in sorted(entries.items())
    )
    return replace(
        state,
        nodes=event.nodes,
        declared=event.declared,
        policy=event.policy,
        unreadable=unreadable,
    )


def list_active_suspensions(state: State) -> list[Suspension]:
    """Return the suspensions of nodes and devices that have not ended yet at the state's time."""
    return [entry for entry in state.suspensions if entry.until_s > state.at_s]


def list_leave_time_s_by_job_id(state: State, running_jobs: Iterable[Job]) -> dict[str, float]:
    """Return {job id: when the job must leave its nodes for their next maintenance}, in seconds
    since 1970.

    Only jobs of `running_jobs` on such nodes are keys. Jobs of one node leave one after another, so
    that they do not all save at once.
    """
    windows = {
        node.name: ahead[0]
        for node in state.nodes
        if (
            ahead := [
                window for window in _list_maintenance_windows(node) if window[1] > state.at_s
            ]
        )
    }
    times: dict[str, float] = {}
    before: Counter[str] = Counter()
    for job in sorted(running_jobs, key=lambda job: job.order) if windows else ():
        names = [part.node for part in job.attempts[-1].placement if part.node in windows]
        if names and can_move(job):
            first = min(names, key=lambda name: windows[name])
            times[job.id] = windows[first][0] - SAVE_S * before[first]
            before[first] += 1
    return times


def find_next_closing_or_opening_s(state: State) -> float:
    """Return the next time at which any node or device closes to new attempts, or opens again.

    It is in seconds since 1970; infinity if none will.
    """
    times_s = [
        time_s
        for node in state.nodes
        for window in _list_maintenance_windows(node)
        for time_s in window
    ]
    return min(
        (s for s in (*times_s, *(entry.until_s for entry in state.suspensions)) if s > state.at_s),
        default=inf,
    )


def _list_maintenance_windows(node: Node) -> tuple[Window, ...]:
    """Return the node's maintenance times (begin, end) in seconds since 1970.

    Each begin is earlier than declared, by the time that stopping a job takes.
    """
    return tuple((start_s - MOVE_GRACE_S, end_s) for start_s, end_s in node.maintenance)
