"""Compute and memory rates of this machine's CPU ranks, measured once in a child process, cached for this user.

A cluster file can only guess the rates of a virtual device; its guesses apply if nothing was measured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from orchestrator.backends.environment import select_inherited
from orchestrator.planning.collectives import LINK_EFFICIENCY
from orchestrator.planning.kernels import BANDWIDTH_EFFICIENCY, PRODUCT_EFFICIENCY
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec

PROGRAM = "orchestrator.training.rates"
TIMEOUT_S = 30.0  # it takes 3 s, most of them to import torch, and longer while a service starts

log = logging.getLogger(__name__)


class CpuRates(BaseModel):
    """The measured rates of one CPU rank, per second, while a second rank is equally busy."""

    model_config = ConfigDict(frozen=True)

    fp32_flops: PositiveFloat
    bf16_flops: PositiveFloat
    memory_bandwidth: PositiveFloat
    link_bandwidth: PositiveFloat


def add_measured_rates(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the measured rates of this machine's CPU ranks (virtual devices);
    cached ones are reused.

    Other nodes are assumed to be like this one. Rates that cannot be measured stay as declared.
    """
    ranks = _count_cpu_ranks_per_machine(cluster)
    if not ranks:
        return cluster
    file = _find_cache_file(ranks)
    rates = _read_cached_rates(file) or _measure_rates(ranks, file)
    return cluster if rates is None else replace_rates(cluster, rates)


def add_cached_rates(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the cached rates of this machine's CPU ranks; unchanged if none were
    measured.
    """
    rates = find_cached_rates(cluster)
    return cluster if rates is None else replace_rates(cluster, rates)


def find_cached_rates(cluster: ClusterSpec) -> CpuRates | None:
    """Return the cached compute and memory rates of this machine's CPU ranks.

    None if they were never measured, or if the cluster has no CPU ranks.
    """
    ranks = _count_cpu_ranks_per_machine(cluster)
    return _read_cached_rates(_find_cache_file(ranks)) if ranks else None


def replace_rates(cluster: ClusterSpec, rates: CpuRates) -> ClusterSpec:
    """Return the cluster with these rates for its virtual devices."""
    nodes = tuple(
        node.model_copy(update={"device": _replace_device_rates(node.device, rates)})
        for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes})


def _replace_device_rates(device: DeviceSpec, rates: CpuRates) -> DeviceSpec:
    """Return the device with peak rates from which planning, which multiplies by its efficiencies,
    gets the measured rates.
    """
    if not device.kind.traits.is_virtual:
        return device
    return device.model_copy(
        update={
            "fp32_tflops": rates.fp32_flops / PRODUCT_EFFICIENCY / 1e12,
            "bf16_tflops": rates.bf16_flops / PRODUCT_EFFICIENCY / 1e12,
            "fp16_tflops": None,
            "memory_bandwidth": round(rates.memory_bandwidth / BANDWIDTH_EFFICIENCY),
            "link_bandwidth": round(rates.link_bandwidth / LINK_EFFICIENCY),
        }
    )


def _measure_rates(rank_count: int, file: Path | None) -> CpuRates | None:
    try:
        child = subprocess.run(
            [sys.executable, "-m", PROGRAM, str(_count_threads_per_rank(rank_count))],
            env={
                **select_inherited(os.environ),
                "CUDA_VISIBLE_DEVICES": "",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        rates = CpuRates.model_validate_json(child.stdout)
    except (OSError, subprocess.SubprocessError, ValidationError) as error:
        log.warning("rates of CPU ranks stay as declared: %s", error)
        return None
    if file is None:
        return rates
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(rates.model_dump_json())
        temporary.replace(file)
    except OSError as error:
        log.warning("rates of CPU ranks are measured at each start: %s", error)
    return rates


def _read_cached_rates(file: Path | None) -> CpuRates | None:
    if file is None:
        return None
    try:
        return CpuRates.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _count_cpu_ranks_per_machine(cluster: ClusterSpec) -> int:
    """Return the number of CPU ranks per machine; 0 if the cluster has none."""
    return max(
        (node.devices for node in cluster.nodes if node.device.kind.traits.is_virtual),
        default=0,
    )


def _count_threads_per_rank(rank_count: int) -> int:
    """Return the number of threads per CPU rank that a launch sets
    (backends/attempts/launch_request.py).
    """
    return max(1, len(os.sched_getaffinity(0)) // rank_count)


def _find_cache_file(rank_count: int) -> Path | None:
    """Return the file in which rates are cached, by host, processor, torch version and method of
    measurement.

    None for a user without a home directory, as in a container with any user id: each start
    measures.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        return None
    model = next(
        (line for line in _read_lines(Path("/proc/cpuinfo")) if line.startswith("model name")), ""
    )
    program = Path(__file__).parents[2] / "training" / "rates.py"
    key = (
        platform.node(),
        platform.machine(),
        model,
        str(_count_threads_per_rank(rank_count)),
        importlib.metadata.version("torch"),
    )
    digest = hashlib.sha256("\n".join(key).encode() + program.read_bytes()).hexdigest()
    return Path(folder, "orchestrator", "rates") / f"{digest[:32]}.json"


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
