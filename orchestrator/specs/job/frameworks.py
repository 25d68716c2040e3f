"""Presets for common training frameworks: knobs (settings a script takes), launcher and log lines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from orchestrator.specs.command_line import Argv
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.packaged import load_table

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

WAYS = ("flag", "switch", "override", "key", "env", "accelerate")
PRESET_ONLY = ("cuts_over_ranks", "config_flag", "config_is_first_file")
MERGED = (
    "knobs",
    "resume",
    "phases",
)  # sections of which a job may have a part; it replaces other keys as a whole


@lru_cache(maxsize=32)
def load_preset(framework: str) -> Mapping[str, Any]:
    """Return a framework's preset: values for keys of a job file, and for the keys in PRESET_ONLY."""
    preset = load_table(__package__, f"presets/{framework}")
    base = preset.pop("extends", None)
    return preset if base is None else merge_preset(preset, load_preset(base))


def merge_preset(data: Mapping[str, Any], preset: Mapping[str, Any]) -> JsonObject:
    """Return the job data with missing keys filled in from the preset."""
    merged = {**preset, **data}
    for section in MERGED:
        base = preset.get(section)
        part = data.get(section)
        if isinstance(base, Mapping) and isinstance(part, Mapping):
            merged[section] = {**base, **part}
            for name in base.keys() & part.keys() if section == "knobs" else ():
                merged[section][name] = _merge_knob(base[name], part[name])
    return merged


def _merge_knob(preset_knob: object, job_knob: object) -> Any:
    """Return a preset's knob (how the script takes a setting) with the job's changes.

    A job's knob that says how the setting is passed replaces the preset's.
    """
    if not isinstance(preset_knob, Mapping) or not isinstance(job_knob, Mapping):
        return job_knob
    has_own_way = any(job_knob.get(way) is not None for way in WAYS)
    return job_knob if has_own_way else {**preset_knob, **job_knob}


def load_knobs(framework: str) -> JsonObject:
    """Return the `knobs:` of a job file (settings a script takes) for a framework's trainers."""
    return dict(load_preset(framework)["knobs"])


def load_launch_style(framework: str) -> str:
    """Return the `launch:` of a job file for a framework: which program starts the ranks of its
    trainers.
    """
    return str(load_preset(framework)["launch"])


def fill_defaults(data: Mapping[str, Any]) -> JsonObject:
    """Return the job data with its trainer's defaults filled in; present keys stay, even if null.

    Batch size, accumulation and precision move out of the command, into knob defaults and the job's
    `precision`. Recomputation in the command stays there, and then has no knob. Without a precision
    anywhere, the script keeps its default. The function is idempotent.
    """
    trainer = data.get("trainer")
    argv = split_command(data.get("command"))
    defaults = load_preset(trainer) if trainer in get_args(Framework) else None
    if defaults is None or not argv or not isinstance(data.get("knobs", {}), Mapping):
        return dict(data)
    additions: JsonObject = {
        key: value for key, value in defaults.items() if key not in PRESET_ONLY
    }
    additions["launch"] = data.get("launch", defaults["launch"])
    job_knobs = data.get("knobs", {})
    knobs = _list_missing_knobs(defaults["knobs"], job_knobs, additions["launch"])
    for name in ("micro_batch_size", "gradient_accumulation_steps"):
        if isinstance(knobs.get(name), Mapping):
            knobs[name], argv = _move_default(knobs[name], argv)
    if _is_in_command(knobs.get("activation_checkpointing"), argv):
        knobs["activation_checkpointing"] = None
    if "precision" in knobs and "precision" not in data:
        precision, argv = _remove_precision(knobs["precision"], argv)
        if precision is not None:
            additions |= {"precision": precision}
        else:
            knobs |= {"precision": None}
    if "config" not in data:
        config, argv = _remove_config_flag(defaults, argv)
        if config is not None:
            additions |= {"config": config}
    for section in ("resume", "phases"):
        if isinstance(data.get(section, {}), Mapping):
            additions[section] = {**defaults.get(section, {}), **data.get(section, {})}
    return {
        **data,
        **{
            key: additions[key]
            for key in additions
            if key not in data or key in ("resume", "phases")
        },
    } | {
        "command": argv,
        "knobs": {**job_knobs, **knobs},
    }


