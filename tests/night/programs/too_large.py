"""A model whose weights alone are larger than the device."""

import loop
from torch import nn


class TooLarge(loop.Loop):
    """A network of 312 MiB."""

    def __init__(self, args: object) -> None:
        self.table = nn.Linear(8192, 10_000)
        super().__init__(args)


TooLarge(loop.parse()).run()
