"""A plan: how one job is cut over devices. Standard library only, since training processes read it too."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from orchestrator.specs.errors import IllegalPlan


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


class Offload(StrEnum):
    """What lives in host memory instead of device memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"  # parameters and optimizer


class ActivationCheckpointing(StrEnum):
    """Which activations are recomputed in the backward pass instead of kept."""

    NONE = "none"
    FULL = "full"  # every layer keeps its input only


class Precision(StrEnum):
    """Arithmetic of the forward and backward pass; master weights are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"


class Degradation(IntEnum):
    """What a change of settings may touch, mildest first."""

    EXACT = 0  # the same mathematics: layout, micro-batch, checkpointing, ZeRO, offload
    NUMERIC = 1  # the same training in other arithmetic: precision
    SEMANTIC = 2  # another training: sequence length


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of data, tensor and pipeline parallelism; their product is the number of ranks."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "tp", "pp"):
            if getattr(self, axis) < 1:
                raise IllegalPlan(f"{axis}={getattr(self, axis)}: a parallel degree is at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One legal way to run a job. An illegal combination raises IllegalPlan and is never constructed."""

    engine: Engine
    layout: ParallelLayout = ParallelLayout()
    zero_stage: ZeroStage = ZeroStage.NONE
    offload: Offload = Offload.NONE
    micro_batch_size: int
    gradient_accumulation_steps: int = 1
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    precision: Precision = Precision.FP32
    sequence_length: int | None = None  # tokens per sample; None where a script keeps its own

    def __post_init__(self) -> None:
        reason = self._why_illegal()
        if reason:
            raise IllegalPlan(reason)

    def _why_illegal(self) -> str | None:
        if self.micro_batch_size < 1 or self.gradient_accumulation_steps < 1:
            return "micro_batch_size and gradient_accumulation_steps are at least 1"
        if self.offload is Offload.OPTIMIZER and self.zero_stage is ZeroStage.NONE:
            return "offload=optimizer needs zero_stage >= 1 (deepspeed/runtime/zero/offload_config.py)"
        if self.offload is Offload.PARAMETERS and self.zero_stage is not ZeroStage.PARAMETERS:
            return "offload=parameters needs zero_stage=3 (deepspeed/runtime/zero/offload_config.py)"
        if self.engine is Engine.TORCH:
            if self.zero_stage not in (ZeroStage.NONE, ZeroStage.PARAMETERS):
                return "engine=torch shards with FSDP2 (zero_stage=3) or not at all (0); stages 1, 2 are DeepSpeed's"
            if self.offload is Offload.OPTIMIZER:
                return "engine=torch offloads parameters and optimizer together (offload=parameters)"
        if self.engine is Engine.DEEPSPEED:
            if self.layout.tp > 1 or self.layout.pp > 1:
                return "engine=deepspeed runs data parallel only (tp=pp=1)"
            if self.precision is Precision.BF16 and self.zero_stage is ZeroStage.NONE:
                return "engine=deepspeed with bf16 needs zero_stage >= 1: stage 0 leaves the fp32 curve by 1e-2"
        return None

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step; no function may change it."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.layout.dp

    @property
    def world_size(self) -> int:
        return self.layout.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that differs between two plans, as people read it."""

    setting: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.setting} {self.before} -> {self.after}"


def settings(plan: Plan) -> dict[str, str]:
    """The plan flattened to `setting: value` text, in the order in which people read it."""
    flat: dict[str, str] = {"engine": plan.engine, "gpus": str(plan.world_size)}
    flat |= {axis: str(degree) for axis, degree in dataclasses.asdict(plan.layout).items()}
    flat |= {
        "zero_stage": str(int(plan.zero_stage)),
        "offload": plan.offload,
        "micro_batch_size": str(plan.micro_batch_size),
        "gradient_accumulation_steps": str(plan.gradient_accumulation_steps),
        "activation_checkpointing": plan.activation_checkpointing,
        "precision": plan.precision,
        "global_batch_size": str(plan.global_batch_size),
    }
    return flat if plan.sequence_length is None else flat | {"sequence_length": str(plan.sequence_length)}


def changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Every setting in which two plans differ; empty where they are equal."""
    old, new = settings(before), settings(after)
    return tuple(
        Change(setting=name, before=old.get(name, "-"), after=new.get(name, "-"))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    )


def in_short(plan: Plan) -> str:
    """The plan in a line: `2 gpus · dp2 · ZeRO-3 · micro 4x2 · checkpointing`."""
    layout = plan.layout
    words = [f"{plan.world_size} gpu{'s' if plan.world_size > 1 else ''}", f"dp{layout.dp}"]
    words += [f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp") if getattr(layout, axis) > 1]
    words += _sharding(plan)
    words.append(f"micro {plan.micro_batch_size}x{plan.gradient_accumulation_steps}")
    if plan.activation_checkpointing is not ActivationCheckpointing.NONE:
        words.append("checkpointing")
    if plan.offload is not Offload.NONE:
        words.append(f"{plan.offload} on host")
    if plan.precision is not Precision.FP32:
        words.append(plan.precision)
    return " · ".join(words)


def _sharding(plan: Plan) -> list[str]:
    if plan.engine is Engine.TORCH:
        return ["FSDP2" if plan.zero_stage is ZeroStage.PARAMETERS else "DDP"]
    if plan.engine is Engine.SCRIPT and plan.zero_stage is ZeroStage.NONE:
        return []
    return [f"ZeRO-{int(plan.zero_stage)}"]
