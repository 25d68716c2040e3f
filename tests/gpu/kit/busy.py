"""Measure pairs of trainings on one device, by time-slicing and under MPS, and how busy each keeps it alone.

`small` leaves a large device idle between its kernels, `full` keeps it computing. The trainings of a pair wait for each
other after their warm-up and then train for the same seconds, so that all of the window is shared.

python -m tests.gpu.kit.busy full|tiny
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from orchestrator.specs.job.model import ModelSpec, TrainingSpec
from orchestrator.specs.run import TrainingRun
from orchestrator.training.build import build_engine, build_recipe
from tests.gpu.configurations import H200, MODELS, TINY, Measurement
from tests.gpu.kit.plans import PLAIN
from tests.gpu.kit.runner import PATIENCE, recording
from tests.gpu.kit.sharing import mps
from tests.gpu.measure import data_of
from tests.gpu.runs import take_step

WINDOW_S = 5.0
WARM_UP = 6  # steps
STEPS_MAX = 4000
START_S = 45 * PATIENCE  # until all trainings of a pair are warm
SAMPLE_S = 0.1
POLL_S = 0.005
TRAININGS = {
    "full": {
        "small": (MODELS["0.1B"], 256, 1),
        "full": (MODELS["1.3B"], 2048, 4),
    },
    "tiny": {"small": (TINY, 16, 1), "full": (TINY, 32, 4)},
}
PAIRS = (("small", "small"), ("small", "full"), ("full", "full"))
# A read beyond every allocation: the driver ends the context of the process, under MPS of its server.
FAULT = """
import torch
values = torch.zeros(8, device="cuda")
torch.cuda.synchronize()
torch.take(values, torch.tensor([2**40], device="cuda")); torch.cuda.synchronize()
"""


def train(size: str, name: str, folder: Path, number: int, count: int) -> dict[str, Any]:
    """Return the steps and seconds of the shared window, and the share of a step that its kernels take."""
    config, tokens, samples = TRAININGS[size][name]
    case = Measurement(
        name=name,
        model=ModelSpec(hf=dict(config)),
        sequence_length=tokens,
        plan=replace(PLAIN, micro_batch_size=samples),
        capacity_bytes=2**50,
        steps=STEPS_MAX,
    )
    run_folder = folder / f"training{number}"
    run_folder.mkdir()
    run = TrainingRun(
        model=case.model,
        data=data_of(case, run_folder),
        training=TrainingSpec(max_steps=STEPS_MAX),
        plan=case.plan,
        job_folder=str(run_folder),
        attempt_folder=str(run_folder),
        epoch=1,
        device="cuda",
    )
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    recipe = replace(build_recipe(run), initialise=lambda _, values: values.zero_())
    engine = build_engine(run, recipe, torch.device("cuda", 0), None)
    for step in range(WARM_UP):
        take_step(run, recipe, engine, step)
    kernels = {} if size == "tiny" else measure_kernels(lambda: take_step(run, recipe, engine, 0))
    (folder / f"ready{number}").touch()
    until_s = time.monotonic() + START_S
    while len(list(folder.glob("ready*"))) < count:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{count} trainings were not ready within {START_S:.0f} s")
        time.sleep(POLL_S)
    began_s = time.perf_counter()
    steps = 0
    while time.perf_counter() < began_s + WINDOW_S and steps < STEPS_MAX - WARM_UP:
        take_step(run, recipe, engine, WARM_UP + steps)
        steps += 1
    wall_s = time.perf_counter() - began_s
    return {
        "name": name,
        "steps": steps,
        "step_s": round(wall_s / max(1, steps), 5),
        **kernels,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def measure_kernels(take: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a profiled step and of its kernels. A stand-in for a card has no profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        began_s = time.perf_counter()
        take()
        step_s = time.perf_counter() - began_s
    kernels_s = sum(
        event.time_range.elapsed_us() / 1e6
        for event in record.events() or []
        if event.device_type == DeviceType.CUDA
    )
    return {"kernels_s": round(kernels_s, 5), "profiled_step_s": round(step_s, 5)}


@contextlib.contextmanager
def sampling(line: dict[str, Any], folder: Path, count: int) -> Iterator[None]:
    """Put into `line` what NVML told of the device while all trainings were in their window."""
    ended = threading.Event()
    rows: list[tuple[float, int, float]] = []

    def sample() -> None:
        pynvml.nvmlInit()
        try:
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not ended.wait(SAMPLE_S):
                if len(list(folder.glob("ready*"))) == count:
                    busy = pynvml.nvmlDeviceGetUtilizationRates(device).gpu
                    watts = pynvml.nvmlDeviceGetPowerUsage(device) / 1000
                    rows.append((time.monotonic(), busy, watts))
        except pynvml.NVMLError as error:
            line["nvml"] = str(error)
        finally:
            pynvml.nvmlShutdown()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    # The first second still shows the warm-up, and what follows the window is no training.
    shared = [row for row in rows if rows[0][0] + 1 < row[0] < rows[0][0] + WINDOW_S]
    if shared:
        line["busy_percent"] = round(statistics.mean(row[1] for row in shared), 1)
        line["power_w"] = round(statistics.mean(row[2] for row in shared), 1)


def run_together(size: str, names: Sequence[str], line: dict[str, Any]) -> None:
    """Train these at the same time; put what each of them did into `line`."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with sampling(line, folder, len(names)):
            running = [
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "tests.gpu.kit.busy", size),
                        *(name, text, str(number), str(len(names))),
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for number, name in enumerate(names)
            ]
            printed = [
                process.communicate(timeout=START_S + 10 * WINDOW_S)[0] for process in running
            ]
    line["trainings"] = [
        json.loads(text.splitlines()[-1]) if text.strip() else None for text in printed
    ]


def record_fault(size: str) -> None:
    """Record what becomes of a training beside a process whose kernel reads where it may not."""
    with (
        recording("busy: a fault beside small under MPS") as line,
        mps(),
        tempfile.TemporaryDirectory() as text,
    ):
        folder = Path(text)
        command = [sys.executable, "-m", "tests.gpu.kit.busy", size, "small", text, "0", "1"]
        survivor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        until_s = time.monotonic() + START_S
        while not (folder / "ready0").exists() and time.monotonic() < until_s:
            time.sleep(POLL_S)
        faulty = subprocess.run(
            [sys.executable, "-c", FAULT],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        line["fault"] = faulty.stderr.strip().splitlines()[-1:]
        line["survivor"] = survivor.communicate(timeout=START_S)[0].splitlines()[-1:]
        line["survivor_code"] = survivor.returncode


def main(size: str) -> None:
    """Record each training alone, each pair both ways, and a fault; on a full card what it has not shown yet."""
    shown = {line["name"] for line in H200["busy"]}
    if size == "tiny":
        shown = set()
    groups = [(name,) for name in TRAININGS[size]] + list(PAIRS)
    for names in groups:
        way = "alone" if len(names) == 1 else "by time-slicing"
        title = f"busy: {' and '.join(names)} {way}"
        if title not in shown:
            with recording(title) as line:
                run_together(size, names, line)
    for names in PAIRS:
        title = f"busy: {' and '.join(names)} under MPS"
        if title not in shown:
            with recording(title) as line, mps():
                run_together(size, names, line)
    record_fault(size)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        size, name, folder, number, count = sys.argv[1:]
        print(json.dumps(train(size, name, Path(folder), int(number), int(count))))
