"""A loop that runs out of memory elsewhere than in a common step, as its first argument names."""

import os
import signal

import torch
import ways
from torch.utils.data import DataLoader, Dataset

MIB = 2**20 // 4  # in numbers of four bytes


class Killed(Dataset):
    """Samples of which the reading is killed, as the kernel does when memory is short."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)


class Memory(ways.Ways):
    """A script that needs more than the device or the host has."""

    def __init__(self, args: object, way: str) -> None:
        self.held: list[torch.Tensor] = []
        super().__init__(args, way)

    def evaluate(self) -> None:
        """Run the model over a batch of its own."""
        print("evaluating", flush=True)
        with torch.no_grad():
            torch.zeros(self.args.eval_batch_size, 64 * MIB).mean()

    def at_in_evaluation(self) -> None:
        """Evaluate in the training."""
        self.evaluate()

    def save(self) -> None:
        if self.way == "at_save":
            torch.zeros(512 * MIB)  # gathers all weights first
        super().save()

    def at_long_sample(self) -> None:
        """Read a sample to whose length the batch is padded."""
        self.held = [torch.zeros(self.args.batch_size, 64 * MIB)]
        self.held.clear()

    def at_loader_worker(self) -> None:
        """Read samples in another process, which is killed the first time."""
        if self.is_first():
            next(iter(DataLoader(Killed(), num_workers=1)))

    def at_shared_memory(self) -> None:
        """Fail as a worker does that passes a batch on through a small /dev/shm."""
        path = "/torch_3012_1749512213_0"
        raise RuntimeError(
            f"unable to allocate shared memory(shm) for file <{path}>: No space left on device (28)"
        )

    def begin_leak(self) -> None:
        """Keep 4 MiB of every step."""
        self.optimizer.register_step_post_hook(lambda *_: self.held.append(torch.zeros(4 * MIB)))


Memory.start()
