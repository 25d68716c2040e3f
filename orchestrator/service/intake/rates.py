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


class Rates(BaseModel):
    """Rates of one CPU rank while a second one is equally busy, per second."""

    model_config = ConfigDict(frozen=True)

    fp32_flops: PositiveFloat
    bf16_flops: PositiveFloat
    memory_bandwidth: PositiveFloat
    link_bandwidth: PositiveFloat


def measure_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the measured rates of this machine's CPU ranks; cached ones are reused.

    Other nodes are assumed to be like this one. Rates that cannot be measured stay as declared.
    """
    ranks = _ranks(cluster)
    if not ranks:
        return cluster
    file = _cache_file(ranks)
    rates = _read(file) or _measure(ranks, file)
    return cluster if rates is None else with_rates(cluster, rates)


def recall_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with cached rates of this machine's CPU ranks; unchanged without any."""
    rates = read_rates(cluster)
    return cluster if rates is None else with_rates(cluster, rates)


def read_rates(cluster: ClusterSpec) -> Rates | None:
    """Return the cached rates of this machine's CPU ranks; None if unmeasured, or if the cluster has no CPU ranks."""
    ranks = _ranks(cluster)
    return _read(_cache_file(ranks)) if ranks else None


def with_rates(cluster: ClusterSpec, rates: Rates) -> ClusterSpec:
    """Return the cluster with these rates for its virtual devices."""
    nodes = tuple(
        node.model_copy(update={"device": _with_rates(node.device, rates)})
        for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes})


def _with_rates(device: DeviceSpec, rates: Rates) -> DeviceSpec:
    """Return the device with peak rates: planning multiplies peaks by its efficiencies."""
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


def _measure(ranks: int, file: Path | None) -> Rates | None:
    try:
        child = subprocess.run(
            [sys.executable, "-m", PROGRAM, str(_threads(ranks))],
            env={
                **select_inherited(os.environ),
                "CUDA_VISIBLE_DEVICES": "",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        rates = Rates.model_validate_json(child.stdout)
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


def _read(file: Path | None) -> Rates | None:
    if file is None:
        return None
    try:
        return Rates.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _ranks(cluster: ClusterSpec) -> int:
    """CPU ranks per machine; 0 if there are none."""
    return max(
        (node.devices for node in cluster.nodes if node.device.kind.traits.is_virtual),
        default=0,
    )


def _threads(ranks: int) -> int:
    """Return the threads per rank, as a launch sets them (backends/attempts/launch_request.py)."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _cache_file(ranks: int) -> Path | None:
    """Return the file of the rates, by host, processor, torch version and method of measurement.

    None for a user without a home directory, as in a container with any user id: each start measures.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        return None
    model = next(
        (line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")), ""
    )
    program = Path(__file__).parents[2] / "training" / "rates.py"
    key = (
        platform.node(),
        platform.machine(),
        model,
        str(_threads(ranks)),
        importlib.metadata.version("torch"),
    )
    digest = hashlib.sha256("\n".join(key).encode() + program.read_bytes()).hexdigest()
    return Path(folder, "orchestrator", "rates") / f"{digest[:32]}.json"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
