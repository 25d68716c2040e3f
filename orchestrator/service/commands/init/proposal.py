"""Proposes a job file for a script from its flags. Comments name what is unknown."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template

from orchestrator.backends.text_templates import load_text_template
from orchestrator.service.commands.init.command_settings import collect_settings
from orchestrator.service.commands.init.controlled import SEVERAL_RANKS, BareCommand, choose_knobs
from orchestrator.service.commands.init.help_text import add_flags_of_help
from orchestrator.service.commands.init.meanings import find_quantity_and_count
from orchestrator.service.commands.init.recovery import (
    CHECK,
    describe_recovery,
    make_resume_and_success_lines,
)
from orchestrator.service.commands.init.script_flags import (
    NO_SCRIPT,
    TRL,
    Flag,
    Script,
    read_script,
)
from orchestrator.service.commands.init.slurm import (
    TASK,
    iterate_job_lines,
    make_array_index_variable,
)
from orchestrator.service.commands.init.typed_command import (
    TypedCommand,
    list_package_roots,
    read_command,
)
from orchestrator.specs.command_line import Env
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.frameworks import Framework, load_knobs, load_launch_style, load_preset
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.parse import parse_jobs

YAML_WORDS = ("no", "yes", "on", "off", "true", "false", "null", "none", "y", "n")
FILES_MAX = 64  # JSON files beside a script that are searched for a DeepSpeed configuration
# Frameworks whose flags are in their own code, not in the script.
INHERITS = ("hf", "trl", "lightning", "litgpt", "llamafactory", "axolotl", "torchtune")
SAYS_SUCCESS = ("trl", "litgpt", "llamafactory", "axolotl", "torchtune")
HUB_TOKEN = "HF_TOKEN"
UNKNOWN_BATCH = "global_batch_size: 1"  # where nothing says it, so that the rest can be read
HUBS = {
    "huggingface_hub",
    "transformers",
    "datasets",
    "diffusers",
    "trl",
}  # that load from the Hugging Face hub
OF_THE_HUB = ("hf", "trl", "diffusers", "accelerate", "llamafactory", "axolotl")


@frozen
class Proposal:
    """A job file proposed for a typed command: the command's parts, its knobs, and the file's text."""

    typed: TypedCommand
    script: Script
    bare: BareCommand
    text: str  # without `global_batch_size` where nothing says it


def propose_job_file(
    argv: Sequence[str], folder: Path, environment: Env, run_help: bool = False
) -> str:
    """Return the text of a job file for a command typed in `folder`, for the user to check.

    It is a valid job file, except that `global_batch_size` is absent where it is unknown. Of the
    shell's `environment` it names only the hub's token, which a job does not inherit. `run_help`
    also runs the command's own --help. Raises SpecError if the command starts no training.
    """
    return read_proposal(argv, folder, environment, run_help).text


def read_proposal(
    argv: Sequence[str], folder: Path, environment: Env, run_help: bool = False
) -> Proposal:
    """Return the parts of a command, and the text of a job file as `propose_job_file` makes it.

    Raises SpecError if the command starts no training.
    """
    typed = read_command(argv, folder)
    readable = typed.script is not None and (typed.framework is None or typed.script.is_file())
    script = (
        read_script(typed.script, list_package_roots(typed))
        if readable and typed.script is not None
        else NO_SCRIPT
    )
    if run_help:
        script = add_flags_of_help(script, typed)
    framework = _find_framework(typed, script)
    source = f"the proposal for {shlex.join(argv)}"
    bare = choose_knobs(typed, script, framework, collect_settings(typed, script, framework))
    is_whole = bare.batch.samples is not None
    head, body = _render_job_file(typed, script, bare, run_help, environment).split("\n", 1)
    body = f"{body.rstrip()}\n"
    batch = "" if is_whole else UNKNOWN_BATCH
    spec = parse_jobs(body + batch, source)[0]
    has_success = framework in SAYS_SUCCESS or bool(spec.success.artifacts)
    body += make_resume_and_success_lines(spec, script, framework, has_success=has_success)
    spec = parse_jobs(body + batch, source)[0]
    text = (
        f"{head}\n{describe_recovery(spec, script, framework, states_global_batch=is_whole)}{body}"
    )
    return Proposal(typed=typed, script=script, bare=bare, text=text)


def _find_framework(typed: TypedCommand, script: Script) -> Framework | None:
    if typed.framework is not None:
        return typed.framework
    flags = script.flags_by_name.keys()
    if script.training_arguments is not None:
        return "trl" if script.training_arguments.endswith(TRL) else "hf"
    if "LightningCLI" in script.calls:
        return "lightning"
    if (
        "Accelerator" in script.calls
        and {"--train_batch_size", "--gradient_accumulation_steps"} <= flags
    ):
        return "diffusers"
    if "Accelerator" in script.calls and "--per_device_train_batch_size" in flags:
        return "accelerate"
    return "deepspeed" if load_preset("deepspeed")["config_flag"] in flags else None


def _render_job_file(
    typed: TypedCommand,
    script: Script,
    bare: BareCommand,
    has_run_help: bool,
    environment: Env,
) -> str:
    """Return the text of a job file, without the comments that follow from parsing it again."""
    framework = _find_framework(typed, script)
    folder = typed.folder
    differing = (
        _disable_missing_knobs(framework, script) if framework and framework not in INHERITS else {}
    )
    knobs = {**differing, **bare.knobs}
    every = {**_load_knobs_of_framework(framework), **knobs}
    names = {
        name
        for knob in (*knobs.values(), *_load_knobs_of_framework(framework).values())
        for name in _iterate_flag_names(knob)
    }
    arguments = typed.command[typed.arguments :]
    needed = [flag for flag in script.flags if flag.required and flag.name not in names]
    missing = list[str]()
    if arguments:  # a parser of its package may be another program's: what was typed is whole
        missing = [flag.name for flag in needed if flag.kind != "positional"]
        needed = []
    command = [*bare.command, *_iterate_arguments(framework, folder, needed, bare=not arguments)]
    env = {name: str(value) for name, value in bare.env.items()}
    env |= make_array_index_variable(typed.slurm, (*command, *env.values()))
    secrets = list(typed.secrets)
    if HUB_TOKEN in environment and HUB_TOKEN not in secrets:
        secrets.append(HUB_TOKEN)
    packages = {name.partition(".")[0] for name in script.imports}
    is_launched = framework is not None and load_launch_style(framework) == typed.launch
    return _load_template().render(
        read=_describe_source(typed),
        run="whose --help was run" if has_run_help else "which was read, not run",
        notes=(*typed.notes, *bare.notes),
        unread=script.unread,
        name=_make_job_name(folder, typed),
        missing=[name for name in missing if name not in bare.names],
        needed=[flag.name for flag in needed],
        framework=framework,
        arguments=arguments,
        command=shlex.join(command),
        workdir=str(folder),
        env=env,
        slurm=iterate_job_lines(typed.slurm, quote_values=f"{{{TASK}}}" in env.values()),
        parses=script.training_arguments,
        bare=bare,
        may_use_several=_may_use_several_devices(typed, script, framework),
        devices=typed.devices,
        launch=None if is_launched else typed.launch,
        starts_itself=framework is None and _starts_ranks(script, bare),
        knobs=knobs,
        comment=lambda name, knob: _format_knob_comment(name, knob, framework),
        every=every,
        secrets=secrets,
        hub_token=HUB_TOKEN,
        loads_from_hub=HUBS & packages or framework in OF_THE_HUB,
    )


@cache
def _load_template() -> Template:
    return load_text_template(
        "orchestrator.service.commands.init",
        "job.yaml",
        one_line=_join_lines,
        scalar=_quote_yaml,
        flow=_format_yaml_line,
    )


def _join_lines(text: object) -> str:
    """Return the text on one line, since a typed word may contain a line break."""
    return " ".join(str(text).split())


def _describe_source(typed: TypedCommand) -> str:
    if typed.script is not None:
        return typed.script.name
    return typed.framework or shlex.join(typed.command[:3])


def _may_use_several_devices(
    typed: TypedCommand, script: Script, framework: Framework | None
) -> bool:
    """Return whether anything indicates that the command uses several devices."""
    is_started = framework is not None or typed.launch is not None
    imports = "torch.distributed" in script.imports
    return is_started or imports or bool(script.calls & set(SEVERAL_RANKS))


def _starts_ranks(script: Script, bare: BareCommand) -> bool:
    """Return whether the script itself starts its ranks, as with `mp.spawn`."""
    if (
        script.calls & {"spawn", "start_processes", "Process"}
        and "torch.multiprocessing" in script.imports
    ):
        return True
    return "DataParallel" in script.calls and bare.ranks is not None


def _format_knob_comment(
    knob_name: str, knob: JsonObject | None, framework: Framework | None
) -> str:
    if knob is None:
        return " # as its command and files say, in every plan"
    if framework is not None:
        return ""
    if knob_name == "micro_batch_size" and "per" not in knob and _has_unclear_sample_count(knob):
        return f" # {CHECK}per rank; if it counts all ranks, add per: global"
    if knob_name == "precision" and "values" in knob and None in knob["values"].values():
        return f" # {CHECK}its behaviour without the flag"
    return ""


def _has_unclear_sample_count(knob: JsonObject) -> bool:
    """Return whether the knob's name leaves open whether its batch size is that of a rank or of
    all.
    """
    name = next((knob[way] for way in ("flag", "override", "key", "env") if way in knob), "")
    return (find_quantity_and_count(str(name)) or ("", "plain"))[1] == "plain"


def _disable_missing_knobs(framework: Framework, script: Script) -> JsonObject:
    """Return {knob name: None} for each knob of the framework whose flag the script does not have."""
    names = script.flags_by_name
    flags = {
        name: knob.get("flag") or knob.get("switch") for name, knob in load_knobs(framework).items()
    }
    return {name: None for name, flag in flags.items() if flag and flag not in names}


def _load_knobs_of_framework(framework: Framework | None) -> JsonObject:
    return load_knobs(framework) if framework is not None else {}


def _iterate_flag_names(knob: Any) -> Iterator[str]:
    if not isinstance(knob, Mapping):
        return
    yield from (knob[way] for way in ("flag", "switch") if knob.get(way))
    for part in knob.get("also", ()):
        yield from _iterate_flag_names(part)


def _iterate_arguments(
    framework: Framework | None, folder: Path, required_flags: list[Flag], *, bare: bool
) -> Iterator[str]:
    """Yield the script's arguments for the job file: a value for each required flag."""
    if framework == "lightning" and bare:
        yield "fit"
    if framework == "deepspeed" and bare:
        yield from (load_preset("deepspeed")["config_flag"], _find_deepspeed_file(folder))
    for flag in required_flags:
        if flag.kind != "positional":
            yield flag.name
        if flag.kind in ("value", "positional"):
            yield flag.choices[0] if flag.choices else flag.word.upper()


