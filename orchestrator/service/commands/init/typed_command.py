"""Parses a typed training command: launcher, interpreter, program. Nothing is run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.attempts.program import interpreter_of
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.frameworks import Framework, taken
from orchestrator.specs.job.trainer import LaunchStyle, is_python, program_name
from orchestrator.specs.replace import replace

# Options of launchers without a value: torch/distributed/run.py, accelerate/commands/launch.py,
# deepspeed/launcher/runner.py. Any other takes a value, with a space or `=`.
SWITCHES = {
    *("--standalone", "--no-python", "--run-path", "-m", "--module", "--multi-gpu", "--cpu", "--mps", "--tpu"),
    *("--use-deepspeed", "--use-fsdp", "--use-megatron-lm", "--debug", "--quiet", "-q", "--dynamo-use-dynamic"),
    *("--dynamo-use-fullgraph", "--enable-cpu-affinity", "--use-xpu", "--use-parallelism-config", "--force-multi"),
    *("--no-local-rank", "--save-pid", "--no-ssh", "--no-ssh-check", "--enable-each-rank-log", "--bind-cores-to-rank"),
}
RANKS = ("--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes", "--num-gpus", "--num_gpus")
LAUNCHERS: dict[str, LaunchStyle] = {"torchrun": "torchrun", "deepspeed": "deepspeed", "accelerate": "accelerate"}
LAUNCHER_MODULES: dict[str, LaunchStyle] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
# Console script -> its framework; framework -> its subcommands that train.
TOOLS: dict[str, Framework] = {
    "trl": "trl",
    "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory",
    "axolotl": "axolotl",
    "litgpt": "litgpt",
    "tune": "torchtune",
}
TRAINS = {
    "trl": ("sft", "dpo", "grpo", "kto", "reward", "rloo", "distillation"),
    "llamafactory": ("train",),
    "axolotl": ("train",),
    "litgpt": (*("finetune", "finetune_full", "finetune_lora", "finetune_adapter", "finetune_adapter_v2", "pretrain"),),
    "torchtune": ("run",),
}
# Modules that the console script starts by a launcher. A job names them, and may then use several devices and nodes.
MODULES = {"llamafactory": "llamafactory.launcher", "axolotl": "axolotl.cli.train"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A command as a job says it."""

    command: tuple[str, ...]  # interpreter or console script, then its arguments
    arguments: int  # index in `command` of the program's own arguments
    folder: Path  # in which it was typed, or the folder of a script given alone
    script: Path | None = None  # its Python file, if there is one to read
    framework: Framework | None = None  # recognised by its name
    launch: LaunchStyle | None = None  # as typed
    ranks: int | None = None  # from the launcher's options
    precision: str | None = None  # from accelerate's options
    notes: tuple[str, ...] = ()  # for the user to read


def read_command(typed: Sequence[str], folder: Path) -> Typed:
    """The command that was typed in `folder`. Raises SpecError for what starts no training."""
    words = tuple(typed)
    if not words:
        raise SpecError("nothing to propose a job for", source="orc init", hint="orc init torchrun train.py --lr 1e-3")
    name, alone = program_name(words[0]), len(words) == 1
    if alone and words[0].endswith(".py"):
        script = folder / words[0]
        return Typed(command=("python", script.name), arguments=2, folder=script.resolve().parent, script=script)
    if name in LAUNCHERS:
        rest = words[1:]
        if name == "accelerate" and words[1:2] != ("launch",):
            what = "this starts no training"
            raise SpecError(what, source="orc init", got=" ".join(words), allowed="accelerate launch")
        return _launched(LAUNCHERS[name], rest[1:] if name == "accelerate" else rest, folder, words[0])
    if is_python(name):
        return _of_python(words, folder)
    if name in TOOLS:
        return _of_tool(TOOLS[name], words, folder)
    if words[0].endswith(".py"):
        return _program(_python(folder, "python"), words, folder)
    return _of_console_script(words, folder)


def _launched(launch: LaunchStyle, words: Sequence[str], folder: Path, launcher: str) -> Typed:
    """The program that a launcher starts; the launcher's own options are set by each plan."""
    own, module, index = dict[str, str](), False, 0
    while index < len(words) and words[index].startswith("-"):
        option, equals, value = words[index].partition("=")
        if option in ("-m", "--module"):
            module = True
        if not equals and option.replace("_", "-") not in SWITCHES:
            index, value = index + 1, words[index + 1] if index + 1 < len(words) else ""
        own[option.replace("_", "-")] = value
        index += 1
    program = words[index:]
    if not program:
        raise SpecError("the launcher is given no script", source="orc init", got=f"{launcher} {' '.join(words)}")
    typed = _program(_python(folder, launcher), (("-m",) if module else ()) + tuple(program), folder)
    ranks = next((own[name] for name in own if name in RANKS and own[name].isdecimal()), None)
    nodes = own.get("--nnodes", "1").rpartition(":")[2]
    count = int(ranks) * (int(nodes) if launch == "torchrun" and nodes.isdecimal() else 1) if ranks else None
    precision = {"no": "fp32"}.get(own.get("--mixed-precision", ""), own.get("--mixed-precision"))
    precision = precision if precision in ("fp32", "bf16", "fp16") else None
    dropped = tuple(f"{name} {value}".strip() for name, value in own.items() if name not in ("-m", "--module"))
    notes = (f"{launch}'s own options are set by each plan; dropped: {', '.join(dropped)}",) if dropped else ()
    return replace(typed, launch=launch, ranks=count, precision=precision, notes=(*typed.notes, *notes))


