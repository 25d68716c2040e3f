"""A loop whose loss is NaN at step 30, which its own check says."""

import loop
import torch


class Nan(loop.Loop):
    """A learning that diverges."""

    def loss(self) -> torch.Tensor:
        loss = super().loss()
        if self.step == 29:
            loss = loss * float("nan")
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is NaN at step {self.step + 1}")
        return loss


Nan(loop.parse()).run()
