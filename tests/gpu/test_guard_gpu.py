"""The guard on a CUDA device. Needs torch and pytest only."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from orchestrator.specs.run import OOM_EXIT_CODE, GuardSettings, write_json  # noqa: E402
from orchestrator.training.guard import guard  # noqa: E402

GIB = 2**30

EXCEEDS = """
import torch
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(2**30 / total)
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for rows in (8, 8, 2**20):
    model(torch.ones(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""

STEPS = """
import sys, time
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device="cuda") for _ in range(16)))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(8192, 4096, device="cuda")
for _ in sys.stdin:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print(time.perf_counter() - began_s, flush=True)
"""


def start(folder: Path, text: str, *, guarded: bool = True) -> Any:
    script, settings = folder / "train.py", folder / "guard.json"
    script.write_text(text)
    write_json(settings, GuardSettings(attempt_folder=str(folder), virtual_capacity_bytes=None))
    command = [guard.__file__, str(settings), "--", str(script)] if guarded else [str(script)]
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": "0"},
    )


def test_a_real_out_of_memory_error_is_reported_with_its_bytes(tmp_path: Path) -> None:
    process = start(tmp_path, EXCEEDS)
    process.communicate(timeout=240)
    assert process.returncode == OOM_EXIT_CODE
    report = json.loads((tmp_path / "rank0.oom.json").read_text())
    assert (report["step"], report["phase"]) == (2, "forward")
    assert report["requested_bytes"] == 4 * GIB
    assert 0 < report["live_bytes"] < GIB
    beat = json.loads((tmp_path / "rank0.heartbeat.json").read_text())
    assert (beat["step"], beat["steps_done"]) == (2, 2)
    assert 0 < beat["peak_bytes"] <= beat["reserved_bytes"] <= GIB
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    assert GIB < beat["allocator_room_bytes"] < total_bytes, (
        "all but the context, whatever the process may take of it"
    )


def test_a_step_under_the_guard_takes_at_most_a_hundredth_longer(tmp_path: Path) -> None:
    plain, guarded = start(tmp_path, STEPS, guarded=False), start(tmp_path, STEPS)

    def step_s(process: Any) -> float:
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        pairs = [(step_s(plain), step_s(guarded)) for _ in range(60)][10:]
    finally:
        for process in (plain, guarded):
            process.communicate(timeout=60)
    plain_s, guarded_s = (statistics.median(steps) for steps in zip(*pairs, strict=True))
    assert guarded_s / plain_s <= 1.01, (guarded_s, plain_s)
