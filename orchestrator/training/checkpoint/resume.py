"""Which checkpoint does a training go on from? The newest one whose files are all as they were written."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from orchestrator.training.checkpoint import folder as checkpoint_folder


def newest_intact(checkpoints: Path, group: dist.ProcessGroup) -> Path | None:
    """The newest checkpoint that is as it was written, the same on every rank of `group`; None where there is none.

    The ranks share the reading. What is found damaged is named on stderr and moved aside.
    """
    steps: list[list[int]] = [[]]
    if group.rank() == 0:
        steps = [[checkpoint_folder.step_of(path) for path in reversed(checkpoint_folder.published(checkpoints))]]
    dist.broadcast_object_list(steps, src=0, group=group)
    for step in steps[0]:
        path = checkpoint_folder.complete_path(checkpoints, step)
        found: list[list[str]] = [[] for _ in range(group.size())]
        mine = checkpoint_folder.damage(path, part=group.rank(), parts=group.size())
        dist.all_gather_object(found, mine, group=group)
        wrong = sorted({said for damage in found for said in damage})
        if not wrong:
            return path
        if group.rank() == 0:
            aside = checkpoint_folder.quarantine_checkpoint(path)
            print(f"checkpoint {path} is damaged and was moved to {aside.name}:", *wrong, sep="\n  ", file=sys.stderr)
    if steps[0] and group.rank() == 0:
        print("no intact checkpoint is left: training starts from the beginning", file=sys.stderr)
    return None
