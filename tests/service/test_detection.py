"""Laws of finding a machine's hardware: what NVML says becomes a cluster file, or one clear error.

The real pynvml loads a small library of ours (tests/backends/fake_nvml/nvml.c) in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.service.intake.cluster_file import format_cluster
from orchestrator.service.intake.detection import make_local_node_name
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.devices import load_devices, load_nvml_names
from orchestrator.specs.parse import parse_cluster
from tests.backends.conftest import nvml_library  # noqa: F401  a fixture
from tests.backends.ray_jobs import until
from tests.service.test_reach import JOB, Machine

CLUSTERS = sorted((Path(__file__).parents[2] / "clusters").glob("*.yaml"))
FIND = """
import json
from orchestrator.service.intake.cluster_file import format_cluster
from orchestrator.service.intake.detection import detect_machine
from orchestrator.specs.errors import SpecError
try:
    found = detect_machine("a")
    print(json.dumps({"text": format_cluster(found.cluster, found.notes), "notes": found.notes, "error": ""}))
except SpecError as error:
    print(json.dumps({"text": "", "notes": [], "error": str(error)}))
"""
H100 = "81559 0 0 - name=NVIDIA_H100_80GB_HBM3 reserved=551 links=18:26562 pcie=5:16"
UNKNOWN = "97871 0 0 - name=NVIDIA_H100L reserved=551 cores=16896 sm=1785 mem=2619 bus=6016 pcie=5:16 capability=9.0"

Find = Callable[..., dict[str, Any]]


@pytest.fixture
def find(nvml_library: Path, tmp_path: Path) -> Find:  # noqa: F811
    """Return a function that detects a machine whose NVML has the cards it is called with."""
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    state = tmp_path / "state"

    def detect(*cards: str, **variables: str) -> dict[str, Any]:
        state.write_text("".join(f"{line}\n" for line in ("ok", *cards)))
        env = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        env |= {"LD_LIBRARY_PATH": str(nvml_library), "NVIDIA_FAKE_STATE": str(state), **variables}
        ended = subprocess.run(
            [sys.executable, "-c", FIND],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(ended.stdout)

    return detect


def found_cluster(answer: dict[str, Any]) -> ClusterSpec:
    assert not answer["error"], answer
    return parse_cluster(answer["text"], "found")


def test_cards_of_the_catalogue_are_found_by_name(find: Find) -> None:
    answer = find(*[H100] * 8)
    (node,) = found_cluster(answer).nodes
    assert (node.name, node.devices, node.device.name) == ("a", 8, "h100-80gb")
    assert "device: h100-80gb" in answer["text"]
    assert "look here" in answer["text"]
    assert answer["notes"] == ["Found 8 x NVIDIA H100 80GB HBM3, taken as h100-80gb."]


def test_an_unknown_card_is_described_by_its_bytes_and_clocks(find: Find) -> None:
    answer = find(UNKNOWN, UNKNOWN)
    device = found_cluster(answer).nodes[0].device
    assert device.name == "h100l"
    assert device.memory == (97871 - 551) * 2**20
    assert (
        device.memory_bandwidth == 2 * 2619 * 10**6 * 6016 // 8
    )  # 3.9 TB/s, as its data sheet says
    assert device.fp32_tflops == 60.3  # 60 on the data sheet
    assert device.bf16_tflops == pytest.approx(835, rel=0.1)  # dense, on the data sheet
    assert device.link_bandwidth == device.host_bandwidth == 55e9
    assert "Look at its data sheet" in " ".join(answer["notes"])


def test_an_unknown_card_of_which_nvml_says_little_is_an_error_that_says_what_to_write(
    find: Find,
) -> None:
    error = find("8000 0 0 - name=NVIDIA_Secret")["error"]
    assert "Secret, 7.81 GiB" in error
    assert "--cluster" in error


def test_links_that_are_slower_than_the_catalogues_are_said(find: Find) -> None:
    half = H100.replace("links=18", "links=9")
    device = found_cluster(find(half, half)).nodes[0].device
    assert (device.name, device.link_bandwidth) == ("h100-80gb-links-239gb", 9 * 26562 * 10**6)
    assert found_cluster(find(half)).nodes[0].device.name == "h100-80gb", (
        "one device has nobody to talk to"
    )


def test_a_part_of_a_cards_memory_is_not_the_whole(find: Find) -> None:
    device = found_cluster(find(H100.replace("81559", "40960"))).nodes[0].device
    assert (device.name, device.memory) == ("h100-80gb-40409mib", 40409 * 2**20)


def test_several_kinds_on_one_node_are_an_error(find: Find) -> None:
    error = find(H100, UNKNOWN)["error"]
    assert "1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA H100L" in error


def test_a_card_in_mig_mode_without_instances_is_an_error_that_says_how_to_mend_it(
    find: Find,
) -> None:
    error = find(H100, f"{H100} mig=1")["error"]
    assert "MIG on 1" in error
    assert "nvidia-smi -i 1 -mig 0" in error


def test_mig_instances_are_devices_with_their_own_memory_and_are_named_by_uuid(find: Find) -> None:
    cut = f"{UNKNOWN} mig=1 slices=24000,0,24000"
    answer = find(cut)
    (node,) = found_cluster(answer).nodes
    assert (node.devices, node.device_ids) == (2, ("MIG-00000000-0", "MIG-00000000-2"))
    assert node.device.memory == 24000 * 2**20
    assert node.device.fp32_tflops == pytest.approx(60.3 * 24000 / (97871 - 551), rel=0.01)
    assert "`gpus: 1`" in " ".join(answer["notes"])
    alone = found_cluster(find(cut, CUDA_VISIBLE_DEVICES="MIG-00000000-2")).nodes[0]
    assert (alone.devices, alone.device_ids) == (1, ("MIG-00000000-2",))
    assert "a device in MIG mode" in find(cut, CUDA_VISIBLE_DEVICES="0")["error"]
    several = found_cluster(
        find(H100, H100, cut, CUDA_VISIBLE_DEVICES="MIG-00000002-0,MIG-00000002-2")
    )
    assert several.nodes[0].device_ids == ("MIG-00000002-0", "MIG-00000002-2")
    assert "several kinds" in find(H100, cut)["error"]


def test_devices_that_slurm_gives_are_those_that_cuda_counts(find: Find) -> None:
    """ConstrainDevices closes the others, and CUDA counts from 0; without it all are open."""
    closed = H100.replace(" 0 -", " 2 -", 1)
    for cards, variables, device_ids in (
        ((closed, closed, H100, H100), {"CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ((closed, closed, H100, H100), {}, ()),
        ((closed, H100, H100), {"CUDA_VISIBLE_DEVICES": "1"}, (1,)),
        ((H100, H100), {"CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ((H100, H100, H100, H100), {"CUDA_VISIBLE_DEVICES": "2,3"}, (2, 3)),
        ((closed, H100, H100), {"CUDA_VISIBLE_DEVICES": "GPU-00000002"}, (1,)),
    ):
        node = found_cluster(find(*cards, **variables)).nodes[0]
        assert node.device_ids == device_ids, (cards, variables)


def test_memory_that_others_hold_and_cards_that_are_lost_are_told(find: Find) -> None:
    shared_card = H100.replace("0 0 -", "2048 0 41:2048", 1)
    answer = find(H100, shared_card, "81559 0 1 -")
    assert found_cluster(answer).nodes[0].devices == 3
    assert (
        answer["notes"][1]
        == "Device 1: 2.00 GiB of 79.65 GiB are held by others (pid 41). Jobs get the rest."
    )
    assert answer["notes"][2].startswith("Device 2 cannot be read (GPU is lost)")
    assert "no device can be read" in find("81559 0 1 -")["error"]


def test_a_choice_of_devices_is_the_node_and_an_empty_one_means_virtual_devices(find: Find) -> None:
    part = found_cluster(find(H100, H100, H100, CUDA_VISIBLE_DEVICES="2,1")).nodes[0]
    assert (part.devices, part.device_ids) == (2, (2, 1))
    named = found_cluster(find(H100, H100, CUDA_VISIBLE_DEVICES="GPU-00000001")).nodes[0]
    assert (named.devices, named.device_ids) == (1, (1,))
    for wrong in ("2", "0,0", "MIG-1", "GPU-0000000", "x", "0,"):
        assert find(H100, H100, CUDA_VISIBLE_DEVICES=wrong)["error"], wrong
    assert "in its own order" in find(H100, UNKNOWN, CUDA_VISIBLE_DEVICES="1")["error"]
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}
    assert found_cluster(find(UNKNOWN, H100, **order)).nodes[0].device_ids == (1,)
    assert found_cluster(find(H100, H100, CUDA_VISIBLE_DEVICES="0,1")).nodes[0].devices == 2
    answer = find(H100, CUDA_VISIBLE_DEVICES="")
    assert found_cluster(answer).nodes[0].device.kind == "virtual"
    assert "CUDA_VISIBLE_DEVICES is empty" in answer["notes"][0]


def test_a_machine_without_a_card_has_two_virtual_devices_and_says_so(find: Find) -> None:
    answer = find()
    node = found_cluster(answer).nodes[0]
    assert (node.devices, node.device.kind) == (2, "virtual")
    assert answer["notes"] == [
        "No NVIDIA device is used (NVML shows none): jobs run on 2 virtual devices of 256.00 MiB."
    ]


def test_every_name_of_nvml_is_of_the_catalogue() -> None:
    assert set(load_nvml_names().values()) <= set(load_devices())


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_as_text_is_read_as_the_same_cluster(path: Path) -> None:
    cluster = parse_cluster(path.read_text(), str(path))
    assert parse_cluster(format_cluster(cluster, ["a note"]), "text") == cluster


def test_maintenance_teams_and_trackers_survive_as_text() -> None:
    text = """\
