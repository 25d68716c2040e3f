"""A loop whose samples take 1 MiB each, from the first step or from a later one."""

import argparse
import sys

import loop
import torch

BYTES = 2**20


class Wide(loop.Loop):
    """Samples that become wide at a step."""

    def __init__(self, args: argparse.Namespace, wide_from: int) -> None:
        super().__init__(args)
        self.wide_from = wide_from

    def batch(self) -> torch.Tensor:
        batch = super().batch()
        return batch if self.step < self.wide_from else batch.repeat(1, BYTES // 4 // loop.FEATURES)


Wide(loop.parse(*sys.argv[2:]), int(sys.argv[1])).run()
