"""The reader of each driver, by the name that a kind of device has for it (`DeviceTraits.driver`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.backends.devices import nvml
from orchestrator.backends.devices.nvml import NvmlReading

READERS: Mapping[str, Callable[[], NvmlReading]] = {"nvml": nvml.devices}


def read_devices(driver: str) -> NvmlReading:
    """Return the driver's reading of this machine's devices. Never raises: an unknown driver is an error."""
    reader = READERS.get(driver)
    if reader is None:
        return NvmlReading(error=f"nothing here reads the driver {driver!r}")
    return reader()
