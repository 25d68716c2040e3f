"""Which nodes live, and how many bytes of their devices are free? As Ray and NVML tell it."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends import nvml
from orchestrator.backends.attempts.launch_request import LaunchNode
from orchestrator.specs.cluster import ClusterSpec, DeviceKind, DeviceSpec, Node, NodeSpec

NODE_LABEL, DEVICE_LABEL = "orc-node", "orc-device"
PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 20.0
ROUNDING_BYTES = 64 * 2**20  # free memory is told in these steps
JITTER_BYTES = 256 * 2**20  # a smaller change of an idle device's free memory is no news
RELEASE_TIMEOUT_S = 60.0
RELEASE_POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A node of the running cluster and what the specification says of it."""

    id: str  # Ray's
    launch: LaunchNode
    host_memory_bytes: int
    rack: str
    ray_gpus: int  # as Ray counts them; 0 on virtual devices


def live_nodes(cluster: ClusterSpec, ray_nodes: Iterable[Mapping[str, Any]]) -> dict[str, LiveNode]:
    """By name: every alive Ray node that advertises `gpu<i>` resources and whose device is known."""
    found: dict[str, LiveNode] = {}
    for entry in sorted(ray_nodes, key=lambda entry: (entry.get("Labels", {}).get(NODE_LABEL, ""), entry["NodeID"])):
        indices = [int(match[1]) for name in entry["Resources"] if (match := re.fullmatch(r"gpu(\d+)", name))]
        if not entry["Alive"] or not indices:
            continue
        labels = entry.get("Labels", {})
        name = labels.get(NODE_LABEL) or entry["NodeManagerHostname"]
        if name in found:  # two unlabelled raylets on one machine
            name = f"{name}-{entry['NodeID'][:6]}"
        spec = next((node for node in cluster.nodes if name in node.names), None)
        device = device_of(cluster, spec, labels.get(DEVICE_LABEL))
        if device is None:
            log.warning("node %s is left out: label it %s=<a device of cluster %s>", name, DEVICE_LABEL, cluster.name)
            continue
        found[name] = LiveNode(
            id=entry["NodeID"],
            launch=LaunchNode(
                name=name,
                address=entry["NodeManagerAddress"],
                device=device,
                devices=1 + max(indices),
                cpus=max(1, int(entry["Resources"].get("CPU", 1))),
            ),
            host_memory_bytes=spec.host_memory if spec else int(entry["Resources"].get("memory", 0)),
            rack=spec.rack if spec else "",
            ray_gpus=int(entry["Resources"].get("GPU", 0)),
        )
    return found


def device_of(cluster: ClusterSpec, node: NodeSpec | None, label: str | None) -> DeviceSpec | None:
    """The kind of a node's devices: by label, else as the cluster file says, else the only kind there is."""
    kinds = {spec.device.name: spec.device for spec in cluster.nodes}
    if label is not None:
        return kinds.get(label)
    if node is not None:
        return node.device
    return next(iter(kinds.values())) if len(kinds) == 1 else None


def debounced_bytes(told_bytes: int | None, read_bytes: int) -> int:
    """What to tell of a device's free memory: the old figure until the new one differs by more than jitter."""
    if told_bytes is not None and abs(told_bytes - read_bytes) <= JITTER_BYTES and read_bytes >= ROUNDING_BYTES:
        return told_bytes
    return read_bytes // ROUNDING_BYTES * ROUNDING_BYTES


