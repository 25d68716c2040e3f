"""A plan in the words of what runs it: a DeepSpeed file, and a script's command line and environment."""

from __future__ import annotations

from typing import Any

from orchestrator.memory.deepspeed import CUDA_BUCKETS, VIRTUAL_BUCKETS
from orchestrator.specs.job import JobSpec, Knob
from orchestrator.specs.plan import ActivationCheckpointing, Offload, OffloadTarget, Plan, Precision, ZeroStage

SWITCHED_OFF = (ActivationCheckpointing.NONE.value, Precision.FP32.value)  # where a script's bare switch is absent

# As our engines scale (training/loss_scale.py): from 2**16, doubled after 2000 finite steps, halved at once.
DYNAMIC_LOSS_SCALE = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}


def deepspeed_config(plan: Plan, *, clip_norm: float, virtual: bool = False) -> dict[str, Any]:
    """The DeepSpeed configuration of a plan, with every setting explicit whose default would surprise.

    Clipping defaults to 1.0 in DeepSpeed, buckets to 5e8 elements (deepspeed/runtime/constants.py, zero/config.py).
    `virtual` asks for the small buckets of a virtual device.
    """
    buckets = VIRTUAL_BUCKETS if virtual else CUDA_BUCKETS
    is_stage_3 = plan.zero_stage is ZeroStage.PARAMETERS
    zero: dict[str, Any] = {"stage": int(plan.zero_stage)}
    if plan.zero_stage is not ZeroStage.NONE:
        zero |= {"reduce_bucket_size": buckets.reduce, "allgather_bucket_size": buckets.reduce}
        zero |= {"overlap_comm": buckets.overlap and is_stage_3}
    if is_stage_3:
        zero |= {
            "stage3_max_live_parameters": buckets.live,
            "stage3_max_reuse_distance": buckets.live,
            "stage3_prefetch_bucket_size": min(buckets.reduce, buckets.live),
            "stage3_param_persistence_threshold": buckets.persistent,
        }
    assert plan.offload_target is OffloadTarget.CPU, "a script is never asked to offload to files"
    host = {"device": "cpu", "pin_memory": not virtual}
    if plan.offload is not Offload.NONE:
        zero["offload_optimizer"] = host
    if plan.offload is Offload.PARAMETERS:
        zero["offload_param"] = host
    return {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": clip_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": plan.precision is Precision.BF16},
        "fp16": {"enabled": plan.precision is Precision.FP16, **DYNAMIC_LOSS_SCALE},
        "steps_per_print": 10**9,
    }


def script_command(
    spec: JobSpec, plan: Plan, *, output_dir: str, resume_from: str | None, deepspeed_config_path: str | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The script's arguments with the plan's knobs after the user's own, and its environment besides the job's."""
    assert spec.command is not None, "only a script has a command"
    knobs = spec.knobs
    turned: tuple[tuple[Knob | None, str | None], ...] = (
        (knobs.micro_batch_size, str(plan.micro_batch_size)),
        (knobs.gradient_accumulation_steps, str(plan.gradient_accumulation_steps)),
        (knobs.activation_checkpointing, plan.activation_checkpointing.value),
        (knobs.precision, plan.precision.value),
        (knobs.sequence_length, None if plan.sequence_length is None else str(plan.sequence_length)),
        (knobs.deepspeed_config, deepspeed_config_path),
        (knobs.resume_from, resume_from),
        (knobs.output_dir, output_dir),
    )
    arguments: list[str] = list(spec.command)
    env: dict[str, str] = {}
    for knob, value in turned:
        if knob is None or value is None:
            continue
        word = dict(knob.values).get(value, value)
        if knob.flag is not None:
            arguments += [knob.flag, word]
        elif knob.env is not None:
            env[knob.env] = word
        elif knob.switch is not None and value not in SWITCHED_OFF:
            arguments.append(knob.switch)
    return tuple(arguments), env
