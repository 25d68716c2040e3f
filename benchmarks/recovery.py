"""How long from `submit` to the first step, and from an out-of-memory exception to the next attempt's first step?

Each beside a bare start: torchrun on the same training with the same plan. Ray and the service are up already. Then
jobs with planted profiles, simulated (drawn_recoveries.py) and on real ranks (real_recoveries.py): how many
out-of-memory failures until each runs?
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import drawn_recoveries, real_recoveries
from benchmarks.figure import Figure, at_most, informs
from orchestrator.service.client import lifecycle
from orchestrator.service.client.client import Client
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.run import AttemptFolder, JobFolder, parse_training_run_json

ROUNDS = 5
PATIENCE_S = 120.0
POLL_S = 0.01
FAULT = {"kind": "oom", "rank": 0, "step": 2}
JOB = """
name: recovery
global_batch_size: 8
gpus: 2
model:
  decoder: {vocab_size: 256, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
data: {text: [corpus.txt], sequence_length: 64}
training: {max_steps: 4, checkpoint_every_steps: 100}
"""


def figures() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="orc") as folder:
        home, job_file = Path(folder, "home"), Path(folder, "job.yaml")
        Path(folder, "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
        job_file.write_text(JOB)
        lifecycle.start_service(home, None, None)
        try:
            _round(home, job_file)  # fills the page cache
            rounds = [_round(home, job_file) for _ in range(ROUNDS)]
        finally:
            lifecycle.stop_service(home, force=True)
    submit_s, bare_s, recover_s, bare_again_s = (
        statistics.median(times) for times in zip(*rounds, strict=True)
    )
    return [
        informs("submit to the first step, median", submit_s, "s"),
        informs("torchrun to the first step, median", bare_s, "s"),
        at_most("submit / torchrun", submit_s / bare_s, "ratio", 1.3),
        informs("out of memory to the next attempt's first step, median", recover_s, "s"),
        informs("torchrun with that attempt's plan, median", bare_again_s, "s"),
        at_most("out of memory beyond torchrun", recover_s - bare_again_s, "s", 2.0),
        *drawn_recoveries.figures(),
        *real_recoveries.figures(),
    ]


def _round(home: Path, job_file: Path) -> tuple[float, float, float, float]:
    """Seconds of submit, of a bare start of that attempt, of recovery, and of a bare start of the next."""
    client = Client(home)
    began_s = time.time()
    job_id = client.submit_job(read_job(job_file).model_dump(mode="json"), FAULT)
    first, second = (JobFolder(home, job_id).attempt(number) for number in (1, 2))
    submit_s = _when(partial(_trains, first)) - began_s
    recover_s = _when(partial(_trains, second)) - first.oom(0).stat().st_mtime
    _when(lambda: client.fetch_job_and_version(job_id)[0]["status"] == "succeeded")
    client.close()
    return submit_s, _bare_start_s(first), recover_s, _bare_start_s(second)


def _bare_start_s(attempt: AttemptFolder) -> float:
    """Seconds from torchrun to the first step of the same run in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = parse_training_run_json(json.loads(attempt.run.read_text()))
        bare = AttemptFolder(folder)
        bare.run.write_text(
            json.dumps(dataclasses.asdict(run) | {"job_folder": folder, "attempt_folder": folder})
        )
        torchrun = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={run.plan.world_size}",
        )
        began_s = time.time()
        process = subprocess.Popen(
            (*torchrun, "-m", "orchestrator.training.main", str(bare.run)),
            stderr=subprocess.DEVNULL,
        )
        first_s = _when(partial(_trains, bare)) - began_s
        process.wait(PATIENCE_S)
        return first_s


def _trains(attempt: AttemptFolder) -> bool:
    return attempt.metrics.exists() and attempt.metrics.stat().st_size > 0


def _when(holds: Callable[[], bool]) -> float:
    """The time at which `holds()` was first seen true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"nothing for {PATIENCE_S:.0f} s"
        time.sleep(POLL_S)
    return time.time()
