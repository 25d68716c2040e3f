"""The reader of each driver, by the name that a kind of device has for it (`DeviceTraits.driver`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.backends.devices import nvml
from orchestrator.backends.devices.nvml import NvmlDevice, NvmlReading
from orchestrator.specs.device_kind import DeviceId
from orchestrator.specs.replace import replace

READERS: Mapping[str, Callable[[], NvmlReading]] = {"nvml": nvml.read_nvml}


def read_devices(driver: str, device_ids: Sequence[DeviceId] = ()) -> NvmlReading:
    """Return this driver's reading of this machine's devices. Never raises: an unknown driver gives
    a reading with an error.

    `device_ids` select the devices, by the driver's index or by UUID (as for MIG instances); ()
    selects all. The reading numbers them from 0.
    """
    reader = READERS.get(driver)
    if reader is None:
        return NvmlReading(error=f"nothing here reads the driver {driver!r}")
    reading = reader()
    if not device_ids:
        return reading
    by_id: dict[DeviceId, NvmlDevice] = {}
    for device in reading.devices:
        by_id[device.index] = device
        by_id |= {part.uuid: part for part in (device, *device.instances) if part.uuid}
    devices = [
        replace(by_id[device_id], index=number)
        for number, device_id in enumerate(device_ids)
        if device_id in by_id
    ]
    return NvmlReading(devices=tuple(devices), error=reading.error)