def _of_python(words: Sequence[str], folder: Path) -> Typed:
    if list(words[1:2]) == ["-m"] and len(words) > 2 and words[2] in LAUNCHER_MODULES:
        return _launched(LAUNCHER_MODULES[words[2]], words[3:], folder, words[0])
    return _program(_python(folder, words[0]), words[1:], folder)


def _program(python: tuple[str, str], words: Sequence[str], folder: Path) -> Typed:
    """A script or module under an interpreter, after the interpreter's flags."""
    word, note = python
    start = next((index for index, one in enumerate(words) if one == "-m" or not one.startswith("-")), None)
    if start is None:
        raise SpecError("no script is named", source="orc init", got=" ".join(words), allowed="a script, or -m module")
    is_module = words[start] == "-m"
    end = start + (2 if is_module else 1)
    name = words[end - 1]
    script = _module_file(name, folder, word) if is_module else folder / name
    return Typed(
        command=(word, *words),
        arguments=1 + end,
        folder=folder.resolve(),
        script=script,
        framework=_framework_of_module(name) if is_module else None,
        notes=(note,),
    )


def _framework_of_module(name: str) -> Framework | None:
    known = {"llamafactory.launcher": "llamafactory", "axolotl.cli.train": "axolotl"}
    return "trl" if name.startswith("trl.scripts.") else known.get(name)  # type: ignore[return-value]


def _of_tool(framework: Framework, words: Sequence[str], folder: Path) -> Typed:
    """A framework's console script; if it only calls a launcher, the launched module instead."""
    allowed = TRAINS[framework]
    if len(words) < 2 or words[1] not in allowed:
        what = f"this command of {words[0]} starts no known training"
        got, names = " ".join(words[:2]), ", ".join(allowed)
        raise SpecError(what, source="orc init", got=got, allowed=f"{words[0]} with {names}")
    python, note = _python(folder, words[0])
    said = tuple(words[2:])
    if framework in ("trl", "llamafactory", "axolotl"):
        module = f"trl.scripts.{words[1]}" if framework == "trl" else MODULES[framework]
        for option in ("--accelerate_config", "--launcher"):
            said = taken(said, option)[1]
        ranks, said = taken(said, "--num_processes")
        why = f"`{words[0]} {words[1]}` starts {module} by a launcher; here the plan does"
        return Typed(
            command=(python, "-m", module, *said),
            arguments=3,
            folder=folder.resolve(),
            framework=framework,
            ranks=int(ranks) if ranks is not None and ranks.isdecimal() else None,
            notes=(note, why),
        )
    if framework == "torchtune":
        ranks, said = next(((n, rest) for flag in RANKS[:2] for n, rest in [taken(said, flag)] if n), (None, said))
        if ranks is not None:
            note += f"; CHECK: torchtune gets no --nproc_per_node {ranks} here, which stands before its recipe"
    program = words[0] if python == "python" else str(_found(words[0], folder) or words[0])
    command = (program, words[1], *said)
    return Typed(command=command, arguments=2, folder=folder.resolve(), framework=framework, notes=(note,))


def _of_console_script(words: Sequence[str], folder: Path) -> Typed:
    file = _found(words[0], folder)
    interpreter = interpreter_of(file) if file is not None else None
    if file is None or interpreter is None or not is_python(interpreter):
        allowed = f"a Python script, python, {', '.join((*LAUNCHERS, *TOOLS))}, or another console script of Python"
        what = "not a Python program" if file is not None else "no such program on the PATH"
        raise SpecError(what, source="orc init", got=words[0], allowed=allowed)
    note = f"{words[0]} is {file}, which {interpreter} runs"
    return Typed(command=(str(file), *words[1:]), arguments=1, folder=folder.resolve(), launch="self", notes=(note,))


def _python(folder: Path, program: str) -> tuple[str, str]:
    """The interpreter of a typed program, as in the job's command, and a note on its origin."""
    file = _found(program, folder)
    if file is None:
        return "python", f"CHECK: no {program} is on the PATH here: `python` is orc's own, {sys.executable}"
    found = str(file) if is_python(file.name) else interpreter_of(file)
    if found is None or not is_python(found) or Path(found).parent == Path(sys.executable).parent:
        return "python", f"`python` is orc's own interpreter, {sys.executable}"
    return found, f"{found} is the interpreter of {program}, not orc's own"


def _found(program: str, folder: Path) -> Path | None:
    if "/" in program:
        path = folder / Path(program).expanduser()
        return path.parent.absolute() / path.name if path.is_file() else None
    file = shutil.which(program)
    return Path(file) if file is not None else None


def _module_file(name: str, folder: Path, python: str) -> Path | None:
    """The file of a module in the folder or the interpreter's packages; the interpreter is not run."""
    environment = Path(sys.executable if python == "python" else python).parent.parent
    for root in (folder, folder / "src", *environment.glob("lib/python3*/site-packages")):
        path = root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py"):
            if file.is_file():
                return file
    return None
