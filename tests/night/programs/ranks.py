"""Two ranks that average their gradients; the second one goes the way of the first argument."""

import sys
import time

import torch.distributed as dist
import ways


class Ranks(ways.Ways):
    """A script of ranks that meet in every step."""

    def __init__(self, args: object, way: str) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        if self.rank:
            args.output += f"/rank{self.rank}"
        super().__init__(args, way)
        self.optimizer.register_step_pre_hook(self.reduce)

    def reduce(self, *_: object) -> None:
        """Average the gradients over the ranks."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def at_bug(self) -> None:
        """Read a key that no batch has, in one rank."""
        if self.rank:
            {"inputs": 1}["labels"]

    def at_fewer_batches(self) -> None:
        """Leave one rank before the others, as a loader of unlike parts does."""
        if self.rank:
            sys.exit(0)

    def at_deadlock(self) -> None:
        """Wait in one rank, while the other waits for it."""
        if self.rank:
            time.sleep(3600)


Ranks.start()
