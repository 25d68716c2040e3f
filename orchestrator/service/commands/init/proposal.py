"""Proposes a commented job file for a script from its flags; comments name what is not known."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.service.commands.init.given_settings import Settled, settle
from orchestrator.service.commands.init.script_flags import NO_SCRIPT, TRL, Flag, Script, read_script
from orchestrator.service.commands.init.typed_command import Typed, read_command
from orchestrator.specs.choices import Precision
from orchestrator.specs.job.frameworks import CONFIG_FLAG, Framework, knobs_of, launch_of
from orchestrator.specs.parse import parse_job

CHECK = "CHECK: "
GLOBAL_BATCH_SIZE = 8  # if the script has no default of its own
FILES_MAX = 64  # JSON files beside a script that are searched for a DeepSpeed configuration
# Setting -> its flag in common scripts, without dashes.
WORDS = {
    "micro_batch_size": (
        *("micro_batch_size", "per_device_train_batch_size", "per_device_batch_size", "per_gpu_train_batch_size"),
        *("device_batch_size", "train_batch_size", "batch_size", "micro_batch", "batchsize", "bs", "batch"),
    ),
    "gradient_accumulation_steps": (
        *("gradient_accumulation_steps", "grad_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
        *("gradient_accumulation", "accumulation_steps", "accum_steps", "accum_iter", "grad_accum", "accumulate"),
    ),
    "activation_checkpointing": (
        *("gradient_checkpointing", "activation_checkpointing", "grad_checkpointing", "use_checkpoint"),
        *("use_gradient_checkpointing", "checkpoint_activations", "grad_checkpoint", "checkpointing"),
    ),
    "precision": ("mixed_precision", "precision", "dtype", "bf16", "fp16", "amp"),
    "deepspeed_config": ("deepspeed_config", "ds_config", "deepspeed"),
    "output_dir": (
        "output_dir",
        "output",
        "out_dir",
        "out",
        "outdir",
        "save_dir",
        "output_path",
        "save_path",
        "ckpt_dir",
    ),
    "resume_from": ("resume_from_checkpoint", "resume_from", "resume", "resume_path", "ckpt_path", "load_checkpoint"),
}
PRECISIONS = {
    Precision.FP32: ("fp32", "float32", "32", "no", "32-true"),
    Precision.BF16: ("bf16", "bfloat16", "bf16-mixed"),
    Precision.FP16: ("fp16", "float16", "half", "16-mixed", "16"),
}
# Frameworks whose flags are in their own code, not in the script.
INHERITS = ("hf", "trl", "lightning", "litgpt", "llamafactory", "axolotl", "torchtune")
SAYS_SUCCESS = ("trl", "litgpt", "llamafactory", "axolotl", "torchtune")
HUB_TOKEN = "HF_TOKEN"
HUBS = {"huggingface_hub", "transformers", "datasets", "diffusers", "trl"}  # that load from the Hugging Face hub
OF_THE_HUB = ("hf", "trl", "diffusers", "accelerate", "llamafactory", "axolotl")
SEVERAL_RANKS = ("init_process_group", "DistributedDataParallel", "DDP", "Accelerator", "FullyShardedDataParallel")


def proposal(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """The text of a job file for a command typed in `folder`, for the user to check. It is a valid job file.

    Of the shell's `environment` it names what a job does not inherit: the hub's token.

    Raises SpecError if the command starts no training.
    """
    typed = read_command(words, folder)
    readable = typed.script is not None and (typed.framework is None or typed.script.is_file())
    script = read_script(typed.script) if readable and typed.script is not None else NO_SCRIPT
    text = "\n".join((*_lines(typed, script), *_secrets(typed, script, environment))) + "\n"
    parse_job(text, f"the proposal for {shlex.join(words)}")
    return text


def _framework(typed: Typed, script: Script) -> Framework | None:
    if typed.framework is not None:
        return typed.framework
    flags = {flag.name for flag in script.flags}
    if script.training_arguments is not None:
        return "trl" if script.training_arguments.endswith(TRL) else "hf"
    if "LightningCLI" in script.calls:
        return "lightning"
    if "Accelerator" in script.calls and {"--train_batch_size", "--gradient_accumulation_steps"} <= flags:
        return "diffusers"
    if "Accelerator" in script.calls and "--per_device_train_batch_size" in flags:
        return "accelerate"
    return "deepspeed" if CONFIG_FLAG["deepspeed"] in flags else None


def _lines(typed: Typed, script: Script) -> Iterator[str]:
    framework, folder = _framework(typed, script), typed.folder
    flags = {flag.word: flag for flag in reversed(script.flags)}
    inherits = framework in INHERITS
    own = _own_knobs(framework, flags) if framework and not inherits else {} if inherits else dict(_knobs(flags))
    settled = settle(typed, script, framework, own)
    knobs = settled.knobs
    named = {name for knob in (*knobs.values(), *_preset(framework).values()) if knob for name in _names(knob)}
    given = typed.command[typed.arguments :]
    required = [flag for flag in script.flags if flag.required and flag.name not in named]
    needed = [flag for flag in required if not (given and flag.kind == "positional") and flag.name not in settled.said]
    words = [*settled.command, *_command(framework, folder, needed, bare=not given)]
    read = typed.script.name if typed.script is not None else typed.framework or shlex.join(typed.command[:3])
    yield f"# Proposed from {read}, which was read, not run. Check every CHECK; `orc plan` shows its plans."
    yield from (f"# {note}." for note in (*typed.notes, *settled.notes))
    for way in script.unread:
        yield f"# Not read: settings by {way}."
    yield f"name: {_name(folder, typed)}"
    if needed:
        listed = ", ".join(flag.name for flag in needed)
        yield f"# {CHECK}required: {listed}; replace by your own values."
    if framework == "deepspeed" and not given:
        yield f"# {CHECK}the DeepSpeed file, relative to workdir; each attempt gets a copy with its batch size."
    yield f"command: {_quoted(shlex.join(words))}"
    yield f"workdir: {_quoted(str(folder))}"
    yield from _trainer(script, framework)
    yield from _devices(typed, script, framework, settled.ranks)
    yield from _batch(settled, framework)
    if settled.precision is not None:
        yield f"precision: {settled.precision}"
    if settled.config is not None:
        yield f"config: {_flow(settled.config)} # each attempt gets a copy with its plan"
    yield from _knob_lines(knobs, framework)
    if framework == "trl":
        yield "success: {artifacts: ['*.safetensors']} # trl's scripts save it at their end"
    yield from _unknown(script, knobs, framework)


def _secrets(typed: Typed, script: Script, environment: Mapping[str, str]) -> Iterator[str]:
    if HUB_TOKEN in environment:
        yield f"secrets: [{HUB_TOKEN}] # not inherited: the service must have it when it is started"
    elif HUBS & {name.partition(".")[0] for name in script.imports} or _framework(typed, script) in OF_THE_HUB:
        yield f"# secrets: [{HUB_TOKEN}] # for models that need a token: set it where you start the service"


def _trainer(script: Script, framework: Framework | None) -> Iterator[str]:
    if framework is None:
        return
    why = {
        "hf": f"it parses {script.training_arguments}",
        "trl": f"it parses {script.training_arguments}" if script.training_arguments else "by its name",
        "lightning": "it calls LightningCLI",
        "diffusers": "an Accelerator, and the flags of the examples of diffusers",
        "accelerate": "an Accelerator, and the flags of transformers' examples without Trainer",
        "deepspeed": "it takes --deepspeed_config",
    }.get(framework, "by its name")
    yield f"trainer: {framework} # {why}; sets knobs, launch and resume unless given here"


def _devices(typed: Typed, script: Script, framework: Framework | None, ranks: int | None) -> Iterator[str]:
    if ranks is not None:
        yield f"gpus: {{min: 1, max: {ranks}}} # {CHECK}as many as in its command, or fewer"
    elif (
        framework is not None
        or typed.launch is not None
        or script.calls & set(SEVERAL_RANKS)
        or "torch.distributed" in script.imports
    ):
        yield f"gpus: {{min: 1, max: 1}} # {CHECK}it can use several; set the largest number"
    else:
        yield "gpus: 1 # no code for several devices was found"
    if typed.launch is not None and (framework is None or launch_of(framework) != typed.launch):
        yield f"launch: {typed.launch}"
    elif (
        framework is None and script.calls & {"spawn", "start_processes"} and "torch.multiprocessing" in script.imports
    ):
        yield f"launch: self # {CHECK}it starts its ranks itself"


def _batch(settled: Settled, framework: Framework | None) -> Iterator[str]:
    preset, knobs = _preset(framework), settled.knobs
    micro = {**(preset.get("micro_batch_size") or {}), **(knobs.get("micro_batch_size") or {})}.get("default")
    told = knobs.get("gradient_accumulation_steps") or preset.get("gradient_accumulation_steps") or {}
    steps = told.get("default") if isinstance(told, Mapping) else None
    if settled.global_batch_size is not None:
        yield f"global_batch_size: {settled.global_batch_size} # its own, over all devices; the same in every plan"
    elif isinstance(micro, int) and micro > 0:
        alone = micro * (steps if isinstance(steps, int) and steps > 0 else 1) * (settled.ranks or 1)
        devices = f"{settled.ranks} devices" if settled.ranks else "one device"
        yield f"global_batch_size: {alone} # {CHECK}its own settings on {devices}; the same in every plan"
    else:
        yield f"global_batch_size: {GLOBAL_BATCH_SIZE} # {CHECK}not known: samples per optimizer step"


def _knob_lines(knobs: Mapping[str, Any], framework: Framework | None) -> Iterator[str]:
    if not knobs:
        return
    yield "knobs:"
    for name, knob in knobs.items():
        yield f"  {name}: {_flow(knob)}{_comment(name, knob, framework)}"


def _comment(name: str, knob: dict[str, Any] | None, framework: Framework | None) -> str:
    if knob is None:
        return " # the script has no such flag"
    if framework is not None:
        return ""
    if name == "micro_batch_size":
        return f" # {CHECK}per rank; if it counts all ranks, add per: global"
    if name == "precision" and "values" in knob and None in knob["values"].values():
        return f" # {CHECK}its behaviour without the flag"
    return ""


def _unknown(script: Script, knobs: Mapping[str, Any], framework: Framework | None) -> Iterator[str]:
    known = {**_preset(framework), **knobs}
    if known.get("micro_batch_size") is None:
        yield "# Not known: how it takes its batch size. Without that knob no plan changes it."
    elif known.get("gradient_accumulation_steps") is None:
        yield "# Not known: accumulation. Without that knob the micro-batch is never cut: the training would change."
    if known.get("resume_from") is None:
        yield "# Not known: how it resumes from a checkpoint. Without knobs.resume_from a restart starts over."
    elif (
        framework in ("hf", "trl")
        and script.flags
        and not {"resume_from_checkpoint", "get_last_checkpoint"} & _used(script)
    ):
        yield f"# {CHECK}nothing in it uses resume_from_checkpoint: a restart would start over."
    if known.get("output_dir") is None:
        yield "# Not known: the folder of its checkpoints. Without knobs.output_dir it is workdir."
    yield "# Not known: its memory; short attempts measure it first. Naming the model makes that unnecessary:"
    yield "# trains: {hf: MODEL} with data: {sequence_length: N}, or a file: trains: {factory: model.py:build}."
    if framework not in SAYS_SUCCESS:
        yield "# Not known: the files that it writes on success. success: {artifacts: [model.pt]}"
    yield "# Not known: the number of its optimizer steps. steps: 1000"


def _used(script: Script) -> set[str]:
    return {name.rpartition(".")[2] for name in (*script.imports, *script.calls, *script.attributes)}


def _own_knobs(framework: Framework, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """A script's differences from the framework's knobs: other defaults, missing flags."""
    differing: dict[str, Any] = {}
    for name, knob in knobs_of(framework).items():
        said = knob.get("flag") or knob.get("switch")
        flag = flags.get(said.lstrip("-").replace("-", "_")) if said else None
        if said and flag is None:
            differing[name] = None
        elif flag is not None and "default" in knob and type(flag.default) is int and flag.default != knob["default"]:
            differing[name] = {"default": flag.default}
    return differing


def _knobs(flags: Mapping[str, Flag]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Knobs of a script without a framework, by the names of its flags."""
    for setting, words in WORDS.items():
        for flag in (flags[word] for word in words if word in flags):
            knob = _knob(setting, flag)
            if knob is not None:
                yield setting, knob
                break


