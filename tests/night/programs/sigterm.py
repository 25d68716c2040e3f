"""A loop that saves at SIGTERM and exits with 0, which meets it after step 6 of its first run."""

import os
import signal
import sys
from types import FrameType

import loop
import torch


class Sigterm(loop.Loop):
    """A script that a batch system ends politely."""

    def __init__(self, args: object) -> None:
        super().__init__(args)
        signal.signal(signal.SIGTERM, self.end)

    def end(self, _number: int, _frame: FrameType | None) -> None:
        """Save and leave."""
        self.save()
        sys.exit(0)

    def batch(self) -> torch.Tensor:
        if self.step == 6 and not self.args.resume:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch()


Sigterm(loop.parse()).run()