def _find_deepspeed_file(folder: Path) -> str:
    for file in sorted(folder.glob("*.json"))[:FILES_MAX]:
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if (
            isinstance(content, dict)
            and {"train_micro_batch_size_per_gpu", "zero_optimization"} & content.keys()
        ):
            return file.name
    return "ds_config.json"


def _make_job_name(folder: Path, typed: TypedCommand) -> str:
    path = typed.script or Path(typed.command[typed.arguments - 1].rpartition(".")[2])
    if typed.framework is not None:
        path = Path(
            "-".join((typed.framework, *(typed.command[1:2] if typed.arguments == 2 else ())))
        )
    stem = (
        path.stem
        if path.stem not in ("train", "main", "run", "finetune")
        else f"{folder.name}-{path.stem}"
    )
    return re.sub(r"[^a-z0-9._-]+", "-", (typed.name or stem).lower()).strip("-._")[:63] or "job"


def _quote_yaml(text: str) -> str:
    """Return the text as a quoted YAML scalar."""
    return text if re.fullmatch(r"[\w./][\w./ =-]*", text) else json.dumps(text, ensure_ascii=False)


def _format_yaml_line(value: object, quote_all: bool = False) -> str:
    """Return the value as one line of YAML; `quote_all` quotes every value, as environment
    variables need.
    """
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{key}: {_format_yaml_line(inner, quote_all)}" for key, inner in value.items()
            )
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_format_yaml_line(inner) for inner in value) + "]"
    if isinstance(value, str) and not quote_all:
        is_plain = (
            re.fullmatch(r"-{0,2}[A-Za-z+][\w./+-]*", value) and value.lower() not in YAML_WORDS
        )
        return value if is_plain else json.dumps(value)
    return json.dumps(value)
