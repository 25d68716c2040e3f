"""Torch dtypes of the low precisions."""

from __future__ import annotations

import torch

from orchestrator.specs.choices import Precision

LOW_PRECISION = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