@dataclass(slots=True)
class NodeWatch:
    """The live cluster as last seen. Shared by threads; a busy device keeps the figure of its last idle moment."""

    cluster: ClusterSpec
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _live: dict[str, LiveNode] = field(default_factory=dict)
    _busy: dict[tuple[str, int], int] = field(default_factory=dict)  # (node, device) -> attempts on it
    _free: dict[tuple[str, int], int] = field(default_factory=dict)
    _idle_free: dict[tuple[str, int], int] = field(default_factory=dict)  # the same to the byte, as NVML told it
    # (node, device) -> when its attempt was last seen to compute there, and when NVML last told
    _use: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    _probed_at_s: dict[str, float] = field(default_factory=dict)

    def live(self) -> dict[str, LiveNode]:
        """The nodes that lived at the last refresh, by name."""
        with self._lock:
            return dict(self._live)

    def refresh(self) -> tuple[Node, ...]:
        """Ask Ray, and NVML of every node whose turn it is. Raises RayError where Ray does not answer."""
        live = live_nodes(self.cluster, ray.nodes())  # type: ignore[no-untyped-call]
        with self._lock:
            self._live = live
        for name, node in live.items():
            due = time.monotonic() - self._probed_at_s.get(name, -PROBE_EVERY_S) >= PROBE_EVERY_S
            if node.launch.device.kind is DeviceKind.CUDA and due:
                self._probe(node)
        return tuple(self._node(node) for node in live.values())

    def occupy(self, parts: Sequence[tuple[str, int]]) -> None:
        """An attempt has these devices: what NVML says of them is no longer what a newcomer can take."""
        with self._lock:
            for part in parts:
                self._busy[part] = self._busy.get(part, 0) + 1
                self._use.pop(part, None)

    def free_before(self, parts: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        """Bytes free on each of these devices when NVML last saw it idle; () where it did not see them all."""
        with self._lock:
            found = [self._idle_free.get(part) for part in parts]
        return tuple(free for free in found if free is not None) if None not in found else ()

    def idle_for_s(self, parts: Sequence[tuple[str, int]]) -> float:
        """How long one of an attempt's devices has not computed that had; 0 where all do, or NVML does not say."""
        with self._lock:
            uses = [self._use[part] for part in parts if part in self._use]
        return max((told_s - used_s for used_s, told_s in uses), default=0.0)

    def release(self, parts: Sequence[tuple[str, int]]) -> None:
        """The attempt's devices report their memory free again, or do not within 60 s: then what is free is told."""
        deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
        waiting = {part for part in parts if self._is_cuda(part[0])}
        while waiting and time.monotonic() < deadline_s:
            for name in sorted({name for name, _ in waiting}):
                node = self.live().get(name)
                reading = None if node is None else read_nvml(node)
                if reading is None or reading.error:  # gone, or cannot be asked: nothing to wait for
                    waiting = {part for part in waiting if part[0] != name}
                    continue
                free = {(name, device.index): device.free_bytes for device in reading.devices if not device.error}
                with self._lock:
                    before = {part: self._free.get(part, 0) for part in waiting}
                waiting = {p for p in waiting if p in free and free[p] + JITTER_BYTES < before[p]} | {
                    p for p in waiting if p[0] != name
                }
            if waiting:
                time.sleep(RELEASE_POLL_S)
        with self._lock:
            for part in parts:
                self._busy[part] = self._busy.get(part, 1) - 1
                self._probed_at_s.pop(part[0], None)

    def _is_cuda(self, name: str) -> bool:
        node = self.live().get(name)
        return node is not None and node.launch.device.kind is DeviceKind.CUDA

    def _probe(self, node: LiveNode) -> None:
        self.see(node, read_nvml(node), time.monotonic())

    def see(self, node: LiveNode, reading: nvml.NvmlReading, now_s: float) -> None:
        """Take note of what NVML says of a node."""
        name = node.launch.name
        read = {device.index: device.free_bytes for device in reading.devices}
        if reading.error:
            log.warning("node %s: %s", name, reading.error)
        with self._lock:
            self._probed_at_s[name] = now_s
            for device in reading.devices:
                part = (name, device.index)
                if device.busy_percent:
                    self._use[part] = (now_s, now_s)
                elif part in self._use and device.busy_percent is not None:
                    self._use[part] = (self._use[part][0], now_s)
                if not device.error and self._busy.get(part, 0) <= 0:
                    self._idle_free[part] = device.free_bytes
            for index in range(node.launch.devices):
                if self._busy.get((name, index), 0) <= 0:
                    free = debounced_bytes(self._free.get((name, index)), read.get(index, 0))
                    self._free[name, index] = min(free, node.launch.device.memory)

    def _node(self, node: LiveNode) -> Node:
        launch = node.launch
        with self._lock:
            free = tuple(
                launch.device.memory
                if launch.device.kind is DeviceKind.VIRTUAL
                else self._free.get((launch.name, index), 0)
                for index in range(launch.devices)
            )
        return Node(
            name=launch.name,
            device=launch.device,
            free_bytes=free,
            host_free_bytes=node.host_memory_bytes,
            network_bandwidth=self.cluster.network_bandwidth,
            launch_cost_s=self.cluster.launch_cost,
            maintenance=self.cluster.maintenance_of(launch.name),
            rack=node.rack,
        )


def read_nvml(node: LiveNode) -> nvml.NvmlReading:
    """What NVML says on `node`; an answer that does not come in 20 s is an error in the reading."""
    task = ray.remote(num_cpus=0, max_retries=0)(nvml.devices)
    reference = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
    try:
        return ray.get(reference, timeout=PROBE_TIMEOUT_S)
    except RayError as error:
        return nvml.NvmlReading(error=f"node {node.launch.name} does not answer: {type(error).__name__}")
