"""CPU ranks are planned with rates that are measured once per home."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.planning.collectives import ring
from orchestrator.planning.kernels import BANDWIDTH_EFFICIENCY, product_flops
from orchestrator.service.server.intake import read_cluster
from orchestrator.service.server.rates import Rates, known, measured, with_rates
from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec

RATES = Rates(fp32_flops=88e9, bf16_flops=4e11, memory_bandwidth=6e10, link_bandwidth=2e9)


def device(cluster: ClusterSpec) -> DeviceSpec:
    return cluster.nodes[0].device


def kept(home: Path) -> list[Path]:
    return list(home.glob("rates/*"))


def test_planning_uses_the_measured_rates_of_cpu_ranks() -> None:
    rank = device(with_rates(read_cluster(None), RATES))
    assert product_flops(rank, Precision.FP32) == pytest.approx(RATES.fp32_flops)
    assert product_flops(rank, Precision.BF16) == pytest.approx(RATES.bf16_flops)
    assert rank.memory_bandwidth * BANDWIDTH_EFFICIENCY == pytest.approx(RATES.memory_bandwidth)
    assert ring(2, 1, rank, 2, 10**9).bandwidth == pytest.approx(RATES.link_bandwidth)


def test_gpus_keep_the_rates_of_their_data_sheet(tmp_path: Path) -> None:
    cluster = read_cluster(Path(__file__).parents[2] / "clusters" / "1x8-h100-80gb.yaml")
    assert with_rates(cluster, RATES) == cluster
    assert measured(cluster, tmp_path) == cluster
    assert not kept(tmp_path)


def test_a_machine_is_measured_once_in_a_home(tmp_path: Path) -> None:
    """A real measurement; its cache file is reused, and rewritten if it cannot be read."""
    declared = read_cluster(None)
    assert known(declared, tmp_path) == declared, "to look is not to measure"
    first = measured(declared, tmp_path)
    rank = device(first)
    assert 1e9 < product_flops(rank, Precision.FP32) < 1e14
    assert 1e8 < rank.memory_bandwidth < 1e13
    assert 1e7 < rank.link_bandwidth < 1e12
    assert known(declared, tmp_path) == first
    (file,) = kept(tmp_path)
    file.write_text(RATES.model_dump_json())
    assert measured(declared, tmp_path) == with_rates(declared, RATES)
    file.write_text("{}")
    assert known(declared, tmp_path) == declared
    assert measured(declared, tmp_path) not in (declared, with_rates(declared, RATES))
    assert kept(tmp_path) == [file]
