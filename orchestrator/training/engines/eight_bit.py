"""8-bit AdamW of bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861): quantised moments, on CUDA only.

Names, sizes and counters are those of bitsandbytes 0.50.2 (bitsandbytes/optim/optimizer.py, Optimizer2State). It
quantises in blocks of 256; a release with another block size could not read the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import TrainingSpec

MINIMUM_ELEMENTS = 4096  # smaller tensors keep fp32 moments (bitsandbytes/optim/adamw.py, min_8bit_size)


def state_names(elements: int) -> tuple[str, ...]:
    """Names of a parameter's states: both moments and, if quantised, the largest value of every block."""
    return ("state1", "state2", "absmax1", "absmax2") if elements >= MINIMUM_ELEMENTS else ("state1", "state2")


def adamw(groups: Sequence[dict[str, Any]], training: TrainingSpec, device: torch.device) -> Any:
    """The optimizer. Raises SpecError without a CUDA device or without bitsandbytes."""
    if device.type != "cuda":
        raise SpecError("needs CUDA", path="training.optimizer", got="adamw_8bit", allowed="adamw on this device")
    try:
        import bitsandbytes
    except ImportError:
        hint = "pip install bitsandbytes"
        raise SpecError("bitsandbytes is missing", path="training.optimizer", got="adamw_8bit", hint=hint) from None
    betas, decay = (training.beta1, training.beta2), training.weight_decay
    return bitsandbytes.optim.AdamW8bit(groups, lr=training.learning_rate, betas=betas, weight_decay=decay)


def new_state(optimizer: Any, tensor: Tensor) -> dict[str, Any]:
    """The states of a parameter before its first update, all moments zero; `step` is a plain int."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter is tensor:
                optimizer.init_state(group, parameter, group_index, index)
    state: dict[str, Any] = optimizer.state[tensor]
    return state
