"""Moves settings that plans control from a typed command to the keys of a job file."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.service.commands.init.script_flags import Script
from orchestrator.service.commands.init.typed_command import Typed
from orchestrator.specs.job.frameworks import READS_FIRST_FILE, Framework, knobs_of, taken

BATCHES = ("micro_batch_size", "gradient_accumulation_steps")
LEFT = (
    "precision",
    "activation_checkpointing",
)  # for a framework, specs/job/frameworks.py removes them from the command
PRECISIONS = ("fp32", "bf16", "fp16")
CONFIG_BYTES_MAX = 2**20
LITGPT_RESUMES = ("finetune_full", "pretrain")
LITGPT_FILES = {"pretrain": "pretrain.py", "finetune": "finetune/lora.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A command without the settings that plans control."""

    command: tuple[str, ...]
    said: frozenset[str]  # its flags
    knobs: dict[str, Any]  # with the given values as defaults
    notes: tuple[str, ...]
    ranks: int | None
    global_batch_size: int | None
    precision: str | None
    config: dict[str, str] | None  # its config file, relative to the folder


def settle(typed: Typed, script: Script, framework: Framework | None, own: Mapping[str, Any]) -> Settled:
    """The typed command as a job's settings; its values become the defaults of knobs."""
    head, words = typed.command[: typed.arguments], typed.command[typed.arguments :]
    knobs, notes = dict(own), list[str]()
    effective = {**(knobs_of(framework) if framework is not None else {}), **own}
    words = tuple(_spelled(word, script, effective) for word in words)
    said = frozenset(word.partition("=")[0] for word in words if word.startswith("-"))
    file, config = _config_of(framework, words, typed.folder)
    found = dict[str, str]()
    for name, knob in effective.items():
        if not isinstance(knob, Mapping):
            continue
        value, rest = _given(knob, words)
        if value is None:
            value = _in_file(knob, config)
        elif framework is None and name == "activation_checkpointing":
            knobs[name] = None  # stays in the command
        elif framework is None or name not in LEFT:
            words = rest
            if name not in BATCHES:
                notes.append(f"Taken out of the command, since the job sets it: {name} {value}")
        if value is not None:
            found[name] = str(value)
    for name in BATCHES:
        if found.get(name, "").isdecimal():
            started = {"default": int(found[name])}
            knobs[name] = {**knobs[name], **started} if isinstance(knobs.get(name), Mapping) else started
    if framework == "litgpt" and typed.command[1] not in LITGPT_RESUMES:
        knobs["resume_from"] = None
    batch = found.get("global_batch_size") or _litgpt_default(framework, typed)
    ranks = found.get("ranks", "")
    return Settled(
        command=(*head, *words),
        said=said,
        knobs=knobs,
        notes=tuple(notes),
        ranks=int(ranks) if ranks.isdecimal() and int(ranks) else typed.ranks,
        global_batch_size=int(batch) if batch is not None and batch.isdecimal() else None,
        precision=_precision(framework, effective.get("precision"), found.get("precision"), config) or typed.precision,
        config={"file": file} if file is not None else None,
    )


def _spelled(word: str, script: Script, knobs: Mapping[str, Any]) -> str:
    """A flag in its knob's spelling: -b as --batch-size, --output-dir as --output_dir."""
    name, equals, value = word.partition("=")
    if not name.startswith("-"):
        return word
    by_alias = {alias: flag.name for flag in script.flags for alias in flag.also_called}
    known = {knob.get("flag") or knob.get("switch") for knob in knobs.values() if isinstance(knob, Mapping)}
    alike = {one.replace("-", "_"): one for one in known if one}
    return f"{by_alias.get(name) or alike.get(name.replace('-', '_'), name)}{equals}{value}"


def _given(knob: Mapping[str, Any], words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """A knob's value in a command, and the command without it."""
    if knob.get("switch"):
        return ("true", tuple(w for w in words if w != knob["switch"])) if knob["switch"] in words else (None, words)
    if knob.get("flag"):
        return taken(words, knob["flag"])
    key = knob.get("override")
    mine = [word for word in words if key and word.startswith(f"{key}=")]
    value = mine[-1].partition("=")[2] if mine else None
    return value, tuple(word for word in words if word not in mine)


def _config_of(
    framework: Framework | None, words: tuple[str, ...], folder: Path
) -> tuple[str | None, Mapping[str, Any]]:
    """The config file to copy for each attempt, if any, and the content of any config file."""
    named = [word for word in words if word.endswith((".yaml", ".yml"))]
    if framework is None or not named:
        return None, {}
    try:
        text = (folder / named[0]).read_bytes()[:CONFIG_BYTES_MAX]
        said = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        said = {}
    own = named[0] if framework in READS_FIRST_FILE and not named[0].startswith(("/", "-")) else None
    return own, said if isinstance(said, dict) else {}


def _in_file(knob: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """A knob's value in a config file, by the dotted path of its key, override or flag."""
    place: Any = config
    for word in str(knob.get("key") or knob.get("override") or knob.get("flag") or "").lstrip("-").split("."):
        place = place.get(word) if isinstance(place, Mapping) else None
    return str(place) if isinstance(place, bool | int | float | str) else None


def _precision(framework: Framework | None, knob: Any, value: str | None, config: Mapping[str, Any]) -> str | None:
    """The precision of a command or its config file; None if the framework's own rule reads it."""
    for name in ("bf16", "fp16"):
        if str(config.get(name)).lower() in ("true", "auto", "full"):
            return name
    if value is None or not isinstance(knob, Mapping):
        return None
    meant = {str(theirs): ours for ours, theirs in (knob.get("values") or {}).items()}
    ours = value if value in PRECISIONS else meant.get(value)
    return ours if ours in PRECISIONS and (framework is None or knob.get("override") or config) else None


def _litgpt_default(framework: Framework | None, typed: Typed) -> str | None:
    """The global batch of litgpt's own defaults: `train: TrainArgs = TrainArgs(global_batch_size=16)` of setup()."""
    if framework != "litgpt":
        return None
    sub = typed.command[1]
    name = LITGPT_FILES.get(sub, f"finetune/{sub.removeprefix('finetune_')}.py")
    root = Path(typed.command[0]).parent.parent
    for file in root.glob(f"lib/python3*/site-packages/litgpt/{name}"):
        try:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, SyntaxError):
            return None
        for node in nodes:
            if (
                isinstance(node, ast.keyword)
                and node.arg == "global_batch_size"
                and isinstance(node.value, ast.Constant)
            ):
                return str(node.value.value)
    return None
