"""Allowed values of a plan's settings, and its degrees of parallelism. Standard library only."""

from __future__ import annotations

from enum import IntEnum

from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.frozen import frozen
from orchestrator.specs.str_enum import StrEnum


class Engine(StrEnum):
    """The program that runs the training loop: one of our engines, or the user's own script."""

    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    SCRIPT = "script"


class ZeroStage(IntEnum):
    """State that data-parallel ranks shard instead of replicating, numbered as in DeepSpeed (arXiv:1910.02054)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Sharding(StrEnum):
    """The library that implements ZeRO stages in a user's script. Our engines imply theirs."""

    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"  # arXiv:2304.11277: SHARD_GRAD_OP is stage 2, FULL_SHARD stage 3


class Offload(StrEnum):
    """The training state that lives in host memory instead of device memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"  # parameters and optimizer


class OffloadTarget(StrEnum):
    """The storage of offloaded tensors, named as in DeepSpeed."""

    CPU = "cpu"
    NVME = "nvme"


class ActivationCheckpointing(StrEnum):
    """Which activations the backward pass recomputes instead of keeping them."""

    NONE = "none"
    # every layer keeps its input and what matrix products and attention returned
    SELECTIVE = "selective"
    FULL = "full"  # every layer keeps its input only


class Precision(StrEnum):
    """The dtype in which the forward and backward pass compute."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"  # with dynamic loss scaling

    @property
    def value_bytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is Precision.FP32 else 2


class MasterWeights(StrEnum):
    """The dtype of the weights that the optimizer updates, and of their gradients."""

    FP32 = "fp32"
    # rounded stochastically after each update, so that small changes add up (arXiv:2010.06192)
    BF16 = "bf16"


class Optimizer(StrEnum):
    """The optimizer's update rule."""

    ADAMW = "adamw"  # arXiv:1711.05101
    ADAMW_8BIT = "adamw_8bit"  # the same with block-wise quantised moments (arXiv:2110.02861)
    ADAFACTOR = "adafactor"  # arXiv:1804.04235
    SGD = "sgd"  # with momentum


class Degradation(IntEnum):
    """How much a changed plan may alter the training, mildest first."""

    EXACT = 0  # the same mathematics: layout, micro-batch, checkpointing, ZeRO, offload
    # the same training in other arithmetic: precision, master weights in bf16, moments in 8 bits
    NUMERIC = 1
    SEMANTIC = 2  # another training: sequence length


AXES = ("dp", "cp", "tp", "pp")  # ranks from the slowest to the fastest: pp, dp, cp, tp


@frozen
class ParallelLayout:
    """Degrees of data, context, tensor and pipeline parallelism. Their product is the number of ranks."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise IllegalPlan(f"{axis}={getattr(self, axis)}: a parallel degree is at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def dp_cp(self) -> int:
        """Number of ranks with the same parameters before ZeRO or FSDP shards them (Megatron-LM's dp-cp group)."""
        return self.dp * self.cp

    @property
    def ranks_of_a_sample(self) -> int:
        """Number of ranks that split the work on one sample: cp x tp x pp."""
        return self.cp * self.tp * self.pp

    def data_parallel_index_of(self, global_rank: int) -> int:
        """Return the data-parallel index of a global rank: which part of the global batch it trains on."""
        return global_rank // (self.cp * self.tp) % self.dp


class MicroBatchChoice(StrEnum):
    """How a comparison of strategies chooses a micro-batch size where the user gives none."""

    COMMON = "common"  # the largest with which all of them fit
    BEST = "best"  # of the fastest plan of each
