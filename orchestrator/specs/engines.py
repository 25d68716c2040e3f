"""The legality rules of each engine (training loop), and its fixed properties. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    MasterWeights,
    Offload,
    OffloadTarget,
    Optimizer,
    Precision,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.errors import refuse_unknown
from orchestrator.specs.frozen import frozen
from orchestrator.specs.mechanics import Fsdp2, Replicated, ScriptFsdp, Zero
from orchestrator.specs.plan_fields import PlanFields


@frozen
class EngineFacts:
    """Fixed properties of an engine. How it shards training state is in the plan's `mechanics`."""

    is_ours: bool  # whether the training loop and its checkpoints are ours, not a script's
    why_illegal: Callable[
        [PlanFields], str | None
    ]  # returns why it cannot run a plan, as a sentence; None if it can
    shares_samples: bool  # whether it supports context parallelism
    has_bf16_masters: bool  # whether it supports `master_weights=bf16`
    has_low_gradients: bool  # whether gradients are summed and exchanged in the compute dtype
    step_factor: float  # step time relative to that of the same kernels and messages
    simplicity: int  # tie-break between equal plans: the lower number wins


def find_plan_violation(plan: PlanFields) -> str | None:
    if (
        min(plan.micro_batch_size, plan.gradient_accumulation_steps, plan.pipeline_stages_per_rank)
        < 1
    ):
        return "micro_batch_size, gradient_accumulation_steps and pipeline_stages_per_rank are at least 1"
    if min(plan.full_checkpointing_layers, plan.first_stage_layers, plan.last_stage_layers) < 0:
        return "full_checkpointing_layers, first_stage_layers and last_stage_layers are at least 0"
    engine = get_engine_facts(plan.engine)
    others = ActivationCheckpointing.SELECTIVE if engine.is_ours else ActivationCheckpointing.NONE
    if plan.full_checkpointing_layers and plan.activation_checkpointing is not others:
        return f"full_checkpointing_layers > 0 needs activation_checkpointing={others}, which the other layers have"
    if (
        plan.activation_offload
        and plan.activation_checkpointing is not ActivationCheckpointing.FULL
    ):
        return "activation_offload=true needs activation_checkpointing=full: it moves the inputs of all layers"
    if (plan.activation_offload or plan.compiled) and not engine.is_ours:
        return "activation_offload=true and compiled=true are for our engines: a script has arguments of its own"
    if plan.offload is Offload.OPTIMIZER and plan.zero_stage is ZeroStage.NONE:
        return "offload=optimizer needs zero_stage >= 1 (deepspeed/runtime/zero/offload_config.py)"
    if plan.offload is Offload.PARAMETERS and plan.zero_stage is not ZeroStage.PARAMETERS:
        return "offload=parameters needs zero_stage=3 (deepspeed/runtime/zero/offload_config.py)"
    if plan.optimizer is Optimizer.ADAMW_8BIT and plan.offload is not Offload.NONE:
        return "optimizer=adamw_8bit needs offload=none: its update runs on the device"
    sharded_offload = plan.offload is not Offload.NONE and plan.zero_stage is ZeroStage.PARAMETERS
    if plan.offload_target is OffloadTarget.NVME and not sharded_offload:
        return "offload_target=nvme needs an offload and zero_stage=3 (deepspeed/runtime/zero/offload_config.py)"
    if engine.is_ours and (plan.sharding is not Sharding.DEEPSPEED or plan.phase_batch_sizes):
        return "sharding and phase_batch_sizes are a script's"
    return (
        _find_layout_violation(plan, engine)
        or _find_expert_parallel_violation(plan)
        or _find_update_in_backward_violation(plan)
        or _find_bf16_weights_violation(plan, engine)
        or engine.why_illegal(plan)
    )


def _find_layout_violation(plan: PlanFields, engine: EngineFacts) -> str | None:
    layout = plan.layout
    if plan.dp_replicate > 1:
        if not _reduces_every_micro_batch(plan):
            return "dp_replicate > 1 is hybrid sharding: engine=torch with zero_stage 2 or 3"
        if layout.dp % plan.dp_replicate or layout.dp == plan.dp_replicate:
            return f"dp_replicate={plan.dp_replicate} leaves no equal shards of dp={layout.dp}"
    if layout.cp > 1 and not engine.shares_samples:
        return f"cp > 1 is engine=torch's: no one tells engine={plan.engine} to share a sample's tokens"
    if layout.cp > 1 and (plan.sequence_length or 0) % layout.cp:
        return f"cp={layout.cp} does not divide sequence_length={plan.sequence_length}"
    if layout.pp == 1 and plan.pipeline_stages_per_rank > 1:
        return "pipeline_stages_per_rank > 1 needs pp > 1"
    if layout.pp == 1 and (plan.first_stage_layers or plan.last_stage_layers):
        return "first_stage_layers and last_stage_layers need pp > 1"
    if layout.pp > 1:
        if plan.zero_stage is ZeroStage.PARAMETERS:
            return (
                "zero_stage=3 with pp > 1 would gather every layer again for every micro-batch in flight; "
                "zero_stage=2 keeps what it gathers"
            )
        return find_pipeline_stall(
            layout.pp, plan.pipeline_stages_per_rank, plan.gradient_accumulation_steps
        )
    return None


