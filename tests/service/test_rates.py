"""CPU ranks are planned with rates that are measured once per machine and user."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.planning.collectives import find_ring
from orchestrator.planning.hardware import Hardware
from orchestrator.planning.kernels import BANDWIDTH_EFFICIENCY, compute_peak_matmul_flops
from orchestrator.service.intake.intake import read_cluster
from orchestrator.service.intake.rates import (
    CpuRates,
    add_cached_rates,
    add_measured_rates,
    replace_rates,
)
from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec

RATES = CpuRates(fp32_flops=88e9, bf16_flops=4e11, memory_bandwidth=6e10, link_bandwidth=2e9)


def device(cluster: ClusterSpec) -> DeviceSpec:
    return cluster.nodes[0].device


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "orchestrator" / "rates"


def test_planning_uses_the_measured_rates_of_cpu_ranks() -> None:
    rank = device(replace_rates(read_cluster(None), RATES))
    assert compute_peak_matmul_flops(rank, Precision.FP32) == pytest.approx(RATES.fp32_flops)
    assert compute_peak_matmul_flops(rank, Precision.BF16) == pytest.approx(RATES.bf16_flops)
    assert rank.memory_bandwidth * BANDWIDTH_EFFICIENCY == pytest.approx(RATES.memory_bandwidth)
    hardware = Hardware(device=rank, devices_per_node=2, nodes=1, network_bandwidth=10**9)
    assert find_ring(2, 1, hardware).bandwidth == pytest.approx(RATES.link_bandwidth)


def test_gpus_keep_the_rates_of_their_data_sheet(cache: Path) -> None:
    cluster = read_cluster(Path(__file__).parents[2] / "clusters" / "1x8-h100-80gb.yaml")
    assert replace_rates(cluster, RATES) == cluster
    assert add_measured_rates(cluster) == cluster
    assert not cache.exists()


@pytest.mark.long
def test_a_machine_is_measured_once_for_all_homes_of_a_user(cache: Path) -> None:
    """A real measurement; its cache file is reused, and rewritten if it cannot be read."""
    declared = read_cluster(None)
    assert add_cached_rates(declared) == declared, "to look is not to measure"
    first = add_measured_rates(declared)
    rank = device(first)
    assert 1e9 < compute_peak_matmul_flops(rank, Precision.FP32) < 1e14
    assert 1e8 < rank.memory_bandwidth < 1e13
    assert 1e7 < rank.link_bandwidth < 1e12
    assert add_cached_rates(declared) == first
    (file,) = cache.iterdir()
    file.write_text(RATES.model_dump_json())
    assert add_measured_rates(declared) == replace_rates(declared, RATES)
    file.write_text("{}")
    assert add_cached_rates(declared) == declared
    assert add_measured_rates(declared) not in (declared, replace_rates(declared, RATES))
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_costs_a_measurement_and_nothing_else(cache: Path) -> None:
    cache.parent.write_text("no folder")
    declared = read_cluster(None)
    assert add_measured_rates(declared) != declared
    assert add_cached_rates(declared) == declared


def test_a_user_without_a_home_directory_is_planned_with_measured_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container may give any user id: nothing is cached, and nothing fails."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    declared = read_cluster(None)
    assert add_measured_rates(declared) != declared
    assert add_cached_rates(declared) == declared
