"""How long do 24 jobs of 2 s take on two slots, submitted one by one, beside `xargs -P 2`?

Both import torch. Rounds are interleaved, after one that warms up. Processor time is that of all processes which a side
started, and is measured where the kernel counts for a group of processes (cgroup v1, as root).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figure import Figure, at_most, informs
from tests.budget import ACCOUNTS, Account

JOBS = 24
ROUNDS = 2
PATIENCE_S = 600.0
LET_GO_S = 1.0  # the records of the last jobs
SCRIPT = "import torch, time\nprint('first', time.time(), flush=True)\ntime.sleep(2)\n"
JOB = "name: short\ncommand: [{python}, {script}]\nglobal_batch_size: 1\ngpus: 1\nprobe: never\n"


def figures() -> list[Figure]:
    account = Account()
    with tempfile.TemporaryDirectory(prefix="orc") as folder:
        home, script = Path(folder, "home"), Path(folder, "short.py")
        script.write_text(SCRIPT)
        job_file = Path(folder, "job.yaml")
        job_file.write_text(JOB.format(python=sys.executable, script=script))
        try:
            orc(home, "up")
            submit_all(home, job_file)
            rounds = []
            for _ in range(ROUNDS):
                bash = measured(account, lambda: run_bash(script))
                orchestrated = measured(account, lambda: submit_all(home, job_file))
                ratios = orchestrated[0] / bash[0], orchestrated[1] / bash[1]
                rounds.append((*ratios, *orchestrated, *bash))
        finally:
            orc(home, "down", "--force")
            account.pytest_unconfigure()
    wall, processor, ours_s, ours_cpu_s, bash_s, bash_cpu_s = (
        statistics.median(column) for column in zip(*rounds, strict=True)
    )
    shown = [
        informs("xargs, median", bash_s, "s"),
        informs("orc, median", ours_s, "s"),
        at_most("orc / xargs, wall", wall, "ratio", 0.6),
    ]
    if ACCOUNTS.is_dir():
        shown += [
            informs("xargs, processor time of a job", bash_cpu_s / JOBS, "s"),
            informs("orc, processor time of a job", ours_cpu_s / JOBS, "s"),
            at_most("orc / xargs, processor time", processor, "ratio", 0.7),
        ]
    return shown


def measured(account: Account, run: Callable[[], float]) -> tuple[float, float]:
    """Return the wall seconds that `run` tells, and the processor seconds of it and of what follows it."""
    before_s = account.used_s()
    wall_s = run()
    time.sleep(LET_GO_S)
    return wall_s, account.used_s() - before_s


def run_bash(script: Path) -> float:
    began_s = time.monotonic()
    command = ["xargs", "-P", "2", "-I{}", sys.executable, str(script)]
    numbers = "\n".join(map(str, range(JOBS)))
    subprocess.run(command, input=numbers, text=True, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began_s


def submit_all(home: Path, job_file: Path) -> float:
    """Submit each job by a command of its own; return the seconds until the last has ended well."""
    began_s, before = time.monotonic(), len(exit_codes(home))
    for _ in range(JOBS):
        orc(home, "submit", str(job_file))
    while len(exit_codes(home)) < before + JOBS:
        assert time.monotonic() - began_s < PATIENCE_S, "the jobs did not end"
        time.sleep(0.1)
    assert set(exit_codes(home)) == {"0"}
    return time.monotonic() - began_s


def exit_codes(home: Path) -> list[str]:
    return [path.read_text() for path in home.glob("jobs/*/attempts/*/rank0.rc")]


def orc(home: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", *arguments]
    environment = {**os.environ, "ORC_HOME": str(home)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
