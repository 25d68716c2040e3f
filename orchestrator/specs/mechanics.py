"""How the ranks of a plan share its state. Memory, cost, legality and rendering match on every case.

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
    """Every rank holds its part of the model whole: DistributedDataParallel where several hold the same part."""

    ranks: int  # that hold the same part; 1: alone, without buckets
    is_ours: bool  # whether our loop wraps it: gradients are views of the buckets, and updated one by one
    shards: ClassVar[int] = 1
    stage: ClassVar[ZeroStage] = ZeroStage.NONE
    # In low precision: weights stay in the masters' type and are cast where they are used; else they are cast ahead.
    autocasts: ClassVar[bool] = True
    has_fp32_states: ClassVar[bool] = False  # else the optimizer's states have the type of the weights
    talks_alone: ClassVar[bool] = False  # whether one rank alone has a communicator, too


@dataclass(frozen=True, slots=True)
class _Units:
    shards: int
    stage: ZeroStage  # OPTIMIZER: gathered and reduced once a step; GRADIENTS: gathered once a micro-batch
    autocasts: ClassVar[bool] = False
    talks_alone: ClassVar[bool] = True

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay gathered from their forward to their backward pass."""
        return self.stage is not ZeroStage.PARAMETERS

    @property
    def once_a_step(self) -> bool:
        """Whether only the first micro-batch gathers and only the last one reduces."""
        return self.stage is ZeroStage.OPTIMIZER


@dataclass(frozen=True, slots=True)
class Fsdp2(_Units):
    """Shards of torch's `fully_shard`, every layer a unit of its own (arXiv:2304.11277); several copies are HSDP."""

    copies: int
    is_pipelined: bool  # then everything is gathered once a step, and reduced behind the last micro-batch
    has_fp32_states: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ScriptFsdp(_Units):
    """Shards of the FSDP that a script asks its framework for: SHARD_GRAD_OP (stage 2) or FULL_SHARD (3)."""

    copies: ClassVar[int] = 1
    is_pipelined: ClassVar[bool] = False
    has_fp32_states: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Zero:
    """DeepSpeed's flat pieces (arXiv:1910.02054), in our loop or in a script's; at stage 0 all is whole."""

    shards: int
    stage: ZeroStage
    autocasts: ClassVar[bool] = False
    talks_alone: ClassVar[bool] = True

    @property
    def has_fp32_states(self) -> bool:
        """Whether there are fp32 masters, which stages 1 to 3 make."""
        return self.stage is not ZeroStage.NONE


Fsdp = Fsdp2 | ScriptFsdp
Mechanics = Replicated | Fsdp | Zero


@lru_cache(maxsize=4096)
def mechanics_of(
    engine: Engine, zero_stage: ZeroStage, sharding: Sharding, ranks: int, copies: int, is_pipelined: bool
) -> Mechanics:
    """Return what these settings mean, legal or not; `ranks` would hold the same part if nothing was cut.

    Raises AssertionError for an engine that says nothing here.
    """
    is_whole = zero_stage is ZeroStage.NONE
    match engine:
        case Engine.TORCH:
            return Replicated(ranks, True) if is_whole else Fsdp2(ranks // copies, zero_stage, copies, is_pipelined)
        case Engine.DEEPSPEED:
            return Zero(1 if is_whole else ranks, zero_stage)
        case Engine.SCRIPT:
            if is_whole:
                return Replicated(ranks, False)
            return ScriptFsdp(ranks, zero_stage) if sharding is Sharding.FSDP else Zero(ranks, zero_stage)
        case _:
            refuse_unknown(engine)