def _find_update_in_backward_violation(plan: PlanFields) -> str | None:
    if not plan.optimizer_in_backward:
        return None
    match plan.mechanics:
        case Zero():
            return (
                "optimizer_in_backward=true is not for DeepSpeed, "
                "which updates flat pieces of all parameters at once"
            )
        case Replicated() | Fsdp2() | ScriptFsdp():
            pass
        case _ as mechanics:
            refuse_unknown(mechanics)
    if plan.gradient_accumulation_steps > 1:
        return "optimizer_in_backward=true needs gradient_accumulation_steps=1: else the first gradients are not whole"
    if plan.precision is Precision.FP16:
        return "optimizer_in_backward=true needs fp32 or bf16: fp16 looks for overflows in all gradients first"
    if plan.layout.dp_cp > 1 and plan.zero_stage is ZeroStage.NONE:
        return (
            "optimizer_in_backward=true with dp x cp > 1 needs zero_stage 2 or 3: "
            "DistributedDataParallel's buckets hold all gradients to the end"
        )
    if plan.dp_replicate > 1:
        return "optimizer_in_backward=true needs dp_replicate=1: hybrid sharding keeps what it reduces to the end"
    if plan.offload is not Offload.NONE:
        return "optimizer_in_backward=true needs offload=none: gradients are in host memory already"
    return None


def _find_expert_parallel_violation(plan: PlanFields) -> str | None:
    if plan.expert_parallel == 1:
        return None
    if plan.expert_parallel < 1:
        return f"expert_parallel={plan.expert_parallel}: a parallel degree is at least 1"
    layout = plan.layout
    if not _reduces_every_micro_batch(plan):
        return "expert_parallel > 1 is FSDP2's: engine=torch with zero_stage 2 or 3"
    if layout.dp % plan.expert_parallel:
        return f"expert_parallel={plan.expert_parallel} does not divide dp={layout.dp}, whose ranks it spreads over"
    if max(layout.cp, layout.tp, layout.pp) > 1:
        return (
            "expert_parallel > 1 needs cp=tp=pp=1: tokens are sent between data-parallel ranks only"
        )
    if plan.dp_replicate > 1:
        return "expert_parallel > 1 needs dp_replicate=1: experts have other copies than the rest of a layer"
    if plan.offload is not Offload.NONE:
        return "expert_parallel > 1 needs offload=none: ranks that hold other experts need no host memory for them"
    if plan.optimizer_in_backward:
        return "expert_parallel > 1 needs optimizer_in_backward=false: experts' gradients are averaged after a step"
    return None


def _find_bf16_weights_violation(plan: PlanFields, engine: EngineFacts) -> str | None:
    if plan.master_weights is MasterWeights.FP32:
        return None
    if not engine.has_bf16_masters:
        return "master_weights=bf16 is for engine=torch: DeepSpeed and scripts keep weights of their own"
    if plan.precision is not Precision.BF16:
        return (
            "master_weights=bf16 needs precision=bf16: what computes in more has to be held in more"
        )
    if plan.optimizer is not Optimizer.ADAMW_8BIT:
        return "master_weights=bf16 needs optimizer=adamw_8bit: other updates round small changes of weights away"
    return None


def _reduces_every_micro_batch(plan: PlanFields) -> bool:
    """Return whether FSDP2 reduces the gradients after every micro-batch, into shards."""
    return isinstance(plan.mechanics, Fsdp2) and not plan.mechanics.once_a_step


