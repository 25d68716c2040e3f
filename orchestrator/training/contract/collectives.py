"""Collectives of torch.distributed, re-exported under torch's names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 renamed both, and warns of the former names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
all_to_all: Any = dist.all_to_all_single
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
