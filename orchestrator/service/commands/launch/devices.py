"""The devices that `orc launch` may use: those that its process sees, by identity, with what is free on each."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

from orchestrator.backends.devices import nvml
from orchestrator.backends.devices.readers import read_devices
from orchestrator.backends.local.watch import find_lock_folder
from orchestrator.service.intake.detection import (
    detect_machine,
    make_local_node_name,
    read_host_bytes,
)
from orchestrator.service.notes import Notes
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.command_line import Env
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.units import format_bytes

VIRTUAL = re.compile(r"(?:(\d{1,2})x)?virtual-(.+)")
PROMISE_BYTES_MAX = 4096  # of a lock's content


@frozen
class Machine:
    """The present machine as a node with the devices of one typed command, and the variables that select
    them.
    """

    node: NodeSpec
    caps: bool = False  # virtual devices, which the guard caps
    uuids: tuple[str, ...] = ()  # by device
    env: Env  # that selects them, where the caller's own does not
    notes: Notes

    @property
    def cluster(self) -> ClusterSpec:
        """A cluster that consists of this node alone."""
        return ClusterSpec(name="local", nodes=(self.node,))

    @property
    def is_cpu(self) -> bool:
        """Whether there is no device: the command then runs on the processor, without a memory
        limit.
        """
        return self.node.device.kind.traits.is_virtual and not self.caps


def find_machine_with_devices(devices_option: str | None) -> Machine:
    """Return this machine with the devices that `--devices` names, or all that this process sees.
    Raises SpecError.
    """
    if devices_option is None:
        return _detect_visible({})
    virtual = VIRTUAL.fullmatch(devices_option)
    if virtual is None:  # numbers or UUIDs, as SLURM_JOB_GPUS has them
        os.environ["CUDA_VISIBLE_DEVICES"] = devices_option
        return _detect_visible({"CUDA_VISIBLE_DEVICES": devices_option})
    count = int(virtual[1] or 1)
    node = _make_node("virtual", virtual[2], count)
    numbers = ", ".join(map(str, range(count)))
    note = f"virtual device {numbers}: {format_bytes(node.device.memory)} each, on the processor"
    return Machine(
        node=node, caps=True, env=dict(DeviceKind.VIRTUAL.traits.variables), notes=(note,)
    )


def _detect_visible(variables: Env) -> Machine:
    notes = list[str]()
    free = list[int]()
    try:
        node = detect_machine(make_local_node_name()).node
    except SpecError as error:
        if variables and error.path == "CUDA_VISIBLE_DEVICES":  # a mistake in --devices
            raise
        sizes = [device.total_bytes for device in nvml.read_nvml().devices if not device.error]
        names = variables["CUDA_VISIBLE_DEVICES"].split(",") if variables else []
        count = len(names) or len(sizes) or 1
        node = _make_node("cuda", f"{min(sizes, default=read_host_bytes())}B", count)
        ids = tuple(int(name) if name.isdecimal() else name for name in names)
        node = node.model_copy(update={"device_ids": ids})
        notes.append(error.what)
    if node.device.kind.traits.is_virtual:
        note = "no NVIDIA device is seen: the command runs where its own code takes it"
        node = _make_node("virtual", f"{read_host_bytes()}B", 1)
        return Machine(node=node, env=variables, notes=(note,))
    reading = read_devices(node.device.kind.traits.driver, node.device_ids).devices[: node.devices]
    for device in reading:
        left, note = _find_unpromised_bytes_and_note(
            device.uuid, device.free_bytes, device.total_bytes
        )
        free.append(left)
        notes.append(
            f"device {device.index} = {device.uuid} ({device.name}, {format_bytes(left)} free){note}"
        )
    least = min((left for left in free if left > 0), default=node.device.memory)
    kind = node.device.model_copy(update={"memory": min(least, node.device.memory)})
    uuids = tuple(device.uuid for device in reading)
    node = node.model_copy(update={"device": kind})
    return Machine(node=node, uuids=uuids, env=variables, notes=tuple(notes))


def _make_node(device_name: str, memory: str, device_count: int) -> NodeSpec:
    """Return a node of devices with unknown rates: a plan never counts two of them as faster than
    one. Raises SpecError.
    """
    speeds = {
        "bf16_tflops": 0.05,
        "fp32_tflops": 0.05,
        "memory_bandwidth": "10GB/s",
        "link_bandwidth": "1MB/s",
    }
    device = {"name": device_name, "kind": device_name, "memory": memory, **speeds}
    host = f"{read_host_bytes()}B"
    try:
        return NodeSpec.model_validate(
            {
                "name": make_local_node_name(),
                "devices": device_count,
                "device": device,
                "host_memory": host,
            }
        )
    except ValueError:
        allowed = "such as 2xvirtual-256MiB"
        raise SpecError(
            "no virtual device", source="--devices", got=memory, allowed=allowed
        ) from None


def find_device_lock_path(uuid: str) -> Path | None:
    """Return the path of the file by which typed commands lock a device; None where there can be no
    lock.
    """
    folder = find_lock_folder()
    return None if folder is None or not uuid else folder / re.sub(r"[^\w-]", "-", uuid)


def _find_unpromised_bytes_and_note(
    uuid: str, free_bytes: int, total_bytes: int
) -> tuple[int, str]:
    """Return (free bytes beside what another typed command on the device was promised, note on that
    command or "").
    """
    path = find_device_lock_path(uuid)
    holder = None if path is None else read_holder(path)
    if holder is None:
        return free_bytes, ""
    promised = holder.get("promise_bytes")
    if not isinstance(promised, int):
        return free_bytes, f", which process {holder.get('pid')} uses too: {holder.get('line')}"
    left = max(0, min(free_bytes, total_bytes - promised))
    return left, f", beside the {format_bytes(promised)} of process {holder.get('pid')}"


def read_holder(lock_path: Path) -> JsonObject | None:
    """Return the JSON object that a lock's holder wrote into the lock's file; None where the lock
    is free.
    """
    try:
        with lock_path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                content = json.loads(file.read(PROMISE_BYTES_MAX) or b"{}")
                return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return None
    return None
