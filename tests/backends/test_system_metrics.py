"""Laws of samples: they say what MLflow's own monitor says, under its names, and cost next to nothing."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pynvml
import pytest

from orchestrator.backends.attempts import system_metrics
from orchestrator.backends.attempts.system_metrics import EVERY_S, Sampler, Watched
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.run import AttemptFolder, GuardSettings, write_json

GIB = 2**30
BEAT = Heartbeat(
    rank=0, step=1, steps_done=1, step_s=0.1, peak_bytes=9, phase="forward", at_s=1.0, live_bytes=0
)


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    attempt_folder = AttemptFolder(tmp_path / "attempts" / "1")
    attempt_folder.path.mkdir(parents=True)
    return attempt_folder


def samples_of(folder: AttemptFolder, node: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in folder.system(node).read_text().splitlines()]


@pytest.fixture
def _two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library with two devices."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: f"card {index}",
        "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(
            total=80 * GIB, used=(7 + index) * GIB, free=(73 - index) * GIB
        ),
        "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=40 + index),
        "nvmlDeviceGetPowerUsage": lambda index: 300_000 + index,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.usefixtures("_two_cards")
def test_devices_are_sampled_under_the_names_and_with_the_numbers_of_mlflows_own_monitor(
    folder: AttemptFolder,
) -> None:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    devices, nodes = GPUMonitor(), CPUMonitor()
    devices.collect_metrics()
    nodes.collect_metrics()
    Sampler(folder, Watched(node="n", devices=(0, 1))).take_sample((0, 1), None)
    (sample,) = samples_of(folder, "n")
    assert {name.removeprefix("system/") for name in sample} == {
        *devices.aggregate_metrics(),
        *nodes.metrics,
        "at_s",
    }
    for name, value in devices.aggregate_metrics().items():
        assert sample[f"system/{name}"] == value, name
    used = nodes.aggregate_metrics()["system_memory_usage_percentage"]
    assert sample["system/system_memory_usage_percentage"] == pytest.approx(used, abs=20)


@pytest.mark.usefixtures("_two_cards")
def test_only_devices_of_the_attempt_are_sampled_and_names_of_one_of_several_nodes_have_it(
    folder: AttemptFolder,
) -> None:
    Sampler(folder, Watched(node="n1", devices=(1,), is_alone=False)).take_sample((0,), None)
    (line,) = samples_of(folder, "n1")
    assert line["system/n1/gpu_1_utilization_percentage"] == 41
    assert not [name for name in line if "gpu_0" in name]


def test_a_virtual_device_has_the_memory_that_its_rank_told_and_nothing_that_nobody_measured(
    folder: AttemptFolder,
) -> None:
    write_json(
        folder.guard,
        GuardSettings(attempt_folder=str(folder.path), virtual_capacity_bytes=256_000_000),
    )
    write_json(folder.heartbeat(5), dataclasses.replace(BEAT, rank=5, live_bytes=64_000_000))
    ended = threading.Event()
    sampler = Sampler(folder, Watched(node="n", devices=(3, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system_metrics, "FIRST_S", 0.01)
        thread = threading.Thread(target=sampler.run, args=((5, 6), ended))
        thread.start()
        while not folder.system("n").exists():
            assert thread.is_alive()
            thread.join(0.01)
        ended.set()
        thread.join()
    line = samples_of(folder, "n")[0]
    assert {name: value for name, value in line.items() if "gpu" in name} == {
        "system/gpu_3_memory_usage_megabytes": 64.0,
        "system/gpu_3_memory_usage_percentage": 25.0,
    }


def test_a_sample_takes_less_than_a_thousandth_of_the_time_between_samples(
    folder: AttemptFolder,
) -> None:
    write_json(
        folder.guard,
        GuardSettings(attempt_folder=str(folder.path), virtual_capacity_bytes=256_000_000),
    )
    for rank in range(8):
        write_json(folder.heartbeat(rank), dataclasses.replace(BEAT, rank=rank))
    sampler = Sampler(folder, Watched(node="n", devices=tuple(range(8))))
    taken_s = []
    for _ in range(50):
        began_s = time.thread_time()
        sampler.take_sample(range(8), 256_000_000)
        taken_s.append(time.thread_time() - began_s)
    assert median(taken_s) < EVERY_S / 1000


def write_shares(folder: AttemptFolder, node: str, rows: list[dict[str, object]]) -> None:
    lines = []
    for row in rows:
        sample = {f"system/{name}": value for name, value in row.items() if name != "at_s"}
        if "at_s" in row:
            sample["at_s"] = row["at_s"]
        lines.append(json.dumps(sample))
    folder.system(node).write_text("\n".join(lines))


def test_the_busy_share_counts_seconds_from_the_first_kernel_over_all_devices(
    folder: AttemptFolder,
) -> None:
    share = "gpu_0_utilization_percentage"
    loading = [{"at_s": 90.0, share: 0}, {"at_s": 95.0, share: 0}]
    training = [{"at_s": 101.0, share: 50}, {"at_s": 103.0, share: 90}, {"at_s": 111.0, share: 100}]
    write_shares(folder, "n", [*loading, *training])
    # 1 s of 50 %, 2 s of 90 % and 8 s of 100 %
    assert system_metrics.compute_mean_busy_percent(folder) == pytest.approx(93.6, abs=0.05)
    write_shares(folder, "other", [{"at_s": 1.0, share: 10, "gpu_1_utilization_percentage": 30}])
    assert system_metrics.compute_mean_busy_percent(folder) == pytest.approx(82.3, abs=0.05)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"at_s": 1.0, "cpu_utilization_percentage": 30, "gpu_7/cpu_utilization_percentage": 30}],
        [{"at_s": 1.0, "gpu_0_utilization_percentage": 0}],
        [{"gpu_0_utilization_percentage": 50}],
        [{"at_s": 1e300, "gpu_0_utilization_percentage": 50}],
    ],
)
def test_a_share_that_nobody_measured_is_none(
    folder: AttemptFolder, rows: list[dict[str, object]]
) -> None:
    write_shares(folder, "n", rows)
    assert system_metrics.compute_mean_busy_percent(folder) is None


def test_no_written_sample_brings_the_share_out_of_its_bounds(folder: AttemptFolder) -> None:
    share = "gpu_0_utilization_percentage"
    write_shares(
        folder,
        "n",
        [
            {"at_s": 5.0, share: 1e9},
            {"at_s": -1e6, share: 40},
            {"at_s": 1e9, share: -7},
            {"at_s": 1e9 + 1, share: "x"},
        ],
    )
    busy_percent = system_metrics.compute_mean_busy_percent(folder)
    assert busy_percent is not None
    assert 0 <= busy_percent <= 100
