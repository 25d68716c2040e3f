"""The cluster files that come with the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.parse import parse_cluster

FILES = sorted((Path(__file__).parents[2] / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_cluster_file_is_named_for_its_hardware_and_reads(path: Path) -> None:
    cluster = parse_cluster(path.read_text(), str(path))
    assert cluster.name == path.stem
    (nodes,) = cluster.nodes
    if nodes.device.kind is DeviceKind.CUDA:
        assert path.stem == f"{nodes.count}x{nodes.devices}-{nodes.device.name}"
    else:
        assert re.search(r"virtual", path.stem)
