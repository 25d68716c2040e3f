"""Selects the checkpoint to resume from: the newest whose files are all intact."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from orchestrator.training.checkpoint import folder as checkpoint_folder


def find_newest_intact(checkpoints: Path, group: dist.ProcessGroup) -> Path | None:
    """Return the newest intact checkpoint, the same on every rank of `group`; None without one.

    Each rank verifies some of the files. Damaged checkpoints are named on stderr, renamed and set
    aside.
    """
    steps: list[list[int]] = [[]]
    if group.rank() == 0:
        steps = [
            [
                checkpoint_folder.read_step_of_checkpoint(path)
                for path in reversed(checkpoint_folder.list_published(checkpoints))
            ]
        ]
    dist.broadcast_object_list(steps, src=0, group=group)
    for step in steps[0]:
        path = checkpoint_folder.get_complete_checkpoint_path(checkpoints, step)
        damages: list[list[str]] = [[] for _ in range(group.size())]
        mine = checkpoint_folder.find_damage(path, part_index=group.rank(), part_count=group.size())
        dist.all_gather_object(damages, mine, group=group)
        wrong = sorted({problem for damage in damages for problem in damage})
        if not wrong:
            return path
        if group.rank() == 0:
            aside = checkpoint_folder.quarantine_checkpoint(path)
            print(
                f"checkpoint {path} is damaged and was moved to {aside.name}:",
                *wrong,
                sep="\n  ",
                file=sys.stderr,
            )
    if steps[0] and group.rank() == 0:
        print("no intact checkpoint is left: training starts from the beginning", file=sys.stderr)
    return None
