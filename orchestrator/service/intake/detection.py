"""Detects this machine's hardware as a node of a cluster file: its NVIDIA devices, else two virtual ones."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from orchestrator.backends.attempts.system_metrics import read_total_and_available_bytes
from orchestrator.backends.devices import nvml
from orchestrator.service.intake.intake import read_cluster
from orchestrator.service.notes import Notes
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec, NodeSpec, find_catalogue_device
from orchestrator.specs.device_kind import DeviceId
from orchestrator.specs.devices import load_devices, load_nvml_names
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.units import format_bytes

SOURCE = "the devices of this machine"
OTHER_KINDS = "docs/reference/cluster-yaml.md says how a cluster file describes a device"
# Dense 16-bit products with fp32 sums per fp32 product, by compute capability, from the data sheets
# of the catalogue:
# V100, T4, A100, A10, L4, H100, B200. Cards for games reach half of it (RTX 3090, 4090, 5090: 2).
TENSOR_FACTORS = {
    (7, 0): 8.0,
    (7, 5): 8.0,
    (8, 0): 16.0,
    (8, 6): 2.0,
    (8, 9): 2.0,
    (9, 0): 14.7,
    (10, 0): 30.0,
}
NEWER_FACTOR = 2.0
MEMORY_TOLERANCE = 0.02  # drivers and ECC keep some more, or some less
LINK_TOLERANCE = 0.1  # NVLink 3 tells 25.8 GB/s where data sheets say 25
HELD_BYTES = 2**30  # less on a device is its driver's, a desktop's or a monitor's
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
Devices = Sequence[nvml.NvmlDevice]


@frozen
class DetectedMachine:
    """The present machine as a node of a cluster, and sentences on what a person should check."""

    node: NodeSpec
    notes: Notes

    @property
    def cluster(self) -> ClusterSpec:
        """A cluster that consists of this node alone."""
        return ClusterSpec(name=f"found-on-{self.node.name.lower()}"[:63], nodes=(self.node,))


def make_local_node_name() -> str:
    """Return the first part of this machine's host name, in the form allowed in a cluster file."""
    name = re.sub(r"[^a-zA-Z0-9._-]", "-", socket.gethostname().partition(".")[0]).lstrip("._-")
    return name or "node"


def detect_machine(node_name: str) -> DetectedMachine:
    """Return this machine as a node of this name, with its detected devices. Raises SpecError where
    they make no node.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return _make_virtual_machine(node_name, "CUDA_VISIBLE_DEVICES is empty")
    reading = nvml.read_nvml()
    if reading.error or not reading.devices:
        return _make_virtual_machine(node_name, reading.error or "NVML shows none")
    devices = _select_visible_devices(reading.devices)
    node = NodeSpec(
        name=node_name,
        devices=len(devices),
        device_ids=_find_device_ids(devices, reading),
        device=_find_common_device_spec(devices),
        host_memory=f"{read_host_bytes()}B",  # type: ignore[arg-type]  # as a cluster file says it
    )
    return DetectedMachine(node=node, notes=tuple(_list_notes(devices, node)))


def _find_device_ids(devices: Devices, reading: nvml.NvmlReading) -> tuple[DeviceId, ...]:
    """Return the ids of these devices: indices, or UUIDs if any of them is a MIG instance.

    It is () for all devices in NVML's order.
    """
    if tuple(devices) == reading.devices:
        return ()
    if all(device in reading.devices for device in devices):
        return tuple(device.index for device in devices)
    return tuple(device.uuid for device in devices)


def read_host_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container of this process."""
    all_bytes, _ = read_total_and_available_bytes()
    limits = [all_bytes]
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.exists() else ""
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _make_virtual_machine(node_name: str, reason: str) -> DetectedMachine:
    node = read_cluster(None).nodes[0].model_copy(update={"name": node_name})
    beginning = (
        f"No NVIDIA device is used ({reason}): jobs run on {node.devices} virtual devices of "
    )
    return DetectedMachine(node=node, notes=(f"{beginning}{format_bytes(node.device.memory)}.",))


