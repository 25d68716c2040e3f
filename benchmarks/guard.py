"""How much longer does a training step take under the guard on a virtual device than without it?"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.figure import Figure, at_most, informs
from orchestrator.specs.run import GuardSettings, write_json
from orchestrator.training.guard import guard

PAIRS = 30
WARM_UP = 3  # first steps allocate the optimizer's states
STEP_S_MIN = 0.2  # the promise is about steps of this length or longer

SCRIPT = """
import sys, time
import torch
from orchestrator.specs.job.model import DecoderSpec
from orchestrator.training.models.decoder import Decoder

torch.set_num_threads(1)
torch.manual_seed(0)
spec = DecoderSpec(vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6)
model = Decoder(spec)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(256, (8, 129))
for _ in sys.stdin:  # one step per line
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    (loss / tokens.numel()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(time.perf_counter() - began_s, time.process_time() - began_cpu_s, flush=True)
"""


def figures() -> list[Figure]:
    """Two processes take turns, step by step, so that other load on the machine meets both alike.

    The promise is about the wall clock; processor time says the same with less noise where the machine is busy.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, settings = Path(folder, "train.py"), Path(folder, "guard.json")
        script.write_text(SCRIPT)
        write_json(settings, GuardSettings(attempt_folder=folder, virtual_capacity_bytes=2**32))
        guarded = _start([sys.executable, guard.__file__, str(settings), "--", str(script)])
        plain = _start([sys.executable, str(script)])
        try:
            pairs = [(_step(plain), _step(guarded)) for _ in range(WARM_UP + PAIRS)][WARM_UP:]
        finally:
            for process in (guarded, plain):
                process.communicate(timeout=60)
    plain_s = statistics.median(bare.wall_s for bare, _ in pairs)
    wall_ratio = statistics.median(under.wall_s / bare.wall_s for bare, under in pairs)
    cpu_ratio = statistics.median(under.cpu_s / bare.cpu_s for bare, under in pairs)
    assert plain_s >= STEP_S_MIN / 2, (
        f"a step of {plain_s:.3f} s says nothing about one of {STEP_S_MIN} s"
    )
    return [
        informs("training step without the guard, median", plain_s, "s"),
        at_most(
            "training step under the guard / without, virtual device", wall_ratio, "ratio", 1.10
        ),
        informs("the same in processor time", cpu_ratio, "ratio"),
    ]


class Step(NamedTuple):
    wall_s: float
    cpu_s: float


def _start(command: list[str]) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _step(process: subprocess.Popen[str]) -> Step:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return Step(*map(float, process.stdout.readline().split()))
