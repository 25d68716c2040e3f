"""How long does `orc plan` take for a 70B model on 64 nodes x 8 GPUs, the interpreter's start included?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.figure import Figure, at_most

ROOT = Path(__file__).parents[2]
RUNS = 5


def figures() -> list[Figure]:
    command = (
        *(sys.executable, "-m", "orchestrator.cli", "plan", "jobs/llama/llama_70b.yaml"),
        *("--cluster", "clusters/64x8-h100-80gb.yaml"),
    )
    taken_s = []
    for _ in range(RUNS + 1):  # the first fills the page cache
        began_s = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        taken_s.append(time.perf_counter() - began_s)
    return [at_most("orc plan, 70B on 64 x 8, median", statistics.median(taken_s[1:]), "s", 1.0)]