def _knob(setting: str, flag: Flag) -> dict[str, Any] | None:
    if flag.kind == "positional" or (
        flag.kind == "switch" and setting not in ("activation_checkpointing", "precision")
    ):
        return None
    if setting in ("micro_batch_size", "gradient_accumulation_steps"):
        number = type(flag.default) is int and flag.default > 0
        return {"flag": flag.name, "default": flag.default} if number else {"flag": flag.name}
    if flag.kind == "switch":  # a switch that is on by default cannot be set
        return {"switch": flag.name} if not flag.default else None
    if setting == "activation_checkpointing":
        return {"flag": flag.name, "values": {"none": False, "full": True}}
    if setting == "precision":
        return _precision_knob(flag)
    return {"flag": flag.name}


def _precision_knob(flag: Flag) -> dict[str, Any] | None:
    if flag.word in ("bf16", "fp16", "amp"):
        ours = "bf16" if flag.word == "bf16" else "fp16"
        return {"flag": flag.name, "values": {"fp32": False, ours: True}} if flag.kind == "boolean" else None
    values = {
        ours.value: next((word for word in known if word in flag.choices), None) for ours, known in PRECISIONS.items()
    }
    return (
        {"flag": flag.name, "values": {ours: word for ours, word in values.items() if word}} if flag.choices else None
    )


