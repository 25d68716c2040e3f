"""A plan rendered for its runner: a DeepSpeed config file, or a script's command line and environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from orchestrator.planning.request import ScriptRequest
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Offload,
    OffloadTarget,
    Precision,
    ZeroStage,
)
from orchestrator.specs.deepspeed_file import ZERO, find_bucket_sizes, list_leaf_keys, merge_config
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.errors import refuse_unknown
from orchestrator.specs.job.trainer import Knob, Knobs
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.mechanics import Fsdp2, Replicated, ScriptFsdp, Zero
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import format_setting_value

SWITCHED_OFF = (
    ActivationCheckpointing.NONE.value,
    Precision.FP32.value,
    "0",
    "false",
)  # where a script's bare switch is absent

# what `activation_checkpointing` is told where the first layers only are recomputed
PARTIAL = "partial"

# As our engines scale (training/contract/loss_scale.py): from 2**16, doubled after 2000 finite
# steps, halved at once.
DYNAMIC_LOSS_SCALE = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}


def render_deepspeed_config(
    plan: Plan,
    *,
    clip_norm: float | None,
    job_keys_json: str | None = None,
    is_virtual_device: bool = False,
) -> JsonObject:
    """Return the DeepSpeed configuration of a plan; each setting with a surprising default is
    explicit.

    `job_keys_json` are the keys of the job's `deepspeed:` as JSON. They win over ours, and cannot
    set what the plan decides. `is_virtual_device` selects the small buckets of a virtual device (a
    CPU rank with a memory cap).

    Clipping defaults to 1.0 in DeepSpeed, where 0 is none, and buckets to 5e8 elements
    (deepspeed/runtime/constants.py, zero/config.py).
    """
    assert isinstance(plan.mechanics, Replicated | Zero), f"{plan.mechanics} is not DeepSpeed's"
    buckets = find_bucket_sizes(job_keys_json, is_virtual_device=is_virtual_device)
    stage = plan.mechanics.stage
    is_stage_3 = stage is ZeroStage.PARAMETERS
    zero: JsonObject = {"stage": int(stage)}
    if stage is not ZeroStage.NONE:
        zero |= {"reduce_bucket_size": buckets.reduce, "allgather_bucket_size": buckets.reduce}
        zero |= {"overlap_comm": buckets.overlaps(stage)}
    if is_stage_3:
        zero |= {
            "stage3_max_live_parameters": buckets.live,
            "stage3_max_reuse_distance": buckets.live,
            "stage3_prefetch_bucket_size": min(buckets.reduce, buckets.live),
            "stage3_param_persistence_threshold": buckets.persistent,
        }
    assert plan.offload_target is OffloadTarget.CPU, "a script is never asked to offload to files"
    host = {"device": "cpu", "pin_memory": not is_virtual_device}
    if plan.offload is not Offload.NONE:
        zero["offload_optimizer"] = host
    if plan.offload is Offload.PARAMETERS:
        zero["offload_param"] = host
    config = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": clip_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": plan.precision is Precision.BF16},
        "fp16": {"enabled": plan.precision is Precision.FP16, **DYNAMIC_LOSS_SCALE},
        "steps_per_print": 10**9,
    }
    return merge_config(config, json.loads(job_keys_json or "{}"))


def render_accelerate_config(
    knobs: Knobs, plan: Plan, *, deepspeed_config_path: str | None
) -> JsonObject:
    """Return the content of the file for `accelerate launch --config_file`; machines, ranks and
    ports are not in it.

    FSDP keys are those of accelerate's FullyShardedDataParallelPlugin. Beside a DeepSpeed file
    accelerate takes no precision of its own (accelerate/utils/dataclasses.py, DeepSpeedPlugin).
    """
    config: JsonObject = {
        "compute_environment": "LOCAL_MACHINE",
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }
    mechanics = plan.mechanics
    # A script that is told its own DeepSpeed file starts DeepSpeed itself.
    shards_itself = knobs.has_stage_in_file
    if shards_itself or not isinstance(mechanics, Zero):
        config["mixed_precision"] = (
            "no" if plan.precision is Precision.FP32 else plan.precision.value
        )
    match mechanics:
        case Zero() if not shards_itself:
            deepspeed = {
                "deepspeed_config_file": deepspeed_config_path,
                "zero3_init_flag": mechanics.stage is ZeroStage.PARAMETERS,
                "deepspeed_multinode_launcher": "standard",
            }
            return config | {"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}
        case ScriptFsdp() if knobs.offloads_by_fsdp:
            fsdp = {
                "fsdp_sharding_strategy": "SHARD_GRAD_OP"
                if mechanics.keeps_gathered
                else "FULL_SHARD",
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_offload_params": plan.offload is Offload.PARAMETERS,
                "fsdp_use_orig_params": True,
                "fsdp_sync_module_states": True,
            }
            return config | {"distributed_type": "FSDP", "fsdp_config": fsdp}
        case Replicated() | ScriptFsdp() | Zero():
            return config | {"distributed_type": "MULTI_GPU" if plan.world_size > 1 else "NO"}
        case Fsdp2():
            raise AssertionError(f"accelerate is told of a script's plans only: {plan}")
        case _:
            refuse_unknown(mechanics)


class RenderedCommand(NamedTuple):
    """The command-line arguments, environment variables and config keys that set a plan in a
    script.
    """

    arguments: tuple[str, ...]
    env: dict[str, str]
    keys: dict[str, str]  # of its config file, dotted


def render_script_command(
    script: ScriptRequest,
    plan: Plan,
    *,
    output_dir: str,
    resume_from: str | None,
    deepspeed_config_path: str | None,
    config_path: str | None = None,
    node_devices: tuple[int, ...] = (),
) -> RenderedCommand:
    """Return the script's command after which the plan's values follow, its environment variables
    and its config keys.

    `node_devices` are the devices of one node; every node of a plan uses as many.
    """
    assert not get_engine_facts(plan.engine).is_ours, plan
    knobs = script.knobs
    arguments = list(script.command)
    env = dict[str, str]()
    keys = dict[str, str]()
    if script.deepspeed is not None and knobs.zero_stage is not None and knobs.has_stage_in_file:
        section = str(knobs.zero_stage.key).removesuffix(f"{ZERO}.stage")
        for name, value in list_leaf_keys(json.loads(script.deepspeed)):
            keys[section + name] = format_setting_value(value)
    rate = script.learning_rate
    layers = plan.full_checkpointing_layers
    length = plan.sequence_length
    is_sharding_told = plan.zero_stage or not knobs.shards_at_every_rank_count
    if script.config is not None and script.config.flag is not None and config_path is not None:
        arguments += [script.config.flag, config_path]
    # in this order behind the user's own arguments
    values: dict[str, str | Callable[[Knob], str] | None] = {
        "micro_batch_size": lambda part: _format_batch_size(part, plan, len(node_devices)),
        "gradient_accumulation_steps": str(plan.gradient_accumulation_steps),
        "global_batch_size": str(script.global_batch_size),
        "learning_rate": None if rate is None else _format_yaml_number(rate),
        "activation_checkpointing": PARTIAL if layers else plan.activation_checkpointing.value,
        "full_checkpointing_layers": str(layers),
        "precision": plan.precision.value,
        "optimizer_in_backward": format_setting_value(plan.optimizer_in_backward),
        "sequence_length": None if length is None else str(length),
        "zero_stage": str(int(plan.zero_stage)) if is_sharding_told else None,
        "deepspeed_config": deepspeed_config_path,
        "devices": lambda part: part.separator.join(map(str, node_devices)),
        "ranks": lambda part: str(len(node_devices) if part.per == "node" else plan.world_size),
        "nodes": str(plan.world_size // max(1, len(node_devices))),
        "resume_from": resume_from,
        "output_dir": output_dir,
    }
    pairs: list[tuple[Knob, str | None]] = []
    for name, value in values.items():
        knob = getattr(knobs, name)
        parts = knob.all if isinstance(knob, Knob) else ()
        pairs += [(part, value(part) if callable(value) else value) for part in parts]
    for knob, value in pairs:
        word = None if value is None else dict(knob.values).get(value, value)
        if word is None:
            continue
        if knob.flag is not None:
            arguments += [knob.flag, word]
        elif knob.override is not None:
            arguments.append(f"{knob.override}={word}")
        elif knob.env is not None:
            env[knob.env] = word
        elif knob.key is not None:
            keys[knob.key] = word
        elif knob.switch is not None and value not in SWITCHED_OFF:
            arguments.append(knob.switch)
    return RenderedCommand(tuple(arguments), env, keys)


def _format_yaml_number(number: float) -> str:
    """Return a number as text that YAML 1.1 reads as one: PyYAML takes `5e-05` for a text, and
    `5.0e-05` for a number.
    """
    word = f"{number:.6g}"
    if "e" in word and "." not in word:
        word = word.replace("e", ".0e")
    return word


def _format_batch_size(knob: Knob, plan: Plan, ranks_per_node: int) -> str:
    """Return the plan's batch size as text, counted as the knob says: per rank, per node or over
    all ranks.
    """
    samples = plan.micro_batch_size
    if knob.phase is not None:
        samples = dict(plan.phase_batch_sizes).get(knob.phase, int(knob.default or samples))
    counted = samples * {"rank": 1, "node": ranks_per_node, "global": plan.layout.dp}[knob.per]
    size, rest = divmod(counted, plan.layout.dp if knob.multiplied_by_ranks else 1)
    assert rest == 0, (
        f"planning/strategies.py offers only micro-batches of which {knob} can be told"
    )
    return str(size)
