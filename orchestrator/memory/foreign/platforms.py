"""On which device and with software of which years somebody else's training runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.memory.estimate import WORKSPACE_BYTES
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.overhead import CONTEXT_BYTES

# Context of a process that loads all CUDA modules: torch 1.10, stas00/ml-engineering training/performance/README.md.
EAGER_CONTEXT_BYTES = 1_911_000_000
# The same on a V100, 1,343 MiB: huggingface/transformers docs/source/performance.mdx of 2022.
EAGER_CONTEXT_VOLTA_BYTES = 1_408_000_000
# What cuBLAS works in before Hopper, 8,320 KiB, and cublasLt, 1 MiB: aten/src/ATen/cuda/CublasHandlePool.cpp.
SMALL_WORKSPACE_BYTES = (8320 + 1024) * 2**10

# Transformer Engine has one of its own, by whether the device is Hopper or later: transformer_engine/pytorch/module/
# base.py, get_cublas_workspace_size_bytes.
ENGINE_WORKSPACE_BYTES = {False: 4 * 2**20, True: 32 * 2**20}

# The tables of the detection libraries are of torch 1.3 to 1.8 (facebookresearch/detectron2 MODEL_ZOO.md,
# open-mmlab/mmdetection docs/model_zoo.md).
_EARLY = re.compile(r"torch ?1\.\d|lightning 1\.\d|\b20(?:19|2[0-2])\b|detectron2|\bmm(?:det|seg)\b")

_BEFORE_2023 = re.compile(r"\b20(?:19|2[0-2])")
_SINCE_2023 = re.compile(r"\b202[3-9]")

# Until 1.11 of March 2022 softmax saved its input as well as its result: pytorch/pytorch, pull request 66018.
_BEFORE_1_11 = re.compile(r"torch ?1\.(?:\d|10)\b|lightning 1\.[0-5]\b|\b20(?:19|20|21)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What is there before the first tensor is, and how tensors are put down."""

    on_volta: bool = False
    on_hopper: bool = False  # or later
    is_old: bool = False  # from before 2023: CUDA loads all modules at start, Megatron keeps fp32 copies of gradients
    keeps_gradients: bool = False  # from one step to the next: zero_grad filled them with zeros until torch 2.0
    before_torch_1_11: bool = False  # of March 2022
    apex_unfused: bool = False  # DeepSpeed steps tensor by tensor, as it knew no optimizer of apex's
    transformer_engine: bool = False
    expandable_segments: bool = False

    @property
    def context_bytes(self) -> int:
        """What CUDA has on the device before any tensor."""
        if not self.is_old:
            return CONTEXT_BYTES
        return EAGER_CONTEXT_VOLTA_BYTES if self.on_volta else EAGER_CONTEXT_BYTES

    @property
    def workspace_bytes(self) -> int:
        """What is allocated through torch for cuBLAS to work in; until 1.12 of 2022 cuBLAS did so itself."""
        if self.is_old:
            return 0
        own = WORKSPACE_BYTES if self.on_hopper else SMALL_WORKSPACE_BYTES
        return own + (ENGINE_WORKSPACE_BYTES[self.on_hopper] if self.transformer_engine else 0)


def platform_of(row: Row, framework: Framework) -> Platform:
    """Device and years, as far as a row says them."""
    volta = "V100" in row["gpu"]
    bloom = framework is Framework.MEGATRON_DEEPSPEED and "bloom" in row.said
    is_old = _BEFORE_2023.search(row.said) is not None or (volta and not _SINCE_2023.search(row.said)) or bloom
    return Platform(
        on_volta=volta,
        on_hopper=re.search(r"\bG?[HB][12]00|\bH20\b|\bG?B300", row["gpu"]) is not None,
        is_old=is_old,
        # torch/optim/optimizer.py and torch/nn/modules/module.py, zero_grad: set_to_none since 2.0
        keeps_gradients=_EARLY.search(row.said) is not None,
        before_torch_1_11=_BEFORE_1_11.search(row.said) is not None,
        # deepspeed/runtime/engine.py, _configure_fp16_optimizer, until 0.5.1 of August 2021
        apex_unfused=volta and is_old and "2022" not in row.said,
        transformer_engine=not is_old
        and framework is Framework.MEGATRON
        and re.search(r"nanotron|picotron", row.said) is None
        and re.search(r"\blocal\b", row.other) is None,
        expandable_segments=re.search("expandable|titan", row.said) is not None or row.is_bridge,
    )
