"""A loop that handles an out-of-memory error at step 20, and has a real bug in doing so."""

import loop
import torch


class Handled(loop.Loop):
    """A script that tries a large batch, and falls back to a smaller one with a wrong key."""

    def batch(self) -> torch.Tensor:
        if self.step < 19:
            return super().batch()
        try:
            torch.zeros(2**27)
        except torch.OutOfMemoryError:
            print("skipping a large batch", flush=True)
        return {"inputs": super().batch()}["labels"]


Handled(loop.parse()).run()
