"""A loop with a save idiom that its first argument names, and that is ended once."""

import os
import signal
from pathlib import Path

import torch
import ways


class Saves(ways.Ways):
    """A script that does not write a checkpoint under another name first."""

    def save(self) -> None:
        output = Path(self.args.output)
        path = output / f"checkpoint-{self.step:04d}.pt"
        if self.way == "in_place":
            path = output / "last.pt"
        elif self.way == "latest":
            path = output / f"step{self.step}" / "state.pt"
            path.parent.mkdir(exist_ok=True)
        torch.save(self.state(), path)
        if self.way == "half_written" and self.is_first():
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "latest":
            (output / "latest").write_text(path.parent.name)
        print(f"saved {self.step}", flush=True)

    def load(self, path: str) -> None:
        if self.way == "latest":
            pointer = Path(path)
            path = str(pointer.parent / pointer.read_text() / "state.pt")
        super().load(path)

    def at_latest(self) -> None:
        """Be preempted."""
        self.preempt()

    def at_in_place(self) -> None:
        """Be preempted."""
        self.preempt()


Saves.start()
