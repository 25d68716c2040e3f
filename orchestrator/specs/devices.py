"""The catalogue: names of devices that a cluster file may use instead of a description; `devices.yaml` has them.

Every device there is NVIDIA's, since `backends/devices/` reads no other cards. A device of another vendor is unknown:
a cluster file that names one is refused with this list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from orchestrator.specs.packaged import load_table

DeviceFields = Mapping[str, str | float | int]  # of a DeviceSpec, as a cluster file says one


@lru_cache(maxsize=1)
def load_devices() -> Mapping[str, DeviceFields]:
    """Return {name: fields} of the devices in the catalogue."""
    table = load_table(__package__, "devices")
    devices = dict[str, DeviceFields]()
    for name, row in table["devices"].items():
        fields = zip(table["columns"], row, strict=True)
        devices[name] = {key: value for key, value in fields if value is not None}
    return devices


@lru_cache(maxsize=1)
def load_nvml_names() -> Mapping[str, str]:
    """Return {name that NVML gives a card, without brands: name of the card in the catalogue}."""
    names: dict[str, str] = load_table(__package__, "devices")["nvml_names"]
    return names


def find_matching_devices(text: str) -> tuple[str, ...]:
    """Return the catalogue's names that match a text such as "RTX 3090", "a100-80gb" or "NVIDIA
    H100 80GB HBM3".

    A full catalogue name or NVML name matches that device alone. Other texts match as a prefix of a
    name, up to one of its hyphens, with or without "rtx". Returns () where nothing matches.
    """
    name = _normalise_device_name(text)
    whole = {_normalise_device_name(device): device for device in load_devices()} | {
        _normalise_device_name(nvml): device for nvml, device in load_nvml_names().items()
    }
    if name in whole:
        return (whole[name],)
    return tuple(device for device in load_devices() if name in _list_name_prefixes(device))


def _normalise_device_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|generation", "", name.lower())


def _list_name_prefixes(name: str) -> set[str]:
    parts = name.split("-")
    long = {"".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return long | {text.removeprefix("rtx") for text in long}
