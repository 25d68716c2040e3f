"""Which plan does a waiting job get, on which devices, or why none?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

from orchestrator.memory.calibration import Calibration, calibration, is_known
from orchestrator.planning.explain import why_nothing_fits
from orchestrator.planning.frontier import Candidate, fit_probability, fits, fits_as_measured, needed_bytes
from orchestrator.planning.search import frontier
from orchestrator.scheduling.groups import Group, groups_of
from orchestrator.scheduling.placement import Device, busy_devices, place
from orchestrator.specs.attempt import FailureKind, Placement
from orchestrator.specs.cluster import DeviceKind, Node
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.state import Job, State

Fits = Callable[[Candidate, int], bool]  # whether a candidate fits so many free bytes of a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Start this plan there, now."""

    candidate: Candidate
    placement: Placement
    device: str
    correction: float  # on the activations, as learned by now
    needed_bytes: int | None  # None: its peak was measured before
    fit_probability: float | None  # None: nothing is known of its memory, or its peak was measured before


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something fits, but not now; `nodes` must not go to jobs that stand behind."""

    reason: str
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverFits:
    """No plan fits the cluster even when it is whole and empty."""

    reason: str


def choose(state: State, job: Job, reserved: frozenset[str]) -> Chosen | Wait | NeverFits:
    """The fastest plan of the first kind of device that holds one, if its devices are free now.

    `reserved` names the nodes that jobs further ahead wait for.
    """
    waits: list[Wait] = []
    for group in groups_of(state.nodes):
        fitting = _fitting(state, job, group)
        if isinstance(fitting, NeverFits):
            continue
        outcome = _place_first(state, job, group, fitting, reserved)
        if isinstance(outcome, Chosen):
            return outcome
        waits.append(outcome)
    return waits[0] if waits else _wait_for_absent_nodes(state, job)


def learned(state: State, job: Job, device: str) -> Calibration:
    """What reality has taught of this job's family on this kind of device."""
    return calibration(state.observations, device=device, family=job.spec.family_name, job=job.key)


def _wait_for_absent_nodes(state: State, job: Job) -> Wait | NeverFits:
    """Whether the cluster could hold the job if all of its nodes were there."""
    reasons = []
    for group in groups_of(state.declared or state.nodes):
        fitting = _fitting(state, job, group)
        if not isinstance(fitting, NeverFits):
            return Wait(reason=f"waits for nodes with {group.hardware.device.name} to come back")
        reasons.append(fitting.reason)
    return NeverFits(reason="\n".join(reasons))


def _fitting(state: State, job: Job, group: Group) -> list[Candidate] | NeverFits:
    """The untried candidates that fit the group's devices when they are empty, or why there are none."""
    device = group.hardware.device
    if job.spec.gpus.min > group.devices:
        wanted = f"wants {job.spec.gpus.min} devices of one kind"
        return NeverFits(reason=f"{wanted}: there are {group.devices} {device.name}")
    try:
        untried = list(_untried(job, group))
    except SpecError as error:  # the global batch cannot be cut over so many devices
        return NeverFits(reason=str(error))
    holds = _judge(state, job, device.name)
    fitting = [candidate for candidate in untried if holds(candidate, device.memory)]
    if fitting:
        return fitting
    calibrated = learned(state, job, device.name)
    return NeverFits(reason=why_nothing_fits(job.spec, group.hardware, device.memory, calibrated, job.refuted))


def _place_first(
    state: State, job: Job, group: Group, fitting: list[Candidate], reserved: frozenset[str]
) -> Chosen | Wait:
    """The fastest candidate whose devices could hold it once our own attempts are gone, if they are free now."""
    device = group.hardware.device
    busy = busy_devices(state)
    judge = _judge(state, job, device.name)
    for candidate in fitting:
        holds = partial(_holds, candidate, judge, busy)
        if place(candidate.plan.world_size, group.nodes, holds) is None:
            continue  # others hold the memory: a cheaper plan may live with what is free
        now = partial(_holds_now, candidate, judge, busy, reserved)
        placement = place(candidate.plan.world_size, group.nodes, now)
        if placement is not None:
            return _chosen(state, job, group, candidate, placement)
        return Wait(
            reason=f"waits for {candidate.plan.world_size} free {device.name}",
            nodes=frozenset(node.name for node in group.nodes),
        )
    return Wait(reason=f"waits for memory that other processes hold on {device.name}")


