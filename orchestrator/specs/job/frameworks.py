"""Knobs, launch and log lines of the trainers of common frameworks, which a job need not declare."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

_Precision = Literal["fp32", "bf16", "fp16"]
Framework = Literal[
    "hf",
    "trl",
    "accelerate",
    "diffusers",
    "lightning",
    "deepspeed",
    "litgpt",
    "llamafactory",
    "axolotl",
    "torchtune",
    "torchtitan",
    "megatron",
]

# A progress bar of tqdm without a name before it. At 0 nothing has been counted yet: resumed ones begin there, too.
_BAR = r"^\s*\d+%\|[^|]*\| ([1-9]\d*)/\d+ \["
_ACCUMULATION = {"flag": "--gradient_accumulation_steps", "default": 1}
_OUTPUT = {"flag": "--output_dir"}
_RESUME = {"flag": "--resume_from_checkpoint"}

# hf: transformers/training_args.py as HfArgumentParser reads it (transformers 4 and 5). Shards are said in accelerate's
# file, since `--fsdp` takes other words from one version to the next. trl: its configurations inherit that
# (trl/trainer/sft_config.py), and turn bf16 and gradient checkpointing on where they are told nothing.
# accelerate: transformers' examples/pytorch/*_no_trainer.py. diffusers: its examples/*/train_*.py.
# lightning: lightning/pytorch/cli.py and trainer/trainer.py; a checkpoint's name ends in step=N by default.
# litgpt: litgpt/args.py, finetune/full.py, pretrain.py (0.5); it divides its global batch by ranks and micro-batch.
# llamafactory: its YAML has TrainingArguments' keys (llamafactory/hparams, 0.9); its command gives launcher.py to
# torchrun. axolotl: utils/schemas/config.py (0.19); its command gives cli/train.py to accelerate.
# torchtune: recipes/configs/*.yaml (0.6), words of OmegaConf after the recipe.
# torchtitan: torchtitan/config/job_config.py (6404b93); it accumulates up to its global batch. megatron: NVIDIA's
# megatron/training/arguments.py; `block` recomputes the first layers of each stage, and the others keep everything.
# deepspeed: the file of `--deepspeed_config`, with the keys of deepspeed/runtime/constants.py.
_FRAMEWORKS: dict[str, dict[str, Any]] = {
    "hf": {
        "launch": "accelerate",
        "knobs": {
            "micro_batch_size": {
                "flag": "--per_device_train_batch_size",
                "default": 8,
                "also": [{"flag": "--per_device_eval_batch_size", "phase": "evaluation", "default": 8}],
            },
            "gradient_accumulation_steps": _ACCUMULATION,
            "activation_checkpointing": {"flag": "--gradient_checkpointing", "values": {"none": False, "full": True}},
            "precision": {
                "flag": "--bf16",
                "values": {"bf16": True, "fp16": False, "fp32": False},
                "also": [{"flag": "--fp16", "values": {"fp16": True, "bf16": None, "fp32": None}}],
            },
            "zero_stage": {"accelerate": "fsdp"},
            "output_dir": _OUTPUT,
            "resume_from": _RESUME,
        },
        "resume": {"checkpoints": "checkpoint-*", "holds": ["trainer_state.json"], "step": r"checkpoint-(\d+)"},
        "progress": _BAR,
        "phases": {
            "training": r"\*\*\* Running training \*\*\*|^\s*\d+%\|",
            "evaluation": r"\*\*\* Running (?:Evaluation|Prediction) \*\*\*",
        },
    },
    "accelerate": {
        "launch": "accelerate",
        "knobs": {
            "micro_batch_size": {"flag": "--per_device_train_batch_size", "default": 8},
            "gradient_accumulation_steps": _ACCUMULATION,
            "zero_stage": {"accelerate": "fsdp"},
            "output_dir": _OUTPUT,
            "resume_from": _RESUME,
        },
        "resume": {"checkpoints": ["step_*", "epoch_*"]},  # by their age: the names count two things
    },
    "diffusers": {
        "launch": "accelerate",
        "knobs": {
            "micro_batch_size": {"flag": "--train_batch_size", "default": 16},
            "gradient_accumulation_steps": _ACCUMULATION,
            "activation_checkpointing": {"switch": "--gradient_checkpointing"},
            "precision": {"flag": "--mixed_precision", "values": {"fp32": "no"}},
            "output_dir": _OUTPUT,
            "resume_from": _RESUME,
        },
        "resume": {"checkpoints": "checkpoint-*", "step": r"checkpoint-(\d+)"},
    },
    "lightning": {
        "launch": "torchrun",
        "knobs": {
            "micro_batch_size": {"flag": "--data.batch_size"},
            "gradient_accumulation_steps": {"flag": "--trainer.accumulate_grad_batches", "default": 1},
            "precision": {
                "flag": "--trainer.precision",
                "values": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"},
            },
            "zero_stage": {"flag": "--trainer.strategy", "values": {"0": None, "3": "fsdp"}},
            "ranks": {"flag": "--trainer.devices", "per": "node"},
            "nodes": {"flag": "--trainer.num_nodes"},
            "output_dir": {"flag": "--trainer.default_root_dir"},
            "resume_from": {"flag": "--ckpt_path"},
        },
        "resume": {"checkpoints": "**/*.ckpt", "step": r"step=(\d+)"},
    },
    "deepspeed": {
        "launch": "deepspeed",
        "knobs": {
            "micro_batch_size": {"key": "train_micro_batch_size_per_gpu"},
            "gradient_accumulation_steps": {"key": "gradient_accumulation_steps", "default": 1},
            "precision": {
                "key": "bf16.enabled",
                "values": {"bf16": True, "fp16": False, "fp32": False},
                "also": [{"key": "fp16.enabled", "values": {"fp16": True, "bf16": False, "fp32": False}}],
            },
        },
        "resume": {"checkpoints": "global_step*", "holds": ["*model_states.pt"], "step": r"global_step(\d+)"},
    },
    "litgpt": {
        "launch": "self",
        "precision": "bf16",
        "knobs": {
            "micro_batch_size": {"flag": "--train.micro_batch_size", "default": 1},
            "gradient_accumulation_steps": "derived",
            "global_batch_size": {"flag": "--train.global_batch_size"},
            "precision": {
                "flag": "--precision",
                "values": {"bf16": "bf16-true", "fp16": "16-mixed", "fp32": "32-true"},
            },
            "ranks": {"flag": "--devices", "per": "node"},
            "output_dir": {"flag": "--out_dir"},
            "resume_from": {"flag": "--resume"},
        },
        "resume": {"checkpoints": "step-*/lit_model.pth", "step": r"step-(\d+)"},
        "success": {"artifacts": ["final/lit_model.pth*"]},
        "progress": r"iter \d+ step (\d+) \|",
    },
    "llamafactory": {
        "launch": "torchrun",
        "knobs": {
            "micro_batch_size": {"key": "per_device_train_batch_size", "default": 8},
            "gradient_accumulation_steps": {"key": "gradient_accumulation_steps", "default": 1},
            "activation_checkpointing": {
                "key": "disable_gradient_checkpointing",
                "values": {"none": True, "full": False},
            },
            "precision": {
                "key": "bf16",
                "values": {"bf16": True, "fp16": False, "fp32": False},
                "also": [{"key": "fp16", "values": {"fp16": True, "bf16": False, "fp32": False}}],
            },
            "output_dir": {"key": "output_dir"},
            "resume_from": {"key": "resume_from_checkpoint"},
        },
        "resume": {"checkpoints": "checkpoint-*", "holds": ["trainer_state.json"], "step": r"checkpoint-(\d+)"},
        "success": {"artifacts": ["*.safetensors"]},
        "progress": _BAR,
    },
    "axolotl": {
        "launch": "accelerate",
        "knobs": {
            "micro_batch_size": {"key": "micro_batch_size", "default": 1},
            "gradient_accumulation_steps": {"key": "gradient_accumulation_steps", "default": 1},
            "activation_checkpointing": {"key": "gradient_checkpointing", "values": {"none": False, "full": True}},
            "precision": {
                "key": "bf16",
                "values": {"bf16": True, "fp16": False, "fp32": False},
                "also": [{"key": "fp16", "values": {"fp16": True, "bf16": False, "fp32": False}}],
            },
            "output_dir": {"key": "output_dir"},
            "resume_from": {"key": "resume_from_checkpoint"},
        },
        "resume": {"checkpoints": "checkpoint-*", "holds": ["trainer_state.json"], "step": r"checkpoint-(\d+)"},
        "success": {"artifacts": ["*.safetensors"]},
        "progress": _BAR,
    },
    "torchtune": {
        "launch": "self",
        "knobs": {
            "micro_batch_size": {"override": "batch_size", "default": 1},
            "gradient_accumulation_steps": {"override": "gradient_accumulation_steps", "default": 1},
            "activation_checkpointing": {
                "override": "enable_activation_checkpointing",
                "values": {"none": "False", "full": "True"},
            },
            "precision": {"override": "dtype", "values": {"bf16": "bf16", "fp32": "fp32"}},
            "optimizer_in_backward": {"override": "optimizer_in_bwd", "values": {"false": "False", "true": "True"}},
            "output_dir": {"override": "output_dir"},
        },
        "resume": {"checkpoints": "epoch_*", "step": r"epoch_(\d+)"},
        "success": {"artifacts": ["epoch_*/*.safetensors"]},
    },
    "torchtitan": {
        "launch": "torchrun",
        "precision": "bf16",
        "knobs": {
            "micro_batch_size": {"flag": "--training.local_batch_size", "default": 8},
            "gradient_accumulation_steps": "derived",
            "global_batch_size": {"flag": "--training.global_batch_size"},
            "activation_checkpointing": {
                "flag": "--activation_checkpoint.mode",
                "values": {"none": "none", "selective": "selective", "full": "full"},
                "also": [
                    {
                        "flag": "--activation_checkpoint.selective_ac_option",
                        "values": {"none": None, "selective": "op", "full": None},
                    }
                ],
            },
            "zero_stage": {
                "flag": "--parallelism.fsdp_reshard_after_forward",
                "values": {"2": "never", "3": "always"},
            },
            "output_dir": {"flag": "--job.dump_folder"},
        },
        "progress": r"step:\s*(\d+)",
    },
    "megatron": {
        "launch": "torchrun",
        "precision": "bf16",
        "knobs": {
            "micro_batch_size": {"flag": "--micro-batch-size", "default": 1},
            "gradient_accumulation_steps": "derived",
            "global_batch_size": {"flag": "--global-batch-size"},
            "activation_checkpointing": {
                "flag": "--recompute-granularity",
                "values": {"none": None, "full": "full", "partial": "full"},
                "also": [
                    {"flag": "--recompute-method", "values": {"none": None, "full": "uniform", "partial": "block"}},
                    {"flag": "--recompute-num-layers", "values": {"none": None, "full": 1, "partial": None}},
                ],
            },
            "full_checkpointing_layers": {"flag": "--recompute-num-layers", "values": {"0": None}},
            "output_dir": {"flag": "--save"},
        },
        "progress": r"iteration\s+(\d+)/",
    },
}
_FRAMEWORKS = {"hf": _FRAMEWORKS["hf"], "trl": {**_FRAMEWORKS["hf"], "precision": "bf16"}, **_FRAMEWORKS}
# Options by which a trainer cuts its model over ranks. No plan of a script does, so that its dp would be another.
CUTS_OVER_RANKS: dict[str, tuple[str, ...]] = {
    "torchtitan": (
        "--parallelism.tensor_parallel_degree",
        "--parallelism.pipeline_parallel_degree",
        "--parallelism.context_parallel_degree",
        "--parallelism.expert_parallel_degree",
    ),
    "megatron": (
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
        "--expert-model-parallel-size",
    ),
}
WAYS = ("flag", "switch", "override", "key", "env", "accelerate")
CONFIG_FLAG = {"deepspeed": "--deepspeed_config"}  # its file stands in the command, and is rewritten for each attempt
READS_FIRST_FILE = ("llamafactory", "axolotl")  # the first YAML file in the command is their config, at this very path
assert tuple(_FRAMEWORKS) == get_args(Framework)


def knobs_of(framework: str) -> dict[str, Any]:
    """Return the knobs of a framework's trainers, as a job file has them."""
    return dict(_FRAMEWORKS[framework]["knobs"])