def find_pipeline_stall(pp: int, stages_per_rank: int, micro_batches: int) -> str | None:
    """Return text on why so few micro-batches leave pipeline stages idle; None where no stage is
    idle.
    """
    if micro_batches < pp:
        return f"{micro_batches} micro-batches cannot fill a pipeline of {pp} ranks: gradient_accumulation_steps >= pp"
    if stages_per_rank > 1 and micro_batches % (micro_batches // pp):
        return (
            f"{micro_batches} micro-batches cannot go in {micro_batches // pp} equal rounds through a pipeline of {pp} "
            "ranks: interleaved stages need gradient_accumulation_steps divisible by gradient_accumulation_steps // pp"
        )
    return None


def _find_torch_violation(plan: PlanFields) -> str | None:
    if plan.zero_stage is ZeroStage.OPTIMIZER and plan.layout.pp > 1:
        return "zero_stage=1 with pp > 1 is zero_stage=2: a pipeline reduces gradients once a step"
    if plan.zero_stage is ZeroStage.OPTIMIZER and plan.gradient_accumulation_steps == 1:
        return "zero_stage=1 with gradient_accumulation_steps=1 is zero_stage=2 on engine=torch"
    if plan.offload is Offload.OPTIMIZER:
        return "engine=torch offloads parameters and optimizer together (offload=parameters)"
    if plan.offload_target is OffloadTarget.NVME:
        return "engine=torch offloads to host memory only; offload_target=nvme is DeepSpeed's"
    if plan.layout.tp > 1 and plan.layout.dp_cp > 1 and plan.zero_stage is ZeroStage.NONE:
        return "tp > 1 with dp x cp > 1 needs zero_stage 2 or 3: DistributedDataParallel does not take DTensors"
    if plan.optimizer is Optimizer.ADAFACTOR and (
        plan.zero_stage is not ZeroStage.NONE or plan.layout.tp > 1
    ):
        return (
            "optimizer=adafactor factors whole matrices, and torch.optim.Adafactor refuses DTensors: "
            "engine=torch with zero_stage=0 and tp=1"
        )
    return None


def _find_deepspeed_violation(plan: PlanFields) -> str | None:
    if plan.layout.tp > 1 or plan.layout.pp > 1:
        return "engine=deepspeed runs data parallel only (tp=pp=1): its other layouts keep no canonical checkpoint"
    if plan.precision is not Precision.FP32 and plan.zero_stage is ZeroStage.NONE:
        return f"engine=deepspeed with {plan.precision} needs zero_stage >= 1: stage 0 is off the curve by 1e-2"
    if plan.optimizer is Optimizer.ADAFACTOR and plan.zero_stage is not ZeroStage.NONE:
        return "optimizer=adafactor factors whole matrices; DeepSpeed's stages 1 to 3 hold flat pieces of them"
    if plan.optimizer is Optimizer.ADAMW_8BIT:
        return "optimizer=adamw_8bit is torchao's, whose shards are DTensors: engine=torch"
    return None


def _find_script_violation(plan: PlanFields) -> str | None:
    if plan.layout.pp > 1:
        return "engine=script runs no pipeline (pp=1): nothing tells a script how to cut its model"
    if plan.offload_target is OffloadTarget.NVME:
        return "engine=script offloads to host memory only: no one removes the files that a script leaves"
    if plan.sharding is Sharding.FSDP and plan.zero_stage is ZeroStage.OPTIMIZER:
        return (
            "FSDP shards gradients and optimizer (zero_stage=2) or all (3); stage 1 is DeepSpeed's"
        )
    if plan.sharding is Sharding.FSDP and plan.offload is Offload.OPTIMIZER:
        return "FSDP offloads parameters and optimizer together (offload=parameters)"
    if (
        plan.sharding is Sharding.FSDP
        and plan.offload is not Offload.NONE
        and plan.gradient_accumulation_steps > 1
    ):
        return (
            "a script's FSDP with offload needs gradient_accumulation_steps=1: gradients that add up on the host may "
            "be wrong (torch/distributed/fsdp/fully_sharded_data_parallel.py)"
        )
    if plan.optimizer is Optimizer.ADAFACTOR and plan.zero_stage is not ZeroStage.NONE:
        return "optimizer=adafactor works on whole tensors; a script's ZeRO stages hold flat pieces of them"
    return None


# DeepSpeed runs a Python hook per gradient and copies it into a bucket
# (deepspeed/runtime/zero/stage_1_and_2.py). Its
# step factor is a guess that keeps the simpler engine where the two would be about equally fast.
ENGINES: Mapping[Engine, EngineFacts] = {
    Engine.TORCH: EngineFacts(
        is_ours=True,
        why_illegal=_find_torch_violation,
        shares_samples=True,
        has_bf16_masters=True,
        has_low_gradients=False,
        step_factor=1.0,
        simplicity=0,
    ),
    Engine.DEEPSPEED: EngineFacts(
        is_ours=True,
        why_illegal=_find_deepspeed_violation,
        shares_samples=False,
        has_bf16_masters=False,
        has_low_gradients=True,
        step_factor=1.05,
        simplicity=1,
    ),
    Engine.SCRIPT: EngineFacts(
        is_ours=False,
        why_illegal=_find_script_violation,
        shares_samples=False,
        has_bf16_masters=False,
        has_low_gradients=False,
        step_factor=1.0,
        simplicity=0,
    ),
}


def get_engine_facts(engine: Engine) -> EngineFacts:
    """Return the fixed properties of an engine. Raises AssertionError for an engine without a row in ENGINES."""
    facts = ENGINES.get(engine)
    assert facts is not None, f"engine={engine} has no row in specs/engines.py"
    return facts
