"""Rates of a CPU rank on this machine, measured in a second: matrix products, memory, messages between two ranks.

    python -m orchestrator.training.rates THREADS

prints the rates as JSON. Rates are per second of processor time, the best of several repetitions, so that other
processes on the machine do not affect them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

REPETITIONS = 5
# of the matrices: larger than a core's first-level cache, as the layers of small models are
SIDE = 384
COPIED = 16 * 2**20  # bytes: too many for a core's caches to hold twice
SENT = 8 * 2**20  # bytes: large enough to hide the latency of a message
LIMIT_S = 20  # longest wait of a rank for the other one


def main(threads: int) -> None:
    """Measure the rates in two forked ranks, and print them as JSON. Call it before any thread exists."""
    with tempfile.TemporaryDirectory() as folder:
        second = os.fork()
        rank = 0 if second else 1
        try:
            rates = _measure_rates(threads, rank, Path(folder))
        except BaseException:  # a forked child returns to no caller
            if rank:
                os._exit(1)
            raise
        if rank:
            os._exit(0)  # gloo may abort at exit
        _, status = os.waitpid(second, 0)
        if status:
            sys.exit("the second rank failed")
        print(json.dumps(rates), flush=True)
        os._exit(0)


def _measure_rates(threads: int, rank: int, folder: Path) -> dict[str, float]:
    """Return the FLOP/s and bytes/s of this rank; both ranks measure at once, as a job's ranks
    compute.
    """
    signal.alarm(LIMIT_S)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    message = torch.ones(SENT // 4)
    fp32, bf16 = (torch.ones(SIDE, SIDE, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    source = torch.ones(COPIED // 4)
    target = torch.ones(COPIED // 4)
    operations = 2.0 * SIDE**3 * threads
    return {
        "fp32_flops": operations / _measure_best_time_s(lambda: fp32 @ fp32),
        "bf16_flops": operations / _measure_best_time_s(lambda: bf16 @ bf16),
        "memory_bandwidth": 2.0
        * COPIED
        * threads
        / _measure_best_time_s(lambda: target.copy_(source)),
        "link_bandwidth": SENT
        / _measure_best_time_s(lambda: dist.all_reduce(message)),  # each of two sends that many
    }


def _measure_best_time_s(function: Callable[[], object]) -> float:
    """Return the minimum processor seconds of a call, over several repetitions after one warm-up;
    all threads count.
    """
    taken_s = []
    for _ in range(REPETITIONS + 1):
        began_s = time.process_time()
        function()
        taken_s.append(time.process_time() - began_s)
    return min(taken_s[1:])


if __name__ == "__main__":
    main(int(sys.argv[1]))
