"""A loop of which one step, or its start, goes the way that the first argument names."""

import os
import signal
import sys
from pathlib import Path

import loop
import torch

LAST_STEP = 12


class Ways(loop.Loop):
    """A script with methods `begin_WAY` and `at_WAY`: at its start, and after LAST_STEP steps."""

    def __init__(self, args: object, way: str) -> None:
        self.way = way
        super().__init__(args)
        begin = getattr(self, f"begin_{way}", None)
        if begin is not None:
            begin()

    @classmethod
    def start(cls) -> None:
        """Train in the way that the command line names."""
        way = sys.argv.pop(1)
        cls(loop.parse(), way).run()

    def is_first(self) -> bool:
        """Return whether no earlier attempt came here, and remember that this one did."""
        marker = Path(self.args.output) / "came-here"
        is_new = not marker.exists()
        marker.touch()
        return is_new

    def preempt(self) -> None:
        """End by SIGTERM, the first time."""
        if self.is_first():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def batch(self) -> torch.Tensor:
        change = getattr(self, f"at_{self.way}", None)
        if change is not None and self.step == LAST_STEP:
            change()
        return super().batch()