def _list_missing_knobs(
    preset_knobs: Mapping[str, Any], job_knobs: Mapping[str, Any], launch_style: object
) -> JsonObject:
    """Return the preset's knobs (options of the script) that the job does not declare, or declares
    without a way to pass them.
    """
    knobs: JsonObject = {}
    for name, knob in preset_knobs.items():
        if knob == "derived":
            if name not in job_knobs:
                knobs |= {name: knob}
        elif name not in job_knobs and (
            knob.get("accelerate") is None or launch_style == "accelerate"
        ):
            knobs[name] = knob
        elif (
            name in job_knobs and (merged := _merge_knob(knob, job_knobs[name])) != job_knobs[name]
        ):
            knobs[name] = merged  # the same way, with a default of its own
    return knobs


def _remove_config_flag(
    preset: Mapping[str, Any], command: Argv
) -> tuple[dict[str, str] | None, Argv]:
    """Return (config file that the command names or None, command without that flag)."""
    flag = preset.get("config_flag")
    if flag is not None:
        file, command = take_flag_from(command, flag)
        return None if file is None else {"file": file, "flag": flag}, command
    if preset.get("config_is_first_file"):
        files = [
            word
            for word in command
            if word.endswith((".yaml", ".yml")) and not word.startswith(("/", "-"))
        ]
        return {"file": files[0]} if files else None, command
    return None, command


def split_command(command: object) -> Argv:
    """Return the words of a command; () where it cannot be split, which another check reports."""
    if isinstance(command, str):
        try:
            return tuple(shlex.split(command))
        except ValueError:
            return ()
    return tuple(map(str, command)) if isinstance(command, Sequence) else ()


def take_flag_from(command: Argv, flag: str) -> tuple[str | None, Argv]:
    """Return (value of the flag, command without the flag); the value is `true` for a bare flag,
    None for a missing one.
    """
    for index, word in enumerate(command):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2], command[:index] + command[index + 1 :]
        if word == flag:
            bare = index + 1 == len(command) or command[index + 1].startswith("-")
            value = "true" if bare else command[index + 1]
            return value, command[:index] + command[index + (1 if bare else 2) :]
    return None, command


def find_parallelism_option(trainer: str | None, command: Sequence[str]) -> tuple[str, str] | None:
    """Return (option, degree) of the first option by which the command splits its model over ranks;
    None without one.
    """
    for flag in load_preset(trainer).get("cuts_over_ranks", ()) if trainer is not None else ():
        degree, _ = take_flag_from(tuple(command), flag)
        if degree not in (None, "1"):
            return flag, str(degree)
    return None


def is_flag_on(command: Sequence[str], flag: str) -> bool:
    """Return whether a command sets a flag, bare or as `true`, as HfArgumentParser reads it."""
    return str(take_flag_from(tuple(command), flag)[0]).lower() == "true"


def _is_in_command(knob: Mapping[str, Any] | None, argv: Argv) -> bool:
    word = (knob or {}).get("flag") or (knob or {}).get("switch")
    return word is not None and take_flag_from(argv, word)[0] is not None


def _move_default(knob: JsonObject, command: Argv) -> tuple[JsonObject, Argv]:
    """Return (knob with the command's value for it as default, command without that value).

    Knobs under `also` are handled the same way.
    """
    value, rest = take_flag_from(command, knob["flag"]) if "flag" in knob else (None, command)
    if value is not None and value.isdecimal():
        knob = {**knob, "default": int(value)}
        command = rest
    also = []
    for companion in knob.get("also", ()):
        changed, command = _move_default(companion, command)
        also.append(changed)
    return ({**knob, "also": also} if also else knob), command


def _remove_precision(knob: Mapping[str, Any], command: Argv) -> tuple[str | None, Argv]:
    """Return (precision that the command's options set or None, command without these options)."""
    precision = None
    for option in (knob, *knob.get("also", ())):
        value, rest = (
            take_flag_from(command, option["flag"]) if "flag" in option else (None, command)
        )
        names = {
            str(word).lower(): name for name, word in option["values"].items() if word is not False
        }
        choice = value if value in get_args(_Precision) else names.get(str(value))
        if choice is not None or value == "false":
            precision = choice or precision or "fp32"
            command = rest
    return precision, command