name: c
launch_cost: 90.5s
trackers: [jsonl]
maintenance: [{start: "2026-12-24T22:00+01:00", end: "2026-12-25T06:00Z", nodes: [n1]}]
policy: {teams: [{name: vision, quota: 2, users: [ada]}]}
nodes:
- {name: n, count: 2, devices: 2, device: l4-24gb, host_memory: 100GiB, rack: r}
"""
    cluster = parse_cluster(text, "said")
    assert parse_cluster(format_cluster(cluster), "text") == cluster


@pytest.mark.long
def test_up_without_a_file_runs_jobs_on_the_cards_that_were_found(
    nvml_library: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    state, here = tmp_path / "state", Machine(folder=tmp_path)
    state.write_text(f"ok\n{H100}\n{H100}\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("NVIDIA_FAKE_STATE", str(state))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(python=sys.executable))
    try:
        shown = subprocess.run(
            [
                sys.executable,
                "-m",
                "orchestrator.cli",
                "cluster",
                "show",
                "--home",
                str(tmp_path / "home"),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        up = here.orc("up")
        assert (tmp_path / "home" / "cluster.yaml").read_text() == shown, (
            "`orc cluster show > my.yaml` is what `up` takes"
        )
        (node,) = up["nodes"]
        assert (up["name"], node["name"]) == (
            f"found-on-{make_local_node_name().lower()}",
            make_local_node_name(),
        )
        assert (node["device"]["name"], len(node["free_bytes"])) == ("h100-80gb", 2)
        assert up["notes"] == ["Found 2 x NVIDIA H100 80GB HBM3, taken as h100-80gb."]
        (job_id,) = here.orc("submit", str(job))["ids"]
        until(lambda: here.orc("show", job_id)["status"] == "succeeded", "the job", 120.0)
        assert here.orc("up")["started"] is False
        assert here.orc("cluster", "show")["cluster"]["name"] == up["name"]
        assert (tmp_path / "home" / "cluster.yaml").stat().st_mode & 0o077 == 0
    finally:
        here.orc("down", "--force")
