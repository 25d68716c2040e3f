"""A plan: how one job is cut over devices. Standard library only, since training processes read it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.specs.choices import (
    AXES,
    ActivationCheckpointing,
    Degradation,
    Engine,
    MasterWeights,
    Offload,
    OffloadTarget,
    Optimizer,
    ParallelLayout,
    Precision,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.errors import IllegalPlan


def _declared(
    degradation: Degradation,
    *,
    short: Callable[[Plan], Sequence[str]] | None = None,
    rows: Callable[[Plan], dict[str, str]] | None = None,
    cheaper: tuple[Any, ...] = (),
    is_given: bool = True,
    alias: str = "",
    least: int = 1,
) -> dict[str, Any]:
    """What is declared of a field of `Plan` beside its type and default; `Setting` describes each part."""
    said = {
        "degradation": degradation,
        "short": short,
        "rows": rows,
        "cheaper": cheaper,
        "is_given": is_given,
        "alias": alias,
        "least": least,
    }
    return {"setting": said}  # under a key of its own, since pydantic reads keys such as `alias` as its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One legal way to run a job. An illegal combination raises IllegalPlan and is never constructed.

    Each field declares its setting: planning, `orc estimate --set`, records and job files read SETTINGS.
    """

    engine: Engine = field(metadata=_declared(Degradation.EXACT))
    layout: ParallelLayout = field(
        default=ParallelLayout(),
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _layout_in_short(plan),
            rows=lambda plan: _layout_in_rows(plan),
        ),
    )
    # Copies of the shards: hybrid sharding cuts over dp / dp_replicate ranks.
    dp_replicate: int = field(default=1, metadata=_declared(Degradation.EXACT))
    # So many data-parallel ranks hold other experts of every layer: like `dp_replicate` it adds no ranks.
    expert_parallel: int = field(
        default=1,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _where(f"ep{plan.expert_parallel}", plan.expert_parallel > 1),
            rows=lambda plan: {"expert_parallel": str(plan.expert_parallel)} if plan.expert_parallel > 1 else {},
            alias="ep",
        ),
    )
    # 1: 1F1B; more: interleaved 1F1B (arXiv:2104.04473, section 2.2).
    pipeline_stages_per_rank: int = field(
        default=1,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _where(
                f"{plan.pipeline_stages_per_rank} stages a rank", plan.pipeline_stages_per_rank > 1
            ),
        ),
    )
    # Layers of the first and of the last pipeline stage, which have embedding and head beside; 0: an even share.
    first_stage_layers: int = field(
        default=0,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _end_in_short(plan.first_stage_layers, "first"),
            rows=lambda plan: _row_where("first_stage_layers", plan.first_stage_layers),
            least=0,
        ),
    )
    last_stage_layers: int = field(
        default=0,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _end_in_short(plan.last_stage_layers, "last"),
            rows=lambda plan: _row_where("last_stage_layers", plan.last_stage_layers),
            least=0,
        ),
    )
    zero_stage: ZeroStage = field(
        default=ZeroStage.NONE, metadata=_declared(Degradation.EXACT, short=lambda plan: _sharding_in_short(plan))
    )
    micro_batch_size: int = field(
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: [f"micro {plan.micro_batch_size}x{plan.gradient_accumulation_steps}"],
            alias="micro_batch",
        )
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata=_declared(Degradation.EXACT, alias="gradient_accumulation")
    )
    activation_checkpointing: ActivationCheckpointing = field(
        default=ActivationCheckpointing.NONE,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: {
                ActivationCheckpointing.NONE: [],
                ActivationCheckpointing.SELECTIVE: ["selective checkpointing"],
                ActivationCheckpointing.FULL: ["checkpointing"],
            }[plan.activation_checkpointing],
        ),
    )
    # The first so many layers of every pipeline stage keep their input only: of selective checkpointing, or of a
    # script's layers that keep everything else.
    full_checkpointing_layers: int = field(
        default=0,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _partial_in_short(plan),
            rows=lambda plan: _row_where("full_checkpointing_layers", plan.full_checkpointing_layers),
            least=0,
        ),
    )
    # Whether what full checkpointing keeps, the layers' inputs, waits in host memory.
    activation_offload: bool = field(
        default=False,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _where("layers' inputs on host", plan.activation_offload),
            rows=lambda plan: {"activation_offload": "true"} if plan.activation_offload else {},
        ),
    )
    offload: Offload = field(
        default=Offload.NONE,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _where(
                f"{plan.offload} on {'host' if plan.offload_target is OffloadTarget.CPU else 'NVMe'}",
                plan.offload is not Offload.NONE,
            ),
        ),
    )
    offload_target: OffloadTarget = field(default=OffloadTarget.CPU, metadata=_declared(Degradation.EXACT))
    precision: Precision = field(
        default=Precision.FP32,
        metadata=_declared(
            Degradation.NUMERIC,
            short=lambda plan: _where(plan.precision, plan.precision is not Precision.FP32),
            cheaper=(Precision.BF16, Precision.FP16),
        ),
    )
    optimizer: Optimizer = field(
        default=Optimizer.ADAMW,
        metadata=_declared(
            Degradation.NUMERIC,
            short=lambda plan: _where(plan.optimizer, plan.optimizer is not Optimizer.ADAMW),
            cheaper=(Optimizer.ADAMW_8BIT,),
            is_given=False,
        ),
    )
    master_weights: MasterWeights = field(
        default=MasterWeights.FP32,
        metadata=_declared(
            Degradation.NUMERIC,
            short=lambda plan: _where("master weights in bf16", plan.master_weights is MasterWeights.BF16),
            rows=lambda plan: {"master_weights": "bf16"} if plan.master_weights is MasterWeights.BF16 else {},
            cheaper=(MasterWeights.BF16,),
        ),
    )
    # Whether each parameter is updated, and its gradient let go, as soon as that is whole.
    optimizer_in_backward: bool = field(
        default=False,
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: _where("optimizer in backward", plan.optimizer_in_backward),
            rows=lambda plan: {"optimizer_in_backward": "true"} if plan.optimizer_in_backward else {},
        ),
    )
    # Of a script's ZeRO stages; ours follow from the engine.
    sharding: Sharding = field(
        default=Sharding.DEEPSPEED,
        metadata=_declared(
            Degradation.EXACT,
            rows=lambda plan: {"sharding": plan.sharding.value} if plan.sharding is Sharding.FSDP else {},
            is_given=False,
        ),
    )
    # Of a script: (phase, samples) of the phases outside training whose batch size was lowered.
    phase_batch_sizes: tuple[tuple[str, int], ...] = field(
        default=(),
        metadata=_declared(
            Degradation.EXACT,
            short=lambda plan: [f"{phase} {samples}" for phase, samples in plan.phase_batch_sizes],
            rows=lambda plan: {f"{phase}_batch_size": str(samples) for phase, samples in plan.phase_batch_sizes},
            is_given=False,
        ),
    )
    # Tokens per sample; None where a script keeps its own.
    sequence_length: int | None = field(
        default=None,
        metadata=_declared(
            Degradation.SEMANTIC,
            rows=lambda plan: {} if plan.sequence_length is None else {"sequence_length": str(plan.sequence_length)},
        ),
    )

    def __post_init__(self) -> None:
        reason = self._why_illegal()
        if reason:
            raise IllegalPlan(reason)

    def _why_illegal(self) -> str | None:
        if min(self.micro_batch_size, self.gradient_accumulation_steps, self.pipeline_stages_per_rank) < 1:
            return "micro_batch_size, gradient_accumulation_steps and pipeline_stages_per_rank are at least 1"
        if min(self.full_checkpointing_layers, self.first_stage_layers, self.last_stage_layers) < 0:
            return "full_checkpointing_layers, first_stage_layers and last_stage_layers are at least 0"
        others = ActivationCheckpointing.NONE if self.engine is Engine.SCRIPT else ActivationCheckpointing.SELECTIVE
        if self.full_checkpointing_layers and self.activation_checkpointing is not others:
            return f"full_checkpointing_layers > 0 needs activation_checkpointing={others}, which the other layers have"
        if self.activation_offload and self.activation_checkpointing is not ActivationCheckpointing.FULL:
            return "activation_offload=true needs activation_checkpointing=full: it moves the inputs of all layers"
        if self.activation_offload and self.engine is Engine.SCRIPT:
            return "activation_offload=true is for our engines: nothing tells a script to move its layers' inputs"
        if self.offload is Offload.OPTIMIZER and self.zero_stage is ZeroStage.NONE:
            return "offload=optimizer needs zero_stage >= 1 (deepspeed/runtime/zero/offload_config.py)"
        if self.offload is Offload.PARAMETERS and self.zero_stage is not ZeroStage.PARAMETERS:
            return "offload=parameters needs zero_stage=3 (deepspeed/runtime/zero/offload_config.py)"
        sharded_offload = self.offload is not Offload.NONE and self.zero_stage is ZeroStage.PARAMETERS
        if self.offload_target is OffloadTarget.NVME and not sharded_offload:
            return "offload_target=nvme needs an offload and zero_stage=3 (deepspeed/runtime/zero/offload_config.py)"
        if self.engine is not Engine.SCRIPT and (self.sharding is not Sharding.DEEPSPEED or self.phase_batch_sizes):
            return "sharding and phase_batch_sizes are a script's"
        reason = (
            self._why_layout_is_illegal()
            or self._why_no_expert_parallel()
            or self._why_not_in_backward()
            or self._why_not_in_bf16()
        )
        if reason is None and self.engine is Engine.TORCH:
            reason = self._why_illegal_for_torch()
        if reason is None and self.engine is Engine.DEEPSPEED:
            reason = self._why_illegal_for_deepspeed()
        if reason is None and self.engine is Engine.SCRIPT:
            reason = self._why_illegal_for_script()
        return reason

    def _why_layout_is_illegal(self) -> str | None:
        layout = self.layout
        if self.dp_replicate > 1:
            if self.zero_stage < ZeroStage.GRADIENTS or self.engine is not Engine.TORCH:
                return "dp_replicate > 1 is hybrid sharding: engine=torch with zero_stage 2 or 3"
            if layout.dp % self.dp_replicate or layout.dp == self.dp_replicate:
                return f"dp_replicate={self.dp_replicate} leaves no equal shards of dp={layout.dp}"
        if layout.cp > 1 and self.engine is not Engine.TORCH:
            return f"cp > 1 is engine=torch's: no one tells engine={self.engine} to share a sample's tokens"
        if layout.cp > 1 and (self.sequence_length or 0) % layout.cp:
            return f"cp={layout.cp} does not divide sequence_length={self.sequence_length}"
        if layout.pp == 1 and self.pipeline_stages_per_rank > 1:
            return "pipeline_stages_per_rank > 1 needs pp > 1"
        if layout.pp == 1 and (self.first_stage_layers or self.last_stage_layers):
            return "first_stage_layers and last_stage_layers need pp > 1"
        if layout.pp > 1:
            if self.zero_stage is ZeroStage.PARAMETERS:
                return (
                    "zero_stage=3 with pp > 1 would gather every layer again for every micro-batch in flight; "
                    "zero_stage=2 keeps what it gathers"
                )
            return why_pipeline_stalls(layout.pp, self.pipeline_stages_per_rank, self.gradient_accumulation_steps)
        return None

    def _why_not_in_backward(self) -> str | None:
        if not self.optimizer_in_backward:
            return None
        if self.engine is Engine.DEEPSPEED or (self.engine is Engine.SCRIPT and self._is_by_deepspeed):
            return (
                "optimizer_in_backward=true is not for DeepSpeed, which updates flat pieces of all parameters at once"
            )
        if self.gradient_accumulation_steps > 1:
            return (
                "optimizer_in_backward=true needs gradient_accumulation_steps=1: else the first gradients are not whole"
            )
        if self.precision is Precision.FP16:
            return "optimizer_in_backward=true needs fp32 or bf16: fp16 looks for overflows in all gradients first"
        if self.layout.dp_cp > 1 and self.zero_stage is ZeroStage.NONE:
            return (
                "optimizer_in_backward=true with dp x cp > 1 needs zero_stage 2 or 3: "
                "DistributedDataParallel's buckets hold all gradients to the end"
            )
        if self.dp_replicate > 1:
            return "optimizer_in_backward=true needs dp_replicate=1: hybrid sharding keeps what it reduces to the end"
        if self.offload is not Offload.NONE:
            return "optimizer_in_backward=true needs offload=none: gradients are in host memory already"
        return None

    def _why_no_expert_parallel(self) -> str | None:
        if self.expert_parallel == 1:
            return None
        if self.expert_parallel < 1:
            return f"expert_parallel={self.expert_parallel}: a parallel degree is at least 1"
        layout = self.layout
        if self.engine is not Engine.TORCH or self.zero_stage < ZeroStage.GRADIENTS:
            return "expert_parallel > 1 is FSDP2's: engine=torch with zero_stage 2 or 3"
        if layout.dp % self.expert_parallel:
            return f"expert_parallel={self.expert_parallel} does not divide dp={layout.dp}, whose ranks it spreads over"
        if max(layout.cp, layout.tp, layout.pp) > 1:
            return "expert_parallel > 1 needs cp=tp=pp=1: tokens are sent between data-parallel ranks only"
        if self.dp_replicate > 1:
            return "expert_parallel > 1 needs dp_replicate=1: experts have other copies than the rest of a layer"
        if self.offload is not Offload.NONE:
            return "expert_parallel > 1 needs offload=none: ranks that hold other experts need no host memory for them"
        if self.optimizer_in_backward:
            return "expert_parallel > 1 needs optimizer_in_backward=false: experts' gradients are averaged after a step"
        return None

    def _why_not_in_bf16(self) -> str | None:
        if self.master_weights is MasterWeights.FP32:
            return None
        if self.engine is not Engine.TORCH:
            return "master_weights=bf16 is for engine=torch: DeepSpeed and scripts keep weights of their own"
        if self.precision is not Precision.BF16:
            return "master_weights=bf16 needs precision=bf16: what computes in more has to be held in more"
        if self.optimizer is not Optimizer.ADAMW_8BIT:
            return "master_weights=bf16 needs optimizer=adamw_8bit: other updates round small changes of weights away"
        return None

    @property
    def _is_by_deepspeed(self) -> bool:
        return self.zero_stage is not ZeroStage.NONE and self.sharding is Sharding.DEEPSPEED

    def _why_illegal_for_torch(self) -> str | None:
        if self.zero_stage is ZeroStage.OPTIMIZER and self.layout.pp > 1:
            return "zero_stage=1 with pp > 1 is zero_stage=2: a pipeline reduces gradients once a step"
        if self.zero_stage is ZeroStage.OPTIMIZER and self.gradient_accumulation_steps == 1:
            return "zero_stage=1 with gradient_accumulation_steps=1 is zero_stage=2 on engine=torch"
        if self.offload is Offload.OPTIMIZER:
            return "engine=torch offloads parameters and optimizer together (offload=parameters)"
        if self.offload_target is OffloadTarget.NVME:
            return "engine=torch offloads to host memory only; offload_target=nvme is DeepSpeed's"
        if self.layout.tp > 1 and self.layout.dp_cp > 1 and self.zero_stage is ZeroStage.NONE:
            return "tp > 1 with dp x cp > 1 needs zero_stage 2 or 3: DistributedDataParallel does not take DTensors"
        if self.optimizer is Optimizer.ADAMW_8BIT and self.offload is not Offload.NONE:
            return "optimizer=adamw_8bit needs offload=none: its update is compiled for the device"
        if self.optimizer is Optimizer.ADAFACTOR and (self.zero_stage is not ZeroStage.NONE or self.layout.tp > 1):
            return (
                "optimizer=adafactor factors whole matrices, and torch.optim.Adafactor refuses DTensors: "
                "engine=torch with zero_stage=0 and tp=1"
            )
        return None

    def _why_illegal_for_deepspeed(self) -> str | None:
        if self.layout.tp > 1 or self.layout.pp > 1:
            return "engine=deepspeed runs data parallel only (tp=pp=1): its other layouts keep no canonical checkpoint"
        if self.precision is not Precision.FP32 and self.zero_stage is ZeroStage.NONE:
            return f"engine=deepspeed with {self.precision} needs zero_stage >= 1: stage 0 is off the curve by 1e-2"
        if self.optimizer is Optimizer.ADAFACTOR and self.zero_stage is not ZeroStage.NONE:
            return "optimizer=adafactor factors whole matrices; DeepSpeed's stages 1 to 3 hold flat pieces of them"
        if self.optimizer is Optimizer.ADAMW_8BIT:
            return "optimizer=adamw_8bit is torchao's, whose shards are DTensors: engine=torch"
        return None

    def _why_illegal_for_script(self) -> str | None:
        if self.layout.pp > 1:
            return "engine=script runs no pipeline (pp=1): nothing tells a script how to cut its model"
        if self.offload_target is OffloadTarget.NVME:
            return "engine=script offloads to host memory only: no one removes the files that a script leaves"
        if self.sharding is Sharding.FSDP and self.zero_stage is ZeroStage.OPTIMIZER:
            return "FSDP shards gradients and optimizer (zero_stage=2) or all (3); stage 1 is DeepSpeed's"
        if self.sharding is Sharding.FSDP and self.offload is not Offload.NONE:
            return "a script's FSDP is not asked to offload: DeepSpeed is (sharding=deepspeed)"
        if self.optimizer in (Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT) and self.zero_stage is not ZeroStage.NONE:
            return f"optimizer={self.optimizer} works on whole tensors; a script's ZeRO stages hold flat pieces of them"
        return None

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step; no function may change it."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.layout.dp

    @property
    def world_size(self) -> int:
        return self.layout.world_size


