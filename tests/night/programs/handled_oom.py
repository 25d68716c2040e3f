"""A loop that handles one out-of-memory error at step 3, and has a real bug at step 20."""

import loop
import torch


class Handled(loop.Loop):
    """A script that tries a large batch once."""

    def batch(self) -> torch.Tensor:
        if self.step == 2:
            try:
                torch.zeros(2**27)
            except torch.OutOfMemoryError:
                print("skipping a large batch", flush=True)
        if self.step == 19:
            raise KeyError("labels")
        return super().batch()


Handled(loop.parse()).run()
