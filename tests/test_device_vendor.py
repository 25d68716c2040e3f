"""The change of docs/extending/device-vendor.md, applied: a vendor is three files, and a script runs on it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.devices.readers import READERS, read_devices
from orchestrator.specs.device_kind import DeviceKind, DeviceTraits
from orchestrator.specs.errors import SpecError
from orchestrator.specs.parse import parse_cluster

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/extending/device-vendor.md"
FILES_MAX = 4
CLUSTER = """
name: lab
nodes:
  - name: box
    devices: 2
    device_ids: [2, 3]
    device:
      {name: fake-1gb, kind: fake, memory: 1GiB, bf16_tflops: 1, fp32_tflops: 1,
       memory_bandwidth: 9GB/s, link_bandwidth: 1GB/s}
    host_memory: 4GiB
"""
PROGRAM = """
import sys
from pathlib import Path
from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.devices.readers import read_devices
from orchestrator.specs.attempt import NodeDevices
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.run import JobFolder
from tests.backends.ray_jobs import Alone, Reader, launch_of, script
from tests.local_cluster import LocalLaunchers, LocalNodes

class FakeNodes(LocalNodes):
    def read_devices(self, node):
        return read_devices(node.launch.device.kind.traits.driver, node.launch.device_ids)

home, cluster = Path(sys.argv[1]), parse_cluster(sys.argv[2], "cluster.yaml")
backend = ProcessBackend(home, cluster, FakeNodes(cluster), LocalLaunchers(), Alone())
reader = Reader(backend)
reader.await_nodes()
seen = [event for event in reader.received if isinstance(event, NodesSeen)][-1]
print("free", [size >> 20 for size in seen.nodes[0].free_bytes])
command = (sys.executable, "-c", "import os; print('sees', os.environ['FAKE_VISIBLE_DEVICES'])")
spec = script().model_copy(update={"command": command, "launch": "self"})
launch = launch_of("job", spec, (NodeDevices(node="box", devices=(1,)),))
backend.launch(launch)
end = reader.await_end(launch)
print([rank.exit_code for rank in end.evidence.ranks], JobFolder(home, "job").attempt(1).log(0).read_text())
backend.close()
"""


def change() -> str:
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return str(block)


def test_a_kind_cannot_be_defined_before_it_says_every_trait() -> None:
    traits: dict[str, Any] = dataclasses.asdict(DeviceKind.CUDA.traits)
    for name in traits:
        with pytest.raises(TypeError, match=name):
            DeviceTraits(**{other: value for other, value in traits.items() if other != name})


def test_a_kind_that_is_not_defined_is_refused_where_a_cluster_is_read() -> None:
    with pytest.raises(SpecError, match="kind"):
        parse_cluster(CLUSTER, "cluster.yaml")


def test_every_driver_of_a_kind_has_a_reader_and_an_unknown_one_is_an_error() -> None:
    assert {kind.traits.driver for kind in DeviceKind} - {""} == READERS.keys()
    assert "nothing here reads" in str(read_devices("nobody").error)


def test_a_vendor_is_few_files_and_a_script_runs_on_its_devices(tmp_path: Path) -> None:
    assert len(re.findall(r"^diff --git", change(), flags=re.MULTILINE)) <= FILES_MAX
    for folder in ("orchestrator", "tests"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    subprocess.run(["git", "apply", "-"], input=change(), text=True, cwd=tmp_path, check=True)
    driver = tmp_path / "driver"
    driver.write_text("".join(f"{size << 20}\n" for size in (128, 256, 512, 768)))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "home"), CLUSTER],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "FAKE_DRIVER": str(driver)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert ended.returncode == 0, ended.stderr
    assert "free [512, 768]" in ended.stdout
    assert "[0] sees 3" in ended.stdout, "our second device is the driver's fourth"
