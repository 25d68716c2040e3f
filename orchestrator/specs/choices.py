"""What the settings of a plan can be: their values, and the degrees of parallelism. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.str_enum import StrEnum


class Engine(StrEnum):
    """Who runs the training loop: one of ours, or the user's own script."""

    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    SCRIPT = "script"


class ZeroStage(IntEnum):
    """What data-parallel ranks share instead of repeating; DeepSpeed's numbering (arXiv:1910.02054)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Sharding(StrEnum):
    """Whose ZeRO stages a script has. Those of our engines follow from the engine."""

    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"  # arXiv:2304.11277: SHARD_GRAD_OP is stage 2, FULL_SHARD stage 3


class Offload(StrEnum):
    """What lives in host memory instead of device memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"  # parameters and optimizer


class OffloadTarget(StrEnum):
    """Where offloaded tensors live; DeepSpeed's words."""

    CPU = "cpu"
    NVME = "nvme"


class ActivationCheckpointing(StrEnum):
    """Which activations are recomputed in the backward pass instead of kept."""

    NONE = "none"
    SELECTIVE = "selective"  # every layer keeps its input and what matrix products and attention returned
    FULL = "full"  # every layer keeps its input only


class Precision(StrEnum):
    """Arithmetic of the forward and backward pass."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"  # with dynamic loss scaling


class MasterWeights(StrEnum):
    """What the weights that an update changes are held in between steps, and their gradients."""

    FP32 = "fp32"
    BF16 = "bf16"  # rounded stochastically after each update, so that small changes add up (arXiv:2010.06192)


class Optimizer(StrEnum):
    """The update rule."""

    ADAMW = "adamw"  # arXiv:1711.05101
    ADAMW_8BIT = "adamw_8bit"  # the same with block-wise quantised moments (arXiv:2110.02861)
    ADAFACTOR = "adafactor"  # arXiv:1804.04235
    SGD = "sgd"  # with momentum


class Degradation(IntEnum):
    """What a change of settings may touch, mildest first."""

    EXACT = 0  # the same mathematics: layout, micro-batch, checkpointing, ZeRO, offload
    NUMERIC = 1  # the same training in other arithmetic: precision, master weights in bf16, moments in 8 bits
    SEMANTIC = 2  # another training: sequence length


AXES = ("dp", "cp", "tp", "pp")  # ranks from the slowest to the fastest: pp, dp, cp, tp


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of data, context, tensor and pipeline parallelism; their product is the number of ranks."""

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
        """Ranks that hold the same parameters before ZeRO or FSDP cuts them (Megatron-LM's name for their group)."""
        return self.dp * self.cp

    @property
    def ranks_of_a_sample(self) -> int:
        """Ranks that share what layers keep of a sample."""
        return self.cp * self.tp * self.pp

    def dp_rank(self, rank: int) -> int:
        """Return the number of the share of the global batch that the rank trains on."""
        return rank // (self.cp * self.tp) % self.dp


class Micro(StrEnum):
    """Micro-batch of compared strategies that leave it open."""

    COMMON = "common"  # the largest with which all of them fit
    BEST = "best"  # of the fastest plan of each