def _chosen(state: State, job: Job, group: Group, candidate: Candidate, placement: Placement) -> Chosen:
    """The candidate with what is expected of it on the fullest of these devices."""
    device = group.hardware.device.name
    calibrated = learned(state, job, device)
    judged = candidate.plan not in measured_peaks(job, device)
    free_bytes = {node.name: node.free_bytes for node in group.nodes}
    capacity_bytes = min(free_bytes[part.node][index] for part in placement for index in part.devices)
    known = judged and is_known(candidate.estimate, calibrated.correction)
    return Chosen(
        candidate=candidate,
        placement=placement,
        device=device,
        correction=calibrated.correction,
        needed_bytes=needed_bytes(candidate, calibrated) if judged else None,
        fit_probability=fit_probability(candidate, capacity_bytes, calibrated) if known else None,
    )


def _holds(candidate: Candidate, judge: Fits, busy: frozenset[Device], node: Node, index: int) -> bool:
    ours = (node.name, index) in busy  # our own attempt leaves nothing behind when it ends
    return judge(candidate, node.device.memory if ours else node.free_bytes[index])


def _holds_now(
    candidate: Candidate, judge: Fits, busy: frozenset[Device], reserved: frozenset[str], node: Node, index: int
) -> bool:
    open_now = node.name not in reserved and (node.name, index) not in busy
    return open_now and _holds(candidate, judge, busy, node, index)


def _judge(state: State, job: Job, device: str) -> Fits:
    """By the prediction, corrected as the family's measurements say; a plan that this job ran by its measured peak."""
    calibrated = learned(state, job, device)
    measured = measured_peaks(job, device)

    def judge(candidate: Candidate, free_bytes: int) -> bool:
        peak_bytes = measured.get(candidate.plan)
        if peak_bytes is not None:
            return fits_as_measured(candidate, free_bytes, peak_bytes)
        return fits(candidate, free_bytes, calibrated)

    return judge


def measured_peaks(job: Job, device: str) -> dict[Plan, int]:
    """Allocated peak of each plan that this job has run on this kind of device without running out of its memory."""
    peaks: dict[Plan, int] = {}
    for attempt in job.attempts:
        trained = attempt.evidence is not None and any(beat.steps_done > 0 for beat in attempt.evidence.heartbeats)
        if trained and attempt.device == device and attempt.plan not in job.refuted:
            peaks[attempt.plan] = max(attempt.peak_bytes or 0, peaks.get(attempt.plan, 0))
    return peaks


def _untried(job: Job, group: Group) -> Iterator[Candidate]:
    """The job's frontier without what reality refuted: on equal devices only plans below each refuted peak remain."""
    device_bytes_max = _smallest_refuted(job, group, FailureKind.DEVICE_OOM, lambda estimate: estimate.device_bytes)
    host_bytes_max = _smallest_refuted(job, group, FailureKind.HOST_OOM, partial(_host_bytes, group))
    return (
        candidate
        for candidate in frontier(job.spec, group.hardware).candidates
        if candidate.plan not in job.refuted
        and candidate.estimate.device_bytes < device_bytes_max
        and _host_bytes(group, candidate.estimate) < host_bytes_max
    )


def _smallest_refuted(job: Job, group: Group, kind: FailureKind, bytes_of: Callable[[MemoryEstimate], int]) -> float:
    """The least predicted bytes that failed in this way on this kind of device; infinite where none did."""
    failed = (
        attempt.estimate
        for attempt in job.attempts
        if attempt.failure and attempt.failure.kind is kind and attempt.device == group.hardware.device.name
    )
    return min((bytes_of(estimate) for estimate in failed), default=inf)


def _host_bytes(group: Group, estimate: MemoryEstimate) -> int:
    """Host memory of one rank; a virtual device's memory is the host's."""
    virtual = group.hardware.device.kind is DeviceKind.VIRTUAL
    return estimate.host_bytes + (estimate.device_bytes if virtual else 0)
