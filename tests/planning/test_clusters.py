"""The cluster files that come with the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.specs.parse import parse_cluster

FILES = sorted((Path(__file__).parents[2] / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_cluster_file_is_named_for_its_hardware_and_reads(path: Path) -> None:
    cluster = parse_cluster(path.read_text(), str(path))
    assert cluster.name == path.stem
    assert all(node.device.bf16_tflops > 0 for node in cluster.nodes)
