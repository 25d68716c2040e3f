"""Which plan does a waiting job get, on which devices, or why none?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf

from orchestrator.memory.calibration import correction
from orchestrator.planning.explain import why_nothing_fits
from orchestrator.planning.frontier import Candidate, fits
from orchestrator.planning.search import Hardware, frontier
from orchestrator.scheduling.placement import Device, busy_devices, place
from orchestrator.specs.attempt import FailureKind, Placement
from orchestrator.specs.cluster import DeviceKind, Node
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.state import Job, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Start this plan there, now."""

    candidate: Candidate
    placement: Placement
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something fits, but not now; `nodes` must not go to jobs that stand behind."""

    reason: str
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverFits:
    """No plan fits these devices even when they are empty."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Equal nodes: one frontier serves them all."""

    hardware: Hardware
    nodes: tuple[Node, ...]


def choose(state: State, job: Job, reserved: frozenset[str]) -> Chosen | Wait | NeverFits:
    """The fastest plan of the first kind of device that holds one, if its devices are free now.

    `reserved` names the nodes that jobs further ahead wait for.
    """
    groups = _groups(state.nodes)
    waits: list[Wait] = []
    too_large: list[str] = []
    for group in groups:
        outcome = _choose_in(state, job, group, reserved)
        if isinstance(outcome, Chosen):
            return outcome
        if isinstance(outcome, Wait):
            waits.append(outcome)
        else:
            too_large.append(outcome.reason)
    return waits[0] if waits else NeverFits(reason="\n".join(too_large))


def _choose_in(state: State, job: Job, group: _Group, reserved: frozenset[str]) -> Chosen | Wait | NeverFits:
    device = group.hardware.device
    devices = group.hardware.devices_per_node * group.hardware.nodes
    if job.spec.gpus.min > devices:
        return Wait(reason=f"waits for {job.spec.gpus.min} devices of one kind: there are {devices} x {device.name}")
    try:
        candidates = tuple(_untried(job, group))
    except SpecError as error:  # the global batch cannot be cut over what is alive
        return Wait(reason=f"waits for other nodes: {error}") if job.attempts else NeverFits(reason=str(error))
    fitting = [c for c in candidates if fits(c, device.memory, _correction(state, job, c.plan, device.name))]
    if not fitting:
        factor = max((_correction(state, job, c.plan, device.name) for c in candidates), default=1.0)
        return NeverFits(reason=why_nothing_fits(job.spec, group.hardware, device.memory, factor, job.refuted))
    return _place_first(state, job, group, fitting, reserved)


def _place_first(
    state: State, job: Job, group: _Group, fitting: list[Candidate], reserved: frozenset[str]
) -> Chosen | Wait:
    """The fastest candidate whose devices could hold it once our own attempts are gone, if they are free now."""
    device = group.hardware.device
    busy = busy_devices(state)
    for candidate in fitting:
        factor = _correction(state, job, candidate.plan, device.name)
        holds = partial(_holds, candidate, factor, busy)
        if place(candidate.plan.world_size, group.nodes, holds) is None:
            continue  # others hold the memory: a cheaper plan may live with what is free
        now = partial(_holds_now, candidate, factor, busy, reserved)
        placement = place(candidate.plan.world_size, group.nodes, now)
        if placement is not None:
            return Chosen(candidate=candidate, placement=placement, device=device.name)
        return Wait(
            reason=f"waits for {candidate.plan.world_size} free {device.name}",
            nodes=frozenset(node.name for node in group.nodes),
        )
    return Wait(reason=f"waits for memory that other processes hold on {device.name}")


def _holds(candidate: Candidate, factor: float, busy: frozenset[Device], node: Node, index: int) -> bool:
    ours = (node.name, index) in busy  # our own attempt leaves nothing behind when it ends
    return fits(candidate, node.device.memory if ours else node.free_bytes[index], factor)


def _holds_now(
    candidate: Candidate, factor: float, busy: frozenset[Device], reserved: frozenset[str], node: Node, index: int
) -> bool:
    open_now = node.name not in reserved and (node.name, index) not in busy
    return open_now and _holds(candidate, factor, busy, node, index)


def _untried(job: Job, group: _Group) -> Iterable[Candidate]:
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


def _smallest_refuted(job: Job, group: _Group, kind: FailureKind, bytes_of: Callable[[MemoryEstimate], int]) -> float:
    """The least predicted bytes that failed in this way on this kind of device; infinite where none did."""
    failed = (
        attempt.estimate
        for attempt in job.attempts
        if attempt.failure and attempt.failure.kind is kind and attempt.device == group.hardware.device.name
    )
    return min((bytes_of(estimate) for estimate in failed), default=inf)


def _host_bytes(group: _Group, estimate: MemoryEstimate) -> int:
    """Host memory of one rank; a virtual device's memory is the host's."""
    virtual = group.hardware.device.kind is DeviceKind.VIRTUAL
    return estimate.host_bytes + (estimate.device_bytes if virtual else 0)


def _correction(state: State, job: Job, plan: Plan, device: str) -> float:
    return correction(state.observations, device=device, engine=plan.engine, family=job.spec.family_name)


def _groups(nodes: Iterable[Node]) -> list[_Group]:
    """Equal nodes together, the kind with the fastest devices first."""

    def kind(node: Node) -> tuple[float, int, str]:
        return (-node.device.bf16_tflops, -node.devices, node.device.model_dump_json())

    groups = []
    for _, members in groupby(sorted(nodes, key=kind), key=kind):
        equal = tuple(members)
        hardware = Hardware(
            device=equal[0].device,
            devices_per_node=equal[0].devices,
            nodes=len(equal),
            network_bandwidth=min(node.network_bandwidth for node in equal),
        )
        groups.append(_Group(hardware=hardware, nodes=equal))
    return groups
