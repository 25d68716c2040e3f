"""A loop whose step 30 reads a key that no batch has."""

import loop
import torch


class Bug(loop.Loop):
    """A data set whose thirtieth batch has no labels."""

    def batch(self) -> torch.Tensor:
        batch = {"inputs": super().batch()}
        if self.step < 29:
            batch["labels"] = batch["inputs"]
        return batch["labels"]


Bug(loop.parse()).run()