def launch_of(framework: str) -> str:
    """Return who starts the ranks of a framework's trainers, as `launch` of a job file."""
    return str(_FRAMEWORKS[framework]["launch"])


def fill_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a job with the defaults of its `trainer`; keys that the job has stay, null included.

    Batch size, accumulation and precision in the command move out of it, into the defaults of their knobs and the job's
    precision. Recomputation in the command stays there, and is no knob then. A script for which nobody sets a precision
    keeps its own. A second call changes nothing.
    """
    defaults, command = _FRAMEWORKS.get(str(data.get("trainer"))), data.get("command")
    argv = _split_command(command)
    if defaults is None or not argv or not isinstance(data.get("knobs", {}), Mapping):
        return dict(data)
    additions: dict[str, Any] = {**defaults, "launch": data.get("launch", defaults["launch"])}
    job_knobs = data.get("knobs", {})
    knobs = _knobs_for(defaults["knobs"], job_knobs, additions["launch"])
    for name in ("micro_batch_size", "gradient_accumulation_steps"):
        if isinstance(knobs.get(name), Mapping):
            knobs[name], argv = _take_default(knobs[name], argv)
    if _is_in_command(knobs.get("activation_checkpointing"), argv):
        knobs["activation_checkpointing"] = None
    if "precision" in knobs and "precision" not in data:
        precision, argv = _take_precision(knobs["precision"], argv)
        additions |= {} if precision is None else {"precision": precision}
        knobs |= {"precision": None} if precision is None else {}
    if "config" not in data:
        config, argv = _take_config(str(data["trainer"]), argv)
        additions |= {} if config is None else {"config": config}
    for section in ("resume", "phases"):
        if isinstance(data.get(section, {}), Mapping):
            additions[section] = {**defaults.get(section, {}), **data.get(section, {})}
    return {**data, **{key: additions[key] for key in additions if key not in data or key in ("resume", "phases")}} | {
        "command": argv,
        "knobs": {**job_knobs, **knobs},
    }


def _knobs_for(defaults: Mapping[str, Any], job_knobs: Mapping[str, Any], launch: object) -> dict[str, Any]:
    """Return the framework's knobs that the job leaves out, or declares without a way to turn them."""
    knobs: dict[str, Any] = {}
    for name, knob in defaults.items():
        if knob == "derived":
            knobs |= {} if name in job_knobs else {name: knob}
        elif name not in job_knobs and (knob.get("accelerate") is None or launch == "accelerate"):
            knobs[name] = knob
        elif isinstance(job_knobs.get(name), Mapping) and not any(job_knobs[name].get(way) is not None for way in WAYS):
            knobs[name] = {**knob, **job_knobs[name]}  # the same way, with a default of its own
    return knobs


