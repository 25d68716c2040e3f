"""Reads memory, use, processes and rates of this machine's NVIDIA devices with pynvml.

A missing driver is no exception.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pynvml

from orchestrator.specs.frozen import frozen
from orchestrator.specs.replace import replace

# Per lane and direction, as copies reach it: 12, 25 and 55 GB/s of 16 lanes (specs/devices.py),
# doubled per generation.
PCIE_LANE_BYTES_S = {1: 0.19e9, 2: 0.38e9, 3: 0.75e9, 4: 1.5625e9, 5: 3.4375e9, 6: 6.875e9}

# What a driver's failures raise: its codes, text that is no UTF-8, and a library that cannot be
# loaded.
FAULTS = (pynvml.NVMLError, ValueError, OSError)


@frozen
class NvmlProcess:
    """A process that uses device memory. `used_bytes` is None where the driver does not report it,
    as in containers.
    """

    pid: int
    used_bytes: int | None


@frozen
class NvmlDevice:
    """A device and its readings; devices are in PCI bus order. An unreadable device has an `error`
    and 0 bytes free.
    """

    # as CUDA counts in this order: among the devices that this process may open; of a MIG instance
    # its place on its device
    index: int
    name: str = ""
    uuid: str = ""  # as CUDA_VISIBLE_DEVICES may name it; "" where the driver does not say
    total_bytes: int = 0
    free_bytes: int = 0
    used_bytes: int = 0
    power_w: float | None = None  # now; None where the driver does not say
    power_limit_w: float | None = None  # enforced limit
    # of the last second, in which kernels ran; None where the driver does not say
    busy_percent: int | None = None
    processes: tuple[NvmlProcess, ...] = ()
    error: str | None = None
    instances: tuple[NvmlDevice, ...] = ()  # of MIG: programs run on these alone


@frozen
class NvmlReading:
    """All devices of this machine, or an error text."""

    devices: tuple[NvmlDevice, ...] = ()
    error: str | None = None


def read_nvml() -> NvmlReading:
    """Return NVML's current reading of all devices of this machine. Never raises.

    A call takes 45 us per device, measured without a GPU.
    """
    try:
        pynvml.nvmlInit()
    except FAULTS as error:
        return NvmlReading(error=f"NVML does not start: {error}")
    try:
        readings = list[NvmlDevice]()
        for number in range(pynvml.nvmlDeviceGetCount()):
            # One that a control group hides, as Slurm's ConstrainDevices does, CUDA does not count.
            with suppress(pynvml.NVMLError_NoPermission):
                readings.append(_read_whole_device(number, len(readings)))
        return NvmlReading(devices=tuple(readings))
    except FAULTS as error:
        return NvmlReading(error=f"NVML does not answer: {error}")
    finally:
        _query_or_none(pynvml.nvmlShutdown)


@frozen
class NvmlRates:
    """Peak rates of a device, per second; None where the driver does not report one."""

    capability: tuple[int, int] | None  # CUDA compute capability
    cuda_bytes: int  # device memory without the driver's own part
    has_mig: bool  # split into MIG instances
    fp32_flops: float | None  # 2 x cores x highest clock
    memory_bandwidth: float | None  # bytes per second: 2 x highest clock x width of the bus
    nvlink_bandwidth: float  # bytes per second and direction, of all active links; 0 without one
    # bytes per second and direction, at the highest generation and width
    pcie_bandwidth: float | None


def read_rates(device: NvmlDevice) -> NvmlRates | None:
    """Return the peak rates of a device; None where it cannot be read. Never raises.

    The rates of a MIG instance are its device's, times its share of the device's memory. Slices of
    memory and of processors differ by a seventh or so (MIG User Guide, "MIG Device Names"). An
    instance has no links.
    """
    try:
        pynvml.nvmlInit()
    except FAULTS:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
        parent = _query_or_none(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        if parent is None:
            return _read_device_rates(handle)
        return _scale_to_instance(_read_device_rates(parent), _read_cuda_bytes(handle))
    except FAULTS:
        return None
    finally:
        _query_or_none(pynvml.nvmlShutdown)


def _scale_to_instance(device_rates: NvmlRates, instance_bytes: int) -> NvmlRates:
    """Return the rates of a MIG instance with this much memory, from the rates of its whole
    device.
    """
    share = instance_bytes / max(1, device_rates.cuda_bytes)
    return replace(
        device_rates,
        cuda_bytes=instance_bytes,
        has_mig=False,
        fp32_flops=device_rates.fp32_flops and share * device_rates.fp32_flops,
        memory_bandwidth=device_rates.memory_bandwidth and share * device_rates.memory_bandwidth,
        nvlink_bandwidth=0.0,
    )


def _read_device_rates(handle: object) -> NvmlRates:
    cores = _query_or_none(pynvml.nvmlDeviceGetNumGpuCores, handle)
    width = _query_or_none(pynvml.nvmlDeviceGetMemoryBusWidth, handle)
    core_mhz = _query_or_none(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
    memory_mhz = _query_or_none(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    lane = PCIE_LANE_BYTES_S.get(
        _query_or_none(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0
    )
    lanes = _query_or_none(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    mode = _query_or_none(pynvml.nvmlDeviceGetMigMode, handle)
    capability = _query_or_none(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return NvmlRates(
        capability=(capability[0], capability[1]) if capability else None,
        cuda_bytes=_read_cuda_bytes(handle),
        has_mig=bool(mode and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE),
        fp32_flops=2e6 * cores * core_mhz if cores and core_mhz else None,
        memory_bandwidth=2e6 * memory_mhz * width / 8 if memory_mhz and width else None,
        nvlink_bandwidth=_read_nvlink_bandwidth(handle),
        pcie_bandwidth=lane * lanes if lane and lanes else None,
    )


def _query_or_none(nvml_function: Callable[..., Any], *arguments: object) -> Any:
    """Return what this function of NVML returns for these arguments; None where the driver has no
    answer.
    """
    try:
        return nvml_function(*arguments)
    except FAULTS:
        return None


def _read_cuda_bytes(handle: object) -> int:
    memory = _query_or_none(
        pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2
    )  # older drivers lack it
    if memory is not None:
        return int(memory.total - memory.reserved)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def _read_nvlink_bandwidth(handle: object) -> float:
    links = [
        _query_or_none(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    ]
    reply = _query_or_none(
        pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    )
    if reply is None or reply[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return 0.0
    return float(1e6 * reply[0].value.uiVal * sum(map(bool, links)))


def _read_whole_device(nvml_number: int, index: int) -> NvmlDevice:
    """Return the device with NVML's number, and its MIG instances. Raises NoPermission where this
    user may not read it.
    """
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(nvml_number)
    except pynvml.NVMLError_NoPermission:
        raise
    except FAULTS as error:
        return NvmlDevice(index=index, error=str(error))
    mode = _query_or_none(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return _read_device(handle, index)
    instances = list[NvmlDevice]()
    for slot in range(_query_or_none(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _query_or_none(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
        if instance is not None:
            instances.append(_read_device(instance, len(instances)))
    return replace(_read_device(handle, index), instances=tuple(instances))


def _read_device(handle: object, index: int) -> NvmlDevice:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        if (
            not 0 <= memory.free <= memory.total
            or not 0 <= memory.used <= memory.total
            or not memory.total
        ):
            return NvmlDevice(
                index=index, error="the driver reports more memory free or used than there is"
            )
        name = pynvml.nvmlDeviceGetName(handle)
        uuid = _query_or_none(pynvml.nvmlDeviceGetUUID, handle) or ""
        return NvmlDevice(
            index=index,
            name=name if isinstance(name, str) else name.decode(),
            uuid=uuid if isinstance(uuid, str) else uuid.decode(),
            total_bytes=memory.total,
            free_bytes=memory.free,
            used_bytes=memory.used,
            power_w=_query_watts(pynvml.nvmlDeviceGetPowerUsage, handle),
            power_limit_w=_query_watts(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
            busy_percent=_read_busy_percent(handle),
            processes=_list_processes(handle),
        )
    except FAULTS as error:
        return NvmlDevice(index=index, error=str(error))


def _query_watts(nvml_function: Callable[..., Any], handle: object) -> float | None:
    milliwatts = _query_or_none(nvml_function, handle)
    return None if milliwatts is None else milliwatts / 1000


def _read_busy_percent(handle: object) -> int | None:
    use = _query_or_none(
        pynvml.nvmlDeviceGetUtilizationRates, handle
    )  # none of a device in MIG mode, whose memory can be read
    return None if use is None else int(use.gpu)


def _list_processes(handle: object) -> tuple[NvmlProcess, ...]:
    running = _query_or_none(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return tuple(
        NvmlProcess(pid=process.pid, used_bytes=process.usedGpuMemory) for process in running
    )
