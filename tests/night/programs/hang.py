"""A loop whose step 15 never ends."""

import time

import loop
import torch


class Hang(loop.Loop):
    """A data loader that waits for ever."""

    def batch(self) -> torch.Tensor:
        if self.step == 14:
            time.sleep(3600)
        return super().batch()


Hang(loop.parse()).run()