def _preset(framework: Framework | None) -> dict[str, Any]:
    return knobs_of(framework) if framework is not None else {}


def _names(knob: Any) -> Iterator[str]:
    if not isinstance(knob, Mapping):
        return
    yield from (knob[way] for way in ("flag", "switch") if knob.get(way))
    for one in knob.get("also", ()):
        yield from _names(one)


def _command(framework: Framework | None, folder: Path, needed: list[Flag], *, bare: bool) -> Iterator[str]:
    """The script's arguments: a value for everything required."""
    if framework == "lightning" and bare:
        yield "fit"
    if framework == "deepspeed" and bare:
        yield from (CONFIG_FLAG["deepspeed"], _deepspeed_file(folder))
    for flag in needed:
        if flag.kind != "positional":
            yield flag.name
        if flag.kind in ("value", "positional"):
            yield flag.choices[0] if flag.choices else flag.word.upper()


def _deepspeed_file(folder: Path) -> str:
    for file in sorted(folder.glob("*.json"))[:FILES_MAX]:
        try:
            said = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(said, dict) and {"train_micro_batch_size_per_gpu", "zero_optimization"} & said.keys():
            return file.name
    return "ds_config.json"


def _name(folder: Path, typed: Typed) -> str:
    path = typed.script or Path(typed.command[typed.arguments - 1].rpartition(".")[2])
    if typed.framework is not None:
        path = Path("-".join((typed.framework, *(typed.command[1:2] if typed.arguments == 2 else ()))))
    stem = path.stem if path.stem not in ("train", "main", "run", "finetune") else f"{folder.name}-{path.stem}"
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:63] or "job"


def _quoted(text: str) -> str:
    """The text as a YAML scalar."""
    return text if re.fullmatch(r"[\w./][\w./ =-]*", text) else json.dumps(text, ensure_ascii=False)


def _flow(value: object) -> str:
    """One line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str):
        return value if re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", value) else json.dumps(value)
    return json.dumps(value)
