"""The catalogue: names of devices that a cluster file may use instead of a description.

Rates are dense and of the data sheet, links per device and direction. `memory` is what CUDA calls total, below what is
on the card, as out-of-memory messages print it. `measured_tflops` is the fastest product in 16 bits anybody measured
(mag-/gpu_benchmark README.md, with the mamf-finder of stas00/ml-engineering, if no other source is named); absent where
not measured.

Every device here is NVIDIA's, since `backends/devices/` reads no other cards. A device of another vendor is unknown:
a cluster file that names one is refused with this list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

DeviceFields = Mapping[str, str | float | int]  # of a DeviceSpec, as a cluster file says one

_PCIE_3, _PCIE_4, _PCIE_5 = "12GB/s", "25GB/s", "55GB/s"  # x16; nominally 15.75, 31.5 and 63


def _device(
    memory: str,
    tflops: tuple[float | None, float, float],  # bf16, fp16, fp32
    memory_bandwidth: str,
    link_bandwidth: str,
    host_bandwidth: str,
    multiprocessors: int,
    measured_tflops: float | None = None,
) -> DeviceFields:
    bf16, fp16, fp32 = tflops
    fields: dict[str, str | float | int] = {
        "memory": memory,
        "fp16_tflops": fp16,
        "fp32_tflops": fp32,
        "memory_bandwidth": memory_bandwidth,
        "link_bandwidth": link_bandwidth,
        "host_bandwidth": host_bandwidth,
        "multiprocessors": multiprocessors,
    }
    if bf16 is not None:
        fields["bf16_tflops"] = bf16
    if measured_tflops is not None:
        fields["measured_tflops"] = measured_tflops
    return MappingProxyType(fields)


# fp32 is that of ordinary cores, which PyTorch's products use unless TF32 is asked for. A100 with
# TF32: 156.
DEVICES: Final[Mapping[str, DeviceFields]] = MappingProxyType(
    {
        # NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950): SXM with NVLink 600 GB/s
        # both directions.
        "a100-40gb": _device(
            "39.39GiB", (312, 312, 19.5), "1555GB/s", "300GB/s", _PCIE_4, 108, 267.9
        ),
        "a100-80gb": _device(
            "79.15GiB", (312, 312, 19.5), "2039GB/s", "300GB/s", _PCIE_4, 108, 267.9
        ),
        "a100-pcie-40gb": _device(
            "39.39GiB", (312, 312, 19.5), "1555GB/s", _PCIE_4, _PCIE_4, 108, 256.4
        ),
        "a100-pcie-80gb": _device(
            "79.15GiB", (312, 312, 19.5), "1935GB/s", _PCIE_4, _PCIE_4, 108, 256.4
        ),
        # An A100 with NVLink cut to 400 GB/s both directions (NVIDIA A800 SXM data sheet).
        "a800-80gb": _device(
            "79.15GiB", (312, 312, 19.5), "2039GB/s", "200GB/s", _PCIE_4, 108, 267.9
        ),
        # NVIDIA H100 data sheet: SXM with NVLink 900 GB/s both directions; the PCIe card as it ran
        # in most servers.
        "h100-80gb": _device(
            "79.11GiB", (989, 989, 67), "3350GB/s", "450GB/s", _PCIE_5, 132, 792.1
        ),
        "h100-pcie-80gb": _device(
            "79.11GiB", (756, 756, 51), "2000GB/s", _PCIE_5, _PCIE_5, 114, 499.5
        ),
        "h100-nvl-94gb": _device("93.10GiB", (835, 835, 60), "3900GB/s", "300GB/s", _PCIE_5, 132),
        # NVIDIA H200 data sheet: the chip of the H100 with HBM3e. H20: the same with fewer
        # multiprocessors.
        "h200-141gb": _device(
            "139.8GiB", (989, 989, 67), "4800GB/s", "450GB/s", _PCIE_5, 132, 792.1
        ),
        "h20-96gb": _device("95.0GiB", (148, 148, 44), "4000GB/s", "450GB/s", _PCIE_5, 78),
        # NVIDIA HGX B200 data sheet (8 GPUs: 18 PFLOP/s dense bf16, 600 TFLOP/s fp32), NVLink 1,800
        # GB/s.
        "b200-180gb": _device("178.3GiB", (2250, 2250, 75), "7700GB/s", "900GB/s", _PCIE_5, 148),
        # NVIDIA L40S, L4 and A10 data sheets: no NVLink. The A10 reaches 125 with fp32 sums only on
        # paper.
        "l40s-48gb": _device("44.40GiB", (362, 362, 91.6), "864GB/s", _PCIE_4, _PCIE_4, 142, 252.0),
        "l4-24gb": _device("22.03GiB", (121, 121, 30.3), "300GB/s", _PCIE_4, _PCIE_4, 58, 91.4),
        "a10-24gb": _device("21.99GiB", (125, 125, 31.2), "600GB/s", _PCIE_4, _PCIE_4, 72),
        # NVIDIA A30 and A40 data sheets; the A10G of AWS's g5 by its own: the chip of the A10 with
        # half its products.
        "a30-24gb": _device("23.50GiB", (165, 165, 10.3), "933GB/s", _PCIE_4, _PCIE_4, 56),
        "a40-48gb": _device("44.34GiB", (149.7, 149.7, 37.4), "696GB/s", _PCIE_4, _PCIE_4, 84),
        "a10g-24gb": _device("21.98GiB", (70, 70, 35), "600GB/s", _PCIE_4, _PCIE_4, 80),
        # NVIDIA RTX A6000, RTX 6000 Ada and RTX PRO 6000 Blackwell data sheets, dense. The first
        # two with ECC have less
        # memory than without, as the Ada's messages show (44.43 and 47.4 GiB): the smaller counts.
        "rtxa6000-48gb": _device("44.40GiB", (154.8, 154.8, 38.7), "768GB/s", _PCIE_4, _PCIE_4, 84),
        "rtx6000ada-48gb": _device(
            "44.40GiB", (364.2, 364.2, 91.1), "960GB/s", _PCIE_4, _PCIE_4, 142
        ),
        "rtxpro6000-96gb": _device(
            "94.90GiB", (503.8, 503.8, 125), "1792GB/s", _PCIE_5, _PCIE_5, 188
        ),
        # NVIDIA T4 and V100 data sheets: fp16 only, Turing and Volta have no bf16. V100: SXM2,
        # NVLink 300 GB/s. A T4 at
        # its limit of 70 W lowers its clock: products of 4,096 reach 24 of 65
        # (forums.developer.nvidia.com/t/264462).
        "t4-16gb": _device("14.58GiB", (None, 65, 8.1), "320GB/s", _PCIE_3, _PCIE_3, 40, 24),
        "v100-16gb": _device("15.77GiB", (None, 125, 15.7), "900GB/s", "150GB/s", _PCIE_3, 80),
        "v100-32gb": _device("31.74GiB", (None, 125, 15.7), "900GB/s", "150GB/s", _PCIE_3, 80),
        # NVIDIA Turing, Ampere GA102, Ada and RTX Blackwell whitepapers, with fp32 sums. Cards for
        # games send to each
        # other through host memory, and most boards give two of them eight lanes each.
        "rtx2080ti-11gb": _device("10.75GiB", (None, 53.8, 13.4), "616GB/s", _PCIE_3, _PCIE_3, 68),
        "rtx3060-12gb": _device("11.60GiB", (25.5, 25.5, 12.7), "360GB/s", "12GB/s", _PCIE_4, 28),
        "rtx3070-8gb": _device("7.78GiB", (40.6, 40.6, 20.3), "448GB/s", "12GB/s", _PCIE_4, 46),
        "rtx3080-10gb": _device("9.77GiB", (59.5, 59.5, 29.8), "760GB/s", "12GB/s", _PCIE_4, 68),
        "rtx3090-24gb": _device("23.69GiB", (71, 71, 35.6), "936GB/s", "12GB/s", _PCIE_4, 82),
        "rtx4060ti-16gb": _device(
            "15.60GiB", (44.1, 44.1, 22.1), "288GB/s", "12GB/s", "12GB/s", 34
        ),
        "rtx4070-12gb": _device("11.72GiB", (58.3, 58.3, 29.1), "504GB/s", "12GB/s", _PCIE_4, 46),
        "rtx4080-16gb": _device("15.70GiB", (97.5, 97.5, 48.7), "717GB/s", "12GB/s", _PCIE_4, 76),
        "rtx4090-24gb": _device(
            "23.64GiB", (165.2, 165.2, 82.6), "1008GB/s", "12GB/s", _PCIE_4, 128, 178.5
        ),
        "rtx5080-16gb": _device("15.47GiB", (112.6, 112.6, 56.3), "960GB/s", "25GB/s", _PCIE_5, 84),
        "rtx5090-32gb": _device(
            "31.36GiB", (209.5, 209.5, 104.8), "1792GB/s", "25GB/s", _PCIE_5, 170
        ),
    }
)

# Names that NVML gives the cards of the catalogue, without "NVIDIA", "Tesla" and "GeForce". Other
# cards of a chip, such
# as those of notebooks, and cards that are sold with several memory sizes, have other rates, and
# are none of these.
NVML_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "A100-SXM4-40GB": "a100-40gb",
        "A100-SXM4-80GB": "a100-80gb",
        "A100-PCIE-40GB": "a100-pcie-40gb",
        "A100 80GB PCIe": "a100-pcie-80gb",
        "A800-SXM4-80GB": "a800-80gb",
        "H100 80GB HBM3": "h100-80gb",
        "H100 PCIe": "h100-pcie-80gb",
        "H100 NVL": "h100-nvl-94gb",
        "H200": "h200-141gb",
        "H20": "h20-96gb",
        "B200": "b200-180gb",
        "L40S": "l40s-48gb",
        "L4": "l4-24gb",
        "A10": "a10-24gb",
        "A10G": "a10g-24gb",
        "A30": "a30-24gb",
        "A40": "a40-48gb",
        "RTX A6000": "rtxa6000-48gb",
        "RTX 6000 Ada Generation": "rtx6000ada-48gb",
        "RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000-96gb",
        "RTX PRO 6000 Blackwell Server Edition": "rtxpro6000-96gb",
        "T4": "t4-16gb",
        "V100-SXM2-16GB": "v100-16gb",
        "V100-SXM2-32GB": "v100-32gb",
        "RTX 2080 Ti": "rtx2080ti-11gb",
        "RTX 3070": "rtx3070-8gb",
        "RTX 3090": "rtx3090-24gb",
        "RTX 4070": "rtx4070-12gb",
        "RTX 4080": "rtx4080-16gb",
        "RTX 4090": "rtx4090-24gb",
        "RTX 5080": "rtx5080-16gb",
        "RTX 5090": "rtx5090-32gb",
    }
)


def match_devices(text: str) -> tuple[str, ...]:
    """Return the catalogue's names that match a text such as "RTX 3090", "a100-80gb" or "NVIDIA H100 80GB HBM3".

    A full catalogue name or NVML name matches that device alone. Other texts match as a prefix of a name, up to one of
    its hyphens, with or without "rtx". Returns () where nothing matches.
    """
    name = _normalise(text)
    whole = {_normalise(device): device for device in DEVICES} | {
        _normalise(nvml): device for nvml, device in NVML_NAMES.items()
    }
    if name in whole:
        return (whole[name],)
    return tuple(device for device in DEVICES if name in _beginnings(device))


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|generation", "", name.lower())


def _beginnings(name: str) -> set[str]:
    parts = name.split("-")
    long = {"".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return long | {text.removeprefix("rtx") for text in long}
