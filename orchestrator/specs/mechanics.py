"""How the ranks of a plan shard or replicate training state. Code for memory, cost and legality matches on every case.

Standard library only, since training processes read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from orchestrator.specs.choices import Engine, Sharding, ZeroStage
from orchestrator.specs.errors import refuse_unknown


@dataclass(frozen=True, slots=True)
class Replicated:
    """Unsharded state: every rank holds its part of the model whole; DistributedDataParallel if several share it."""

    ranks: int  # that hold the same part; 1: alone, without buckets
    # whether our loop wraps it: gradients are views of the buckets, and updated one by one
    is_ours: bool
    shards: ClassVar[int] = 1
    stage: ClassVar[ZeroStage] = ZeroStage.NONE
    # In low precision: weights stay in the masters' type and are cast where they are used; else
    # they are cast ahead.
    autocasts: ClassVar[bool] = True
    # else the optimizer's states have the type of the weights
    has_fp32_states: ClassVar[bool] = False
    talks_alone: ClassVar[bool] = False  # whether one rank alone has a communicator, too


@dataclass(frozen=True, slots=True)
class _Units:
    shards: int
    # OPTIMIZER: gathered and reduced once a step; GRADIENTS: gathered once a micro-batch
    stage: ZeroStage
    autocasts: ClassVar[bool] = False
    talks_alone: ClassVar[bool] = True

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay gathered between their forward and backward pass."""
        return self.stage is not ZeroStage.PARAMETERS

    @property
    def once_a_step(self) -> bool:
        """Whether a step gathers weights only for its first micro-batch and reduces gradients only
        after its last.
        """
        return self.stage is ZeroStage.OPTIMIZER


@dataclass(frozen=True, slots=True)
class Fsdp2(_Units):
    """State sharded by torch's `fully_shard`, each layer separately (arXiv:2304.11277). `copies` above 1 is HSDP."""

    copies: int
    # then everything is gathered once a step, and reduced behind the last micro-batch
    is_pipelined: bool
    has_fp32_states: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ScriptFsdp(_Units):
    """State sharded by FSDP in a user's script: SHARD_GRAD_OP (stage 2) or FULL_SHARD (stage 3)."""

    copies: ClassVar[int] = 1
    is_pipelined: ClassVar[bool] = False
    has_fp32_states: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Zero:
    """DeepSpeed's ZeRO (arXiv:1910.02054), in our engine or in a user's script: the stage says what is sharded.

    Stage 0 shards nothing.
    """

    shards: int
    stage: ZeroStage
    autocasts: ClassVar[bool] = False
    talks_alone: ClassVar[bool] = True

    @property
    def has_fp32_states(self) -> bool:
        """Whether fp32 master weights exist, which stages 1 to 3 make."""
        return self.stage is not ZeroStage.NONE


Fsdp = Fsdp2 | ScriptFsdp
Mechanics = Replicated | Fsdp | Zero


@lru_cache(maxsize=4096)
def find_mechanics(
    engine: Engine,
    zero_stage: ZeroStage,
    sharding: Sharding,
    sharing_ranks: int,
    copies: int,
    is_pipelined: bool,
) -> Mechanics:
    """Return how these settings shard the state, even if illegal. Raises AssertionError for an
    unknown engine.

    `sharing_ranks` is the number of ranks that would hold the same parameters without sharding.
    """
    is_whole = zero_stage is ZeroStage.NONE
    match engine:
        case Engine.TORCH:
            return (
                Replicated(sharing_ranks, True)
                if is_whole
                else Fsdp2(sharing_ranks // copies, zero_stage, copies, is_pipelined)
            )
        case Engine.DEEPSPEED:
            return Zero(1 if is_whole else sharing_ranks, zero_stage)
        case Engine.SCRIPT:
            if is_whole:
                return Replicated(sharing_ranks, False)
            return (
                ScriptFsdp(sharing_ranks, zero_stage)
                if sharding is Sharding.FSDP
                else Zero(sharing_ranks, zero_stage)
            )
        case _:
            refuse_unknown(engine)
