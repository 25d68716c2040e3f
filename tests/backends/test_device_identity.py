"""A placement's index is mapped to what CUDA calls the device: a MIG instance, a UUID, or the driver's index.

The real pynvml loads a small library of ours (fake_nvml/nvml.c) in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.specs.errors import SpecError
from orchestrator.specs.parse import parse_cluster

ROOT = Path(__file__).parents[2]
DEVICE = (
    "{name: card, kind: cuda, memory: 8GiB, bf16_tflops: 1, fp32_tflops: 1,"
    " memory_bandwidth: 9GB/s, link_bandwidth: 1GB/s}"
)
NODE = (
    "  - {{name: {name}, devices: {count}, device_ids: {ids}, host_memory: 4GiB, device: {device}}}"
)
# One card is another job's, one is whole, one is cut into two instances.
CARDS = "ok\n9000 0 2 -\n2048 0 0 -\n8000 0 0 - mig=1 slices=1024,0,4096\n"
NODES = {
    "mig": '["MIG-00000002-2", "MIG-00000002-0"]',
    "uuid": '["GPU-00000001-aaaa"]',
    "index": "[0]",
}
PROGRAM = """
import json, sys
from pathlib import Path
from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.devices.readers import read_devices
from orchestrator.specs.attempt import NodeDevices
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.run import JobFolder
from tests.backends.ray_jobs import Alone, Reader, launch_of, script
from tests.local_cluster import LocalLaunchers, LocalNodes

class Nodes(LocalNodes):
    def read_devices(self, node):
        return read_devices(node.launch.device.kind.traits.driver, node.launch.device_ids)

home, cluster = Path(sys.argv[1]), parse_cluster(sys.argv[2], "cluster.yaml")
backend = ProcessBackend(home, cluster, Nodes(cluster), LocalLaunchers(), Alone())
reader = Reader(backend)
reader.await_nodes()
seen = [event for event in reader.received if isinstance(event, NodesSeen)][-1]
print(json.dumps({node.name: [size >> 20 for size in node.free_bytes] for node in seen.nodes}))
command = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
spec = script().model_copy(update={"command": command, "launch": "self"})
visible = {}
for node in seen.nodes:
    launch = launch_of(node.name, spec, (NodeDevices(node=node.name, devices=(node.devices - 1,)),))
    backend.launch(launch)
    reader.await_end(launch)
    visible[node.name] = JobFolder(home, node.name).attempt(1).log(0).read_text().split()
print(json.dumps(visible))
backend.close()
"""


def cluster_of(nodes: dict[str, str]) -> str:
    rows = [
        NODE.format(name=name, ids=ids, count=1 + ids.count(","), device=DEVICE)
        for name, ids in nodes.items()
    ]
    return "\n".join(["name: lab", "nodes:", *rows])


def test_an_instance_a_uuid_and_an_index_are_read_and_made_visible_as_cuda_names_them(
    nvml_library: Path, tmp_path: Path
) -> None:
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    state = tmp_path / "state"
    state.write_text(CARDS)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "home", cluster_of(NODES)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(nvml_library),
            "NVIDIA_FAKE_STATE": str(state),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not ended.returncode, ended.stderr[-2000:]
    free, visible = map(json.loads, ended.stdout.splitlines()[-2:])
    assert free == {"mig": [4096, 1024], "uuid": [2048], "index": [2048]}
    assert visible == {
        "mig": ["MIG-00000002-0"],
        "uuid": ["GPU-00000001-aaaa"],
        "index": ["0"],
    }


@pytest.mark.parametrize(
    "ids", ['["x"]', '["MIG-"]', "[10000]", '["MIG-1,0"]', "[-1]", '["MIG-1", "MIG-1"]']
)
def test_what_names_no_device_is_refused_where_a_cluster_is_read(ids: str) -> None:
    with pytest.raises(SpecError, match="device_ids"):
        parse_cluster(cluster_of({"box": ids}), "cluster.yaml")