def _take_config(trainer: str, argv: tuple[str, ...]) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """Return the config file that a command names for its trainer, or None, and the command without its flag."""
    flag = CONFIG_FLAG.get(trainer)
    if flag is not None:
        file, argv = take_flag(argv, flag)
        return None if file is None else {"file": file, "flag": flag}, argv
    if trainer in READS_FIRST_FILE:
        files = [word for word in argv if word.endswith((".yaml", ".yml")) and not word.startswith(("/", "-"))]
        return {"file": files[0]} if files else None, argv
    return None, argv


def _split_command(command: object) -> tuple[str, ...]:
    """Return the words of a command; () where they cannot be read, since another check says why."""
    if isinstance(command, str):
        try:
            return tuple(shlex.split(command))
        except ValueError:
            return ()
    return tuple(map(str, command)) if isinstance(command, Sequence) else ()


def take_flag(argv: tuple[str, ...], flag: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the value of a flag in a command (`true` for a bare one, None without it), and the command without it."""
    for index, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2], argv[:index] + argv[index + 1 :]
        if word == flag:
            bare = index + 1 == len(argv) or argv[index + 1].startswith("-")
            value = "true" if bare else argv[index + 1]
            return value, argv[:index] + argv[index + (1 if bare else 2) :]
    return None, argv


def find_cut_option(trainer: str | None, command: Sequence[str]) -> tuple[str, str] | None:
    """Return the first option by which a command cuts its model over ranks, and its degree; None without one."""
    for flag in CUTS_OVER_RANKS.get(str(trainer), ()):
        degree, _ = take_flag(tuple(command), flag)
        if degree not in (None, "1"):
            return flag, str(degree)
    return None


def is_flag_on(command: Sequence[str], flag: str) -> bool:
    """Return whether a command turns a flag on, as HfArgumentParser reads it: bare, or `true`."""
    return str(take_flag(tuple(command), flag)[0]).lower() == "true"


def _is_in_command(knob: Mapping[str, Any] | None, argv: tuple[str, ...]) -> bool:
    word = (knob or {}).get("flag") or (knob or {}).get("switch")
    return word is not None and take_flag(argv, word)[0] is not None


def _take_default(knob: dict[str, Any], argv: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a knob and its `also` with their values in the command as defaults, and the rest of the command."""
    value, rest = take_flag(argv, knob["flag"]) if "flag" in knob else (None, argv)
    if value is not None and value.isdecimal():
        knob, argv = {**knob, "default": int(value)}, rest
    also = []
    for companion in knob.get("also", ()):
        changed, argv = _take_default(companion, argv)
        also.append(changed)
    return ({**knob, "also": also} if also else knob), argv


def _take_precision(knob: Mapping[str, Any], argv: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the precision that the options of this knob set in a command, and the command without them."""
    precision = None
    for option in (knob, *knob.get("also", ())):
        value, rest = take_flag(argv, option["flag"]) if "flag" in option else (None, argv)
        names = {str(word).lower(): name for name, word in option["values"].items() if word is not False}
        choice = value if value in get_args(_Precision) else names.get(str(value))
        if choice is not None or value == "false":
            precision, argv = choice or precision or "fp32", rest
    return precision, argv