def _find_common_device_spec(devices: Devices) -> DeviceSpec:
    """Return the description of the kind of device that all of these are. Raises SpecError where
    they differ.
    """
    readable = [device for device in devices if device.error is None]
    if not readable:
        errors = "; ".join(f"{device.index}: {device.error}" for device in devices)
        raise SpecError(
            "no device can be read", source=SOURCE, got=errors, hint="`nvidia-smi` must show them"
        )
    kinds = Counter(device.name for device in readable)
    if len(kinds) > 1:
        raise SpecError(
            "the devices are of several kinds, and a node has one",
            source=SOURCE,
            got=", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
            hint="name a cluster file with --cluster: its node takes the first `devices`, counted from 0",
        )
    every = [(device, nvml.read_rates(device)) for device in readable]
    cut = [str(device.index) for device, rates in every if rates is not None and rates.has_mig]
    if cut:
        hint = f"make some, or `nvidia-smi -i {','.join(cut)} -mig 0` makes it whole"
        raise SpecError(
            "a device in MIG mode has no instances",
            source=SOURCE,
            got=f"MIG on {', '.join(cut)}",
            hint=hint,
        )
    first = next((rates for _, rates in every if rates is not None), None)
    if first is None:
        raise SpecError(
            "the devices do not answer any more", source=SOURCE, hint="`nvidia-smi` must show them"
        )
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", readable[0].name)
    kind = load_nvml_names().get(name)
    return (
        _describe_unknown_device(name, first)
        if kind is None
        else _adapt_catalogue_device(kind, first, is_only_device=len(devices) == 1)
    )


