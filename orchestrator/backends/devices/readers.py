"""The reader of each driver, by the name that a kind of device has for it (`DeviceTraits.driver`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.backends.devices import nvml
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.specs.replace import replace

READERS: Mapping[str, Callable[[], NvmlReading]] = {"nvml": nvml.devices}


def read_devices(driver: str, device_ids: Sequence[int] = ()) -> NvmlReading:
    """Return the driver's reading of a node's devices. Never raises: an unknown driver is an error.

    `device_ids` are the driver's indices of the node's devices, which are numbered from 0 in the reading; (): all.
    """
    reader = READERS.get(driver)
    if reader is None:
        return NvmlReading(error=f"nothing here reads the driver {driver!r}")
    reading = reader()
    if not device_ids:
        return reading
    numbers = {device_id: number for number, device_id in enumerate(device_ids)}
    devices = [
        replace(device, index=numbers[device.index])
        for device in reading.devices
        if device.index in numbers
    ]
    devices.sort(key=lambda device: device.index)
    return NvmlReading(devices=tuple(devices), error=reading.error)
