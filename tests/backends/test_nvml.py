"""Laws of asking NVML: what the driver says is told, and a missing driver or a lost device is data.

The real pynvml loads a small library of ours (fake_nvml/nvml.c) in a process of its own.
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

from orchestrator.backends.attempts import nodes
from orchestrator.backends.devices import nvml

MIB = 2**20
READ_TWICE = """
import dataclasses, json, sys
from orchestrator.backends.devices import nvml
for line in sys.stdin:
    print(json.dumps(dataclasses.asdict(nvml.read_nvml())), flush=True)
"""

Ask = Callable[[str], dict[str, Any]]


@pytest.fixture
def ask(nvml_library: Path, tmp_path: Path) -> Any:
    """Writes the state file, then answers with the next reading of one long-living process."""
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    state = tmp_path / "state"
    env = {**os.environ, "LD_LIBRARY_PATH": str(nvml_library), "NVIDIA_FAKE_STATE": str(state)}
    process = subprocess.Popen(
        [sys.executable, "-c", READ_TWICE],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def answer(text: str) -> dict[str, Any]:
        state.write_text(text)
        stdin.write("\n")
        stdin.flush()
        return json.loads(stdout.readline())

    yield answer
    stdin.close()
    assert process.wait(10) == 0
    stdout.close()


def test_memory_and_processes_are_told_as_they_are_now(ask: Ask) -> None:
    first = ask("ok\n1000 100 0 41:60,42:40 97\n2000 0 0 -\n")
    assert first["error"] is None
    assert first["devices"] == [
        {
            "index": 0,
            "name": "Fake H200",
            "uuid": "GPU-00000000-aaaa",
            "total_bytes": 1000 * MIB,
            "free_bytes": 900 * MIB,
            "used_bytes": 100 * MIB,
            "power_w": None,
            "power_limit_w": None,
            "busy_percent": 97,
            "processes": [{"pid": 41, "used_bytes": 60 * MIB}, {"pid": 42, "used_bytes": 40 * MIB}],
            "error": None,
            "instances": [],
        },
        {
            "index": 1,
            "name": "Fake H200",
            "uuid": "GPU-00000001-aaaa",
            "total_bytes": 2000 * MIB,
            "free_bytes": 2000 * MIB,
            "used_bytes": 0,
            "power_w": None,
            "power_limit_w": None,
            "busy_percent": 0,
            "processes": [],
            "error": None,
            "instances": [],
        },
    ]
    second = ask("ok\n1000 700 0 -\n2000 0 0 -\n")
    assert [device["free_bytes"] for device in second["devices"]] == [300 * MIB, 2000 * MIB]


def test_a_mig_instance_has_a_uuid_and_memory_of_its_own(ask: Ask) -> None:
    first, second = ask("ok\n8000 0 0 -\n8000 100 0 - mig=1 slices=1000,0,4000\n")["devices"]
    assert (first["uuid"], first["instances"]) == ("GPU-00000000-aaaa", [])
    assert [
        (part["index"], part["uuid"], part["free_bytes"], part["error"])
        for part in second["instances"]
    ] == [
        (0, "MIG-00000001-0", 1000 * MIB, None),
        (1, "MIG-00000001-2", 4000 * MIB, None),
    ]
    assert ask("ok\n8000 0 0 - mig=1\n")["devices"][0]["instances"] == []


def test_a_device_that_this_process_may_not_open_is_not_counted(ask: Ask) -> None:
    """Slurm with ConstrainDevices: CUDA counts the others from 0, and NVML names all of the machine."""
    devices = ask("ok\n1000 0 2 -\n2000 0 0 -\n3000 0 1 -\n4000 0 0 -\n")["devices"]
    assert [(device["index"], device["uuid"], device["error"]) for device in devices] == [
        (0, "GPU-00000001-aaaa", None),
        (1, "", "GPU is lost"),
        (2, "GPU-00000003-aaaa", None),
    ]


def test_a_lost_device_has_nothing_free_and_hides_no_other(ask: Ask) -> None:
    reading = ask("ok\n1000 0 1 -\n1000 0 0 -\n")
    assert [(device["free_bytes"], device["error"]) for device in reading["devices"]] == [
        (0, "GPU is lost"),
        (1000 * MIB, None),
    ]


def test_absurd_numbers_of_a_driver_are_no_free_memory(ask: Ask) -> None:
    """More used than there is makes the fake's free bytes wrap around; and a device of no memory at all."""
    reading = ask("ok\n1000 2000 0 -\n0 0 0 -\n1000 100 0 -\n")
    assert [(device["free_bytes"], bool(device["error"])) for device in reading["devices"]] == [
        (0, True),
        (0, True),
        (900 * MIB, False),
    ]


@pytest.mark.parametrize(
    "fault", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), OSError("no library")]
)
@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"])
def test_no_failure_of_the_driver_is_an_exception(
    monkeypatch: pytest.MonkeyPatch, call: str, fault: Exception
) -> None:
    def fail() -> None:
        raise fault

    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"):
        monkeypatch.setattr(nvml.pynvml, name, fail if name == call else lambda: 0)
    reading = nvml.read_nvml()
    assert (reading.error is None) == (call == "nvmlShutdown")
    assert nvml.read_rates(nvml.NvmlDevice(index=0)) is None


def test_a_driver_that_does_not_answer_is_data_and_may_come_back(ask: Ask) -> None:
    assert ask("9\n") == {"devices": [], "error": "NVML does not start: Driver Not Loaded"}
    assert len(ask("ok\n1000 0 0 -\n")["devices"]) == 1


def test_a_machine_without_nvml_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise nvml.pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(nvml.pynvml, "nvmlInit", missing)
    reading = nvml.read_nvml()
    assert reading.devices == ()
    assert reading.error is not None


@pytest.mark.parametrize(
    ("reported", "read", "tells"),
    [
        (None, 1000 * MIB, 960 * MIB),  # in steps of 64 MiB
        (960 * MIB, 900 * MIB, 960 * MIB),  # jitter is no news
        (960 * MIB, 600 * MIB, 576 * MIB),
        (128 * MIB, 0, 0),  # nothing is left: always news
    ],
)
def test_small_changes_of_free_memory_are_no_news(
    reported: int | None, read: int, tells: int
) -> None:
    assert nodes.debounce_free_bytes(reported, read) == tells
