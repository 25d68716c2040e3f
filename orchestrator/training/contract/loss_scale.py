"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740), with its state in one tensor."""

from __future__ import annotations

import math

import torch

STATE = "loss_scale"  # canonical name of a tensor [2]: the scale, and finite steps since it changed

# torch.amp.GradScaler's defaults.
INITIAL = 2.0**16
GROWTH_INTERVAL = 2000


class LossScale:
    """The factor on the fp16 loss: doubled after GROWTH_INTERVAL finite steps, halved after an
    overflow.
    """

    def __init__(self) -> None:
        self.state = torch.tensor([INITIAL, 0.0])

    @property
    def factor(self) -> float:
        return float(self.state[0])

    def update(self, norm: float) -> bool:
        """Adapt the factor, and return whether a step with this gradient norm may be applied; equal
        on all ranks.
        """
        finite = math.isfinite(norm)
        if not finite:
            self.state[0] *= 0.5
            self.state[1] = 0.0
            return False
        self.state[1] += 1
        if self.state[1] >= GROWTH_INTERVAL:
            self.state[0] *= 2.0
            self.state[1] = 0.0
        return True
