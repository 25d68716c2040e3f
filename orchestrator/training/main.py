"""Entry point of a training rank: `python -m orchestrator.training.main RUN_JSON`.

The environment has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.specs.run import STALE_EXIT_CODE, TrainingRun, parse_training_run_json
from orchestrator.training import loop
from orchestrator.training.checkpoint.saver import StaleAttempt

COLLECTIVE_TIMEOUT = timedelta(
    minutes=10
)  # a dead peer is noticed at once; this bounds the wait for a hanging one


def main(arguments: list[str]) -> int:
    """Run this rank; return 0 (finished) or STALE_EXIT_CODE (a newer attempt exists). After SIGTERM
    the process ends by it.
    """
    run = parse_training_run_json(json.loads(Path(arguments[0]).read_text()))
    ranks = _join_process_group(run)
    try:
        finished = loop.run_training(run, ranks)
    except StaleAttempt:
        print(
            f"attempt {run.epoch} is stale: a newer one exists; nothing was published",
            file=sys.stderr,
        )
        return STALE_EXIT_CODE
    if finished and ranks.rank == 0 and run.model.hf is not None:
        from orchestrator.training.export import export_model  # late: it imports transformers

        export_model(run)
    if not finished:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    return 0  # the process group is not destroyed: tearing gloo down may abort (see guard._end_process)


def _join_process_group(run: TrainingRun) -> loop.RankContext:
    """Join the process group that the environment describes; return this process's rank and
    device, and the number of ranks.
    """
    rank, local_rank, world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    assert world_size == run.plan.world_size, f"{world_size} ranks were started for {run.plan}"
    device = torch.device("cuda", local_rank) if run.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl"
        if cuda
        else "gloo",  # the norm of offloaded gradients is reduced in host memory
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device
        if cuda and world_size > 1
        else None,  # one rank alone needs NCCL for shards only
    )
    return loop.RankContext(rank=rank, local_rank=local_rank, world_size=world_size, device=device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
