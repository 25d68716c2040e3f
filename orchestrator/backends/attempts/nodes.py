"""Tracks the free bytes of each device, and which devices are occupied."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.backends.attempts.ports import ClusterAway, LiveNode, NodeSource
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.specs.cluster import ClusterSpec, Node

PROBE_EVERY_S = 5.0
ROUNDING_BYTES = 64 * 2**20  # free memory is reported in these steps
JITTER_BYTES = 256 * 2**20  # a smaller change on an idle device is not reported
ERROR_CHARACTERS_MAX = 200  # of the driver's text
RELEASE_TIMEOUT_S = 60.0
RELEASE_POLL_S = 0.5

log = logging.getLogger(__name__)


def debounce_free_bytes(reported_bytes: int | None, reading_bytes: int) -> int:
    """Return the free memory to report: the last reported value while a new reading differs by at
    most JITTER_BYTES.

    Other readings are rounded down to ROUNDING_BYTES.
    """
    if (
        reported_bytes is not None
        and abs(reported_bytes - reading_bytes) <= JITTER_BYTES
        and reading_bytes >= ROUNDING_BYTES
    ):
        return reported_bytes
    return reading_bytes // ROUNDING_BYTES * ROUNDING_BYTES


def _list_driver_errors(reading: NvmlReading, device_count: int) -> tuple[str, ...]:
    """Return, for each device of a node, an error text on why the device cannot be read; "" where
    it can.
    """
    missing = f"the driver names {len(reading.devices)} of {device_count} devices"
    errors = [reading.error or missing] * device_count
    for device in reading.devices:
        if device.index < device_count:
            errors[device.index] = device.error or ""
    return tuple(_clean_error(error) for error in errors)


def _differs_in_numbers_only(old_error: str, new_error: str) -> bool:
    """Return whether two error texts are equal except for words with digits, such as addresses and
    times.
    """
    return re.sub(r"\w*\d\w*", "0", old_error) == re.sub(r"\w*\d\w*", "0", new_error)


def _clean_error(error: str) -> str:
    """Return a driver's error text on one line, printable and bounded; a fixed word where it has no
    printable text.
    """
    text = "".join(character if character.isprintable() else " " for character in error)
    return " ".join(text.split())[:ERROR_CHARACTERS_MAX] or ("unknown" if error else "")


@dataclass(slots=True)
class NodeWatch:
    """The live nodes and the free device memory as last read; thread-safe.

    An occupied device keeps its last reading from before it was occupied.
    """

    cluster: ClusterSpec
    source: NodeSource
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _live: dict[str, LiveNode] = field(default_factory=dict)  # at the last answer
    _is_away: bool = True  # the last refresh had no answer
    _busy: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # (node, device) -> attempts on it
    _free: dict[tuple[str, int], int] = field(default_factory=dict)
    _idle_free: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # the same to the byte, as NVML reports it
    # (node, device) -> when its attempt last computed there, and when NVML last answered
    _use: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    _probed_at_s: dict[str, float] = field(default_factory=dict)
    _errors: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # by node: of each device, as Node.driver_errors

    def set_cluster(self, cluster: ClusterSpec) -> None:
        """Replace the cluster description, here and in the node source."""
        self.source.set_cluster(cluster)
        self.cluster = cluster

    def list_live_nodes(self) -> dict[str, LiveNode]:
        """Return {node name: node} of nodes alive at the last refresh. Raises ClusterAway if that
        refresh got no answer.
        """
        with self._lock:
            if self._is_away:
                raise ClusterAway("the nodes were not told yet since the cluster was away")
            return dict(self._live)

    def list_last_known_nodes(self) -> dict[str, LiveNode]:
        """Return {node name: node} of the nodes that were alive when the cluster last answered."""
        with self._lock:
            return dict(self._live)

    def refresh(self) -> tuple[Node, ...]:
        """Ask the cluster for live nodes, read the devices that are due, and return the nodes.
        Raises ClusterAway.
        """
        try:
            live = self.source.list_live_nodes()
        except ClusterAway:
            with self._lock:
                self._is_away = True
            raise
        with self._lock:
            self._live = live
            self._is_away = False
        for name, node in live.items():
            due = time.monotonic() - self._probed_at_s.get(name, -PROBE_EVERY_S) >= PROBE_EVERY_S
            if not node.launch.device.kind.traits.is_virtual and due:
                self._read_node(node)
        return tuple(self._describe_node(node) for node in live.values())

    def occupy_devices(self, devices: Sequence[tuple[str, int]]) -> None:
        """Mark devices, each a (node name, index), as occupied by an attempt. Their free memory is
        not updated until they are released.
        """
        with self._lock:
            for part in devices:
                self._busy[part] = self._busy.get(part, 0) + 1
                self._use.pop(part, None)

    def list_free_bytes_when_idle(self, devices: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        """Return the free bytes of each device, a (node name, index), from before it was occupied.

        () where a device has no such reading.
        """
        with self._lock:
            readings = [self._idle_free.get(part) for part in devices]
        return tuple(free for free in readings if free is not None) if None not in readings else ()

    def compute_idle_for_s(self, devices: Sequence[tuple[str, int]]) -> float:
        """Return the longest time in seconds for which one of these devices has been idle after it
        had computed.

        0 where NVML reports no use. Each device is a (node name, index).
        """
        with self._lock:
            uses = [self._use[part] for part in devices if part in self._use]
        return max((told_s - used_s for used_s, told_s in uses), default=0.0)

    def release_devices(self, devices: Sequence[tuple[str, int]]) -> None:
        """Wait at most 60 s until the devices' memory is free again, and mark the devices as
        unoccupied.

        Each device is a (node name, index).
        """
        try:
            self._wait_until_free(devices)
        finally:  # whatever the driver does: an occupied device has no news
            with self._lock:
                for part in devices:
                    self._busy[part] = self._busy.get(part, 1) - 1
                    self._probed_at_s.pop(part[0], None)

    def _wait_until_free(self, devices: Sequence[tuple[str, int]]) -> None:
        deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
        waiting = {part for part in devices if self._has_real_devices(part[0])}
        while waiting and time.monotonic() < deadline_s:
            for name in sorted({name for name, _ in waiting}):
                node = self.list_last_known_nodes().get(name)
                reading = None if node is None else self.source.read_devices(node)
                if (
                    reading is None or reading.error
                ):  # gone, or cannot be asked: nothing to wait for
                    waiting = {part for part in waiting if part[0] != name}
                    continue
                free = {
                    (name, device.index): device.free_bytes
                    for device in reading.devices
                    if not device.error
                }
                with self._lock:
                    before = {part: self._free.get(part, 0) for part in waiting}
                waiting = {
                    p for p in waiting if p in free and free[p] + JITTER_BYTES < before[p]
                } | {p for p in waiting if p[0] != name}
            if waiting:
                time.sleep(RELEASE_POLL_S)

    def _has_real_devices(self, node_name: str) -> bool:
        node = self.list_last_known_nodes().get(node_name)
        return node is not None and not node.launch.device.kind.traits.is_virtual

    def _read_node(self, node: LiveNode) -> None:
        began_s = time.monotonic()
        reading = self.source.read_devices(node)
        now_s = time.monotonic()
        # a driver that hangs holds up the readings of all nodes: a third of the time at most goes
        # to it
        self.record_reading(node, reading, now_s + 2 * (now_s - began_s))

    def record_reading(self, node: LiveNode, reading: NvmlReading, now_s: float) -> None:
        """Record NVML's reading of a node's devices, taken at `now_s` (monotonic seconds)."""
        name = node.launch.name
        devices = node.launch.devices
        errors = _list_driver_errors(reading, devices)
        with self._lock:
            self._probed_at_s[name] = now_s
            errors = self._errors[name] = self._keep_known_errors(name, errors)
            for device in reading.devices:
                part = (name, device.index)
                if device.busy_percent:
                    self._use[part] = (now_s, now_s)
                elif part in self._use and device.busy_percent is not None:
                    self._use[part] = (self._use[part][0], now_s)
                is_idle = self._busy.get(part, 0) <= 0
                if device.index < devices and not errors[device.index] and is_idle:
                    self._idle_free[part] = device.free_bytes
                    free = debounce_free_bytes(self._free.get(part), device.free_bytes)
                    self._free[part] = min(free, node.launch.device.memory)

    def _keep_known_errors(self, node_name: str, errors: tuple[str, ...]) -> tuple[str, ...]:
        """Return the node's errors, with the earlier text where only numbers differ; log them if
        they changed.
        """
        before = self._errors.get(node_name, ())
        if len(before) == len(errors):
            errors = tuple(
                old if _differs_in_numbers_only(old, new) else new
                for old, new in zip(before, errors, strict=True)
            )
        if errors != before and any((*errors, *before)):
            text = "; ".join(dict.fromkeys(filter(None, errors)))
            log.warning(
                "node %s %s", node_name, f"cannot be read: {text}" if text else "can be read again"
            )
        return errors

    def _describe_node(self, node: LiveNode) -> Node:
        launch = node.launch
        free = [launch.device.memory] * launch.devices
        errors: tuple[str, ...] = ()
        if not launch.device.kind.traits.is_virtual:
            with self._lock:
                read = self._errors.get(launch.name, ())
                errors = read if any(read) else ()
                for index in range(launch.devices):
                    readable = not (errors and errors[index])
                    free[index] = self._free.get((launch.name, index), 0) if readable else 0
        return Node(
            name=launch.name,
            device=launch.device,
            free_bytes=tuple(free),
            driver_errors=errors,
            host_free_bytes=node.host_memory_bytes,
            network_bandwidth=self.cluster.network_bandwidth,
            launch_cost_s=self.cluster.launch_cost,
            maintenance=self.cluster.list_maintenance(launch.name),
            rack=node.rack,
        )