def why_pipeline_stalls(pp: int, stages_per_rank: int, micro_batches: int) -> str | None:
    """Why a step of so many micro-batches cannot keep every stage at work, as a sentence; None where it can."""
    if micro_batches < pp:
        return f"{micro_batches} micro-batches cannot fill a pipeline of {pp} ranks: gradient_accumulation_steps >= pp"
    if stages_per_rank > 1 and micro_batches % (micro_batches // pp):
        return (
            f"{micro_batches} micro-batches cannot go in {micro_batches // pp} equal rounds through a pipeline of {pp} "
            "ranks: interleaved stages need gradient_accumulation_steps divisible by gradient_accumulation_steps // pp"
        )
    return None


def share_heads(heads: int, kv_heads: int, layout: ParallelLayout) -> bool:
    """Whether context-parallel ranks can share the heads that a tensor-parallel rank has.

    Each has as many queries. Of keys and values each has as many, or as many ranks have each of them.
    """
    own, kv = heads // layout.tp, kv_heads // layout.tp
    if heads % layout.tp or kv_heads % layout.tp or own % layout.cp:
        return False
    return kv % layout.cp == 0 or layout.cp % kv == 0


def _where(words: str, is_said: bool) -> list[str]:
    return [words] if is_said else []


def _layout_in_short(plan: Plan) -> list[str]:
    layout = plan.layout
    words = [f"{plan.world_size} gpu{'s' if plan.world_size > 1 else ''}", f"dp{layout.dp}"]
    return words + [f"{axis}{getattr(layout, axis)}" for axis in AXES[1:] if getattr(layout, axis) > 1]


def _layout_in_rows(plan: Plan) -> dict[str, str]:
    degrees = {axis: getattr(plan.layout, axis) for axis in AXES}
    told = {axis: str(degree) for axis, degree in degrees.items() if axis != "cp" or degree > 1}
    return {"gpus": str(plan.world_size)} | told


def _end_in_short(layers: int, end: str) -> list[str]:
    return _where(f"{layers} layer{'s' if layers > 1 else ''} {end}", layers > 0)


def _row_where(name: str, number: int) -> dict[str, str]:
    return {name: str(number)} if number else {}


def _partial_in_short(plan: Plan) -> list[str]:
    layers, stages = plan.full_checkpointing_layers, plan.layout.pp * plan.pipeline_stages_per_rank
    words = f"full in {layers} layer{'s' if layers > 1 else ''}{' a stage' if stages > 1 else ''}"
    return _where(words, layers > 0)


def _sharding_in_short(plan: Plan) -> list[str]:
    if plan.engine is Engine.TORCH:
        if plan.zero_stage is ZeroStage.NONE:
            return ["DDP"] if plan.layout.dp_cp > 1 or plan.world_size == 1 else []
        kept = {
            ZeroStage.OPTIMIZER: ["reduced once a step"],
            ZeroStage.GRADIENTS: ["weights kept gathered"],
            ZeroStage.PARAMETERS: [],
        }[plan.zero_stage]
        return [f"HSDP x{plan.dp_replicate}" if plan.dp_replicate > 1 else "FSDP2", *kept]
    if plan.engine is Engine.SCRIPT and plan.zero_stage is ZeroStage.NONE:
        return []
    if plan.sharding is Sharding.FSDP:
        return ["FSDP", *([] if plan.zero_stage is ZeroStage.PARAMETERS else ["weights kept gathered"])]
    return [f"ZeRO-{int(plan.zero_stage)}"]