def _select_visible_devices(devices: Devices) -> tuple[nvml.NvmlDevice, ...]:
    """Return the devices and MIG instances in CUDA_VISIBLE_DEVICES, in its order; all of them where
    it is not set.

    Numbers count as NVML counts, so a machine with several kinds of devices needs
    CUDA_DEVICE_ORDER=PCI_BUS_ID. Raises SpecError for a word that names no device, or names one
    twice.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return _split_mig_devices(devices)
    entries = [word.strip() for word in variable.split(",")]
    _check_device_order(entries, devices)
    visible = tuple(_find_device(word, devices) for word in entries)
    if len({*visible}) < len(visible):
        raise SpecError("CUDA_VISIBLE_DEVICES names a device twice", source=SOURCE, got=variable)
    return visible


def _split_mig_devices(devices: Devices) -> tuple[nvml.NvmlDevice, ...]:
    """Return the devices on which programs run: the MIG instances of devices in MIG mode, and the
    other devices.
    """
    parts = list[nvml.NvmlDevice]()
    for device in devices:
        parts += device.instances or (device,)
    return tuple(parts)


def _check_device_order(entries: Sequence[str], devices: Devices) -> None:
    """Raise SpecError where `entries` are numbers of devices that CUDA may count in another order
    than NVML.
    """
    kinds = {device.name for device in devices if not device.error}
    is_alike = len(kinds) < 2 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not is_alike and any(word.isdecimal() for word in entries):
        raise SpecError(
            "CUDA counts devices of several kinds in its own order",
            source=SOURCE,
            got=f"CUDA_VISIBLE_DEVICES={','.join(entries)}",
            hint="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the devices by their UUIDs (`nvidia-smi -L`)",
        )


def _find_device(word_of_variable: str, devices: Devices) -> nvml.NvmlDevice:
    """Return the device or MIG instance that a word of CUDA_VISIBLE_DEVICES names, by index or
    begin of its UUID.

    Raises SpecError for a word that names no device, or several.
    """
    by_uuid = [
        part
        for part in _split_mig_devices(devices)
        if len(word_of_variable) > 4 and part.uuid.startswith(word_of_variable)
    ]
    if len(by_uuid) == 1:
        return by_uuid[0]
    is_index = (
        word_of_variable.isdecimal()
        and len(word_of_variable) < 5
        and int(word_of_variable) < len(devices)
    )
    if is_index and not devices[int(word_of_variable)].instances:
        return devices[int(word_of_variable)]
    raise SpecError(
        "names a device in MIG mode" if is_index else "names no device of this machine",
        source=SOURCE,
        path="CUDA_VISIBLE_DEVICES",
        got=word_of_variable,
        allowed=f"0 to {len(devices) - 1}, or UUIDs that `nvidia-smi -L` shows",
        hint="unset it, or name a cluster file with --cluster: `device_ids` says which devices its node has",
    )


def _adapt_catalogue_device(
    catalogue_name: str, rates: nvml.NvmlRates, *, is_only_device: bool
) -> DeviceSpec:
    """Return the catalogue's device of this name, with this machine's memory and links where they
    are smaller.

    It then has a new name.
    """
    device = find_catalogue_device(catalogue_name)
    changed: dict[str, object] = {}
    if rates.cuda_bytes < (1 - MEMORY_TOLERANCE) * device.memory:
        changed |= {
            "memory": rates.cuda_bytes,
            "name": f"{device.name}-{rates.cuda_bytes >> 20}mib",
        }
    link = rates.nvlink_bandwidth or rates.pcie_bandwidth
    if (
        not is_only_device
        and link is not None
        and link < (1 - LINK_TOLERANCE) * device.link_bandwidth
    ):
        name = changed.get("name", device.name)
        changed |= {"link_bandwidth": round(link), "name": f"{name}-links-{link / 1e9:.0f}gb"}
    return device.model_copy(update=changed)


def _describe_unknown_device(name: str, rates: nvml.NvmlRates) -> DeviceSpec:
    """Return a description of a card that the catalogue lacks, from NVML's rates. Raises SpecError
    where they are too few.
    """
    fp32 = rates.fp32_flops
    memory_bandwidth = rates.memory_bandwidth
    pcie = rates.pcie_bandwidth
    if fp32 is None or memory_bandwidth is None or rates.capability is None:
        raise SpecError(
            "the catalogue lacks this card, and NVML does not say its rates",
            source=SOURCE,
            got=f"{name}, {format_bytes(rates.cuda_bytes)}",
            hint=f"describe it in a file for --cluster: {OTHER_KINDS}",
        )
    factor = TENSOR_FACTORS.get(rates.capability, NEWER_FACTOR)
    tflops = round(factor * fp32 / 1e12, 1)
    lanes = nvml.PCIE_LANE_BYTES_S[3] * 16 if pcie is None else pcie
    fields: dict[str, object] = {
        "name": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        "memory": f"{rates.cuda_bytes}B",
        "fp16_tflops": tflops,
        "fp32_tflops": round(fp32 / 1e12, 1),
        "memory_bandwidth": f"{memory_bandwidth:.0f}B/s",
        "link_bandwidth": f"{rates.nvlink_bandwidth or lanes:.0f}B/s",
    }
    if rates.capability >= (8, 0):  # before Ampere there is no bf16
        fields["bf16_tflops"] = tflops
    if pcie is not None:
        fields["host_bandwidth"] = f"{pcie:.0f}B/s"
    return DeviceSpec.model_validate(fields)


def _list_notes(devices: Devices, node: NodeSpec) -> list[str]:
    notes = [
        f"Found {node.devices} x {devices[0].name or node.device.name}, taken as {node.device.name}."
    ]
    if node.device.name not in load_devices():
        note = "The catalogue lacks this device: its rates follow from clocks that NVML tells. Look at its data sheet."
        notes.append(note)
    if "MIG" in devices[0].name.split() and len(devices) > 1:
        notes.append("A program can use one MIG instance: jobs here need `gpus: 1`.")
    for device in devices:
        if device.error is not None:
            notes.append(
                f"Device {device.index} cannot be read ({device.error}): nothing is placed on it until it can."
            )
        elif device.used_bytes >= HELD_BYTES:
            used = format_bytes(device.used_bytes)
            total = format_bytes(device.total_bytes)
            pids = (
                ", ".join(str(process.pid) for process in device.processes)
                or "which NVML does not name"
            )
            notes.append(
                f"Device {device.index}: {used} of {total} are held by others (pid {pids}). Jobs get the rest."
            )
    return notes
