"""Parses a typed training command: launcher, interpreter, program. Nothing is run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from orchestrator.backends.attempts.launch_request import FLAGS_WITH_A_WORD
from orchestrator.backends.attempts.program import read_interpreter
from orchestrator.service.commands.init.named_files import read_settings_file
from orchestrator.service.commands.init.slurm import SlurmOptions
from orchestrator.service.commands.init.vocabulary import VOCABULARY
from orchestrator.service.commands.init.wrappers import unwrap_command
from orchestrator.service.notes import Notes
from orchestrator.specs.command_line import Argv, Env
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.frameworks import Framework, take_flag_from
from orchestrator.specs.job.trainer import LaunchStyle, get_program_name, is_python
from orchestrator.specs.published import find_project_job
from orchestrator.specs.replace import replace

SWITCHES = set(VOCABULARY["launchers"]["switches"])
RANKS = (
    "--nproc-per-node",
    "--nproc_per_node",
    "--num-processes",
    "--num_processes",
    "--num-gpus",
    "--num_gpus",
)
PLANNED = set(VOCABULARY["launchers"]["planned"])
MODULE_OF: dict[LaunchStyle, str] = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}
LAUNCHERS: dict[str, LaunchStyle] = {str(launch): launch for launch in MODULE_OF}
LAUNCHER_MODULES = {module: launch for launch, module in MODULE_OF.items()} | {
    "torch.distributed.launch": "torchrun"
}
# Console script -> its framework.
TOOLS: dict[str, Framework] = {
    "trl": "trl",
    "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory",
    "axolotl": "axolotl",
    "litgpt": "litgpt",
    "tune": "torchtune",
}
TRAINS = VOCABULARY["trains"]
# Modules that the console script starts by a launcher. A job names them, and may then use several
# devices and nodes.
MODULES = {
    "trl": "trl.scripts.",
    "llamafactory": "llamafactory.launcher",
    "axolotl": "axolotl.cli.train",
}


@frozen
class TypedCommand:
    """A training command split into the parts that a job file needs: launcher, interpreter,
    program, arguments.
    """

    command: Argv  # interpreter or console script, then its arguments
    arguments: int  # index in `command` of the program's own arguments
    folder: Path  # in which it was typed, or the folder of a script given alone
    script: Path | None = None  # its Python file, if there is one to read
    framework: Framework | None = None  # recognised by its name
    launch: LaunchStyle | None = None  # as typed
    ranks: int | None = None  # in all, from the options of a launcher or of srun
    devices: int | None = None  # that Slurm gives or CUDA_VISIBLE_DEVICES shows
    is_fixed: bool = False  # the number of ranks stands in the command, where no plan changes it
    launcher_words: Argv = ()  # of a launcher that stays in the command
    precision: str | None = None  # from accelerate's options
    env: Env = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    name: str | None = None
    slurm: SlurmOptions = field(default_factory=dict)  # options of sbatch and srun
    notes: Notes = ()  # for the user to read


def read_command(argv: Sequence[str], folder: Path) -> TypedCommand:
    """Return the parts of a command typed in `folder`. Raises SpecError for a command that starts
    no training.
    """
    if not argv:
        raise SpecError(
            "nothing to propose a job for",
            source="orc init",
            hint="orc init torchrun train.py --lr 1e-3",
        )
    inner = unwrap_command(argv, folder)
    if not inner.argv:
        raise _refusal_error("nothing is started", argv, "a training command")
    tool = inner.environment
    typed = _parse_command_without_variables(
        inner.argv, inner.folder, find_environment_python(tool, inner.folder) if tool else None
    )
    notes = [*inner.notes, *typed.notes]
    # a clone's folder has its project's name, too
    job = find_project_job(f"{inner.folder} {shlex.join(inner.argv)}")
    if job is not None:
        notes.append(
            f"If this is the project's own trainer, begin with its job in the repository: {job}"
        )
    if tool and typed.command[0] == "python":
        text = f"name the interpreter of `{shlex.join(tool)}`, as in .venv/bin/python: `python` is orc's own"
        notes.append(f"CHECK: {text}")
    if inner.prefix:  # stays, with the launcher in it
        command = (*inner.prefix, *inner.argv)
        arguments = len(command) - (len(typed.command) - typed.arguments)
        typed = replace(typed, command=command, arguments=arguments, launch="self", is_fixed=True)
    return replace(
        typed,
        ranks=typed.ranks if typed.ranks is not None or typed.launch in MODULE_OF else inner.ranks,
        devices=inner.devices,
        env={**inner.env, **typed.env},
        secrets=inner.secrets,
        name=inner.name,
        slurm=inner.slurm,
        notes=tuple(notes),
    )


def _refusal_error(problem: str, argv: Sequence[str], allowed: str = "") -> SpecError:
    return SpecError(problem, source="orc init", got=" ".join(argv), allowed=allowed)


def _parse_command_without_variables(argv: Argv, folder: Path, python: str | None) -> TypedCommand:
    name = get_program_name(argv[0])
    alone = len(argv) == 1
    if alone and argv[0].endswith(".py"):
        script = folder / argv[0]
        return TypedCommand(
            command=("python", script.name),
            arguments=2,
            folder=script.resolve().parent,
            script=script,
        )
    if name in LAUNCHERS:
        rest = argv[1:]
        if name == "accelerate" and argv[1:2] != ("launch",):
            raise _refusal_error("this starts no training", argv, "accelerate launch")
        return _parse_launched(
            LAUNCHERS[name], rest[1:] if name == "accelerate" else rest, folder, argv[0], python
        )
    if is_python(name):
        return _parse_python(argv, folder, python)
    if name == "dora":
        return _parse_dora(argv, folder)
    if name in TOOLS:
        return _parse_framework_script(TOOLS[name], argv, folder)
    if argv[0].endswith(".py"):
        return _parse_program(_find_python_and_note(folder, "python", python), argv, folder)
    return _parse_console_script(argv, folder)


def _parse_launched(
    launch: LaunchStyle,
    argv: Sequence[str],
    folder: Path,
    launcher_name: str,
    environment: str | None,
) -> TypedCommand:
    """Return the parts of a command that a launcher (torchrun) starts.

    Launcher options that each plan sets are dropped. If the launcher has any other option, it stays
    in the command with all its words.
    """
    options = dict[str, str]()
    module = False
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        option, equals, value = argv[index].partition("=")
        module = module or option in ("-m", "--module")
        if not equals and option.replace("_", "-") not in SWITCHES:
            index, value = index + 1, argv[index + 1] if index + 1 < len(argv) else ""
        options[option if option == "-m" else option.replace("_", "-")] = value
        index += 1
    program = argv[index:]
    if not program:
        raise _refusal_error("the launcher is given no script", (launcher_name, *argv))
    python = _find_python_and_note(folder, launcher_name, environment)
    typed = _parse_program(python, (("-m",) if module else ()) + tuple(program), folder)
    content = (
        read_settings_file(folder / options["--config-file"])
        if "--config-file" in options
        else None
    )
    ranks = _count_ranks_of_launcher(options, content or {}, launch)
    precision = options.get("--mixed-precision") or str((content or {}).get("mixed_precision", ""))
    precision = {"no": "fp32"}.get(precision, precision)
    precision = precision if precision in ("fp32", "bf16", "fp16") else ""
    typed = replace(typed, launch=launch, ranks=ranks, precision=precision or None)
    if options.keys() <= PLANNED:
        module_words = (MODULE_OF[launch],) if is_python(get_program_name(launcher_name)) else ()
        dropped = shlex.join((*module_words, *argv[:index]))
        notes = (
            (f"{launch}'s own options are set by each plan; dropped: {dropped}",) if dropped else ()
        )
        return replace(typed, notes=(*typed.notes, *notes))
    stays = (python[0], "-m", MODULE_OF[launch], *argv[:index])
    start = index + len(program) - (len(typed.command) - typed.arguments)
    note = f"{launch} stays in the command, since no plan sets all of its options: {shlex.join(argv[:index])}"
    return replace(
        typed,
        command=(*stays, *program),
        arguments=len(stays) + start - index,
        launch="self",
        is_fixed=True,
        launcher_words=tuple(argv[:index]),
        notes=(*typed.notes, note),
    )


def _count_ranks_of_launcher(
    options: Mapping[str, str], file_content: Mapping[str, object], launch: LaunchStyle
) -> int | None:
    """Return the total number of ranks in a launcher's options or its file; None where they do not
    say it.
    """
    ranks = next(
        (options[name] for name in options if name in RANKS),
        str(file_content.get("num_processes", "")),
    )
    if (
        launch == "deepspeed" and not ranks and "--include" in options
    ):  # localhost:0,1 or node1:0,1@node2
        ranks = str(options["--include"].count(",") + 1) if "@" not in options["--include"] else ""
    if (
        launch == "accelerate"
        and not ranks
        and "--gpu-ids" in options
        and options["--gpu-ids"] != "all"
    ):
        ranks = str(options["--gpu-ids"].count(",") + 1)
    if launch == "torchrun" and not ranks:
        ranks = "1"
    if not ranks.isdecimal() or not int(ranks):
        return None
    nodes = (options.get("--nnodes") or options.get("--num-nodes") or "1").rpartition(":")[2]
    per_node = launch in ("torchrun", "deepspeed") and nodes.isdecimal()
    return int(ranks) * (int(nodes) if per_node else 1)


def _parse_python(argv: Sequence[str], folder: Path, environment: str | None) -> TypedCommand:
    at_module = next((index for index, word in enumerate(argv) if word == "-m"), 0)
    module = argv[at_module + 1] if at_module and at_module + 1 < len(argv) else ""
    flags_only = all(word.startswith("-") for word in argv[1:at_module])
    if module in LAUNCHER_MODULES and flags_only:
        return _parse_launched(
            LAUNCHER_MODULES[module], argv[at_module + 2 :], folder, argv[0], environment
        )
    return _parse_program(_find_python_and_note(folder, argv[0], environment), argv[1:], folder)


def _parse_dora(argv: Sequence[str], folder: Path) -> TypedCommand:
    """Return the parts of a command of dora (facebookresearch/dora), `dora -P package run -d
    key=value`; plans set `-d`.
    """
    start = next((index for index, word in enumerate(argv) if word == "run"), None)
    if start is None:
        raise _refusal_error("this starts no training", argv, "dora run")
    package, rest = take_flag_from(tuple(argv[1:start]), "-P")
    note = f"{shlex.join(argv[:1])} is found on the PATH when the job starts"
    env = {} if package is None else {"DORA_PACKAGE": package}
    script = _find_module_file(f"{package}.train", folder, "python") if package else None
    own_options = list[str]()
    end = start + 1
    while end < len(argv) and argv[end].startswith("-"):
        own_options.append(argv[end])
        end += 1
    notes = (
        note,
        *(
            (f"dora's own options are set by each plan; dropped: {' '.join(own_options)}",)
            if own_options
            else ()
        ),
    )
    return TypedCommand(
        command=("dora", *rest, "run", *argv[end:]),
        arguments=2 + len(rest),
        folder=folder.resolve(),
        script=script,
        launch="self" if rest else "dora",
        env=env,
        notes=notes,
    )


def _parse_program(
    python_and_note: tuple[str, str], argv: Sequence[str], folder: Path
) -> TypedCommand:
    """Return the parts of a command that runs a script or module.

    `python_and_note` is (interpreter, note on where it comes from); `argv` begins with the
    interpreter's flags.
    """
    word, note = python_and_note
    start = 0
    while start < len(argv) and argv[start].startswith("-") and argv[start] != "-m":
        start += 2 if argv[start] in FLAGS_WITH_A_WORD else 1
    if {"-c", "-"} & set(argv[:start]):
        raise _refusal_error("its code stands in no file", argv, "a script, or -m module")
    if start >= len(argv) or list(argv[start:]) == ["-m"]:
        raise _refusal_error("no script is named", argv, "a script, or -m module")
    is_module = argv[start] == "-m"
    end = start + (2 if is_module else 1)
    name = argv[end - 1]
    script = _find_module_file(name, folder, word) if is_module else folder / name
    # of a shell script whose variable is not known
    script = None if "$" in name or "`" in name else script
    return TypedCommand(
        command=(word, *argv),
        arguments=1 + end,
        folder=folder.resolve(),
        script=script,
        framework=_find_module_framework(name) if is_module else None,
        notes=(note,),
    )


def _find_module_framework(module: str) -> Framework | None:
    frameworks = {"llamafactory.launcher": "llamafactory", "axolotl.cli.train": "axolotl"}
    return "trl" if module.startswith("trl.scripts.") else frameworks.get(module)  # type: ignore[return-value]


def _parse_framework_script(
    framework: Framework, argv: Sequence[str], folder: Path
) -> TypedCommand:
    """Return the parts of a framework's console script; if it only calls a launcher, those of the
    launched module.
    """
    allowed = TRAINS[framework]
    if len(argv) < 2 or argv[1] not in allowed:
        what = f"this command of {argv[0]} starts no known training"
        raise _refusal_error(what, argv[:2], f"{argv[0]} with {', '.join(allowed)}")
    python, note = _find_python_and_note(folder, argv[0])
    rest = tuple(argv[2:])
    if framework in MODULES and not any(
        word.partition("=")[0] in ("--accelerate_config", "--launcher") for word in rest
    ):
        module = f"{MODULES[framework]}{argv[1]}" if framework == "trl" else MODULES[framework]
        ranks, rest = take_flag_from(rest, "--num_processes")
        count = f" on {ranks} ranks (--num_processes)" if ranks is not None else ""
        why = f"`{argv[0]} {argv[1]}` starts {module} by a launcher{count}; here the plan does"
        return TypedCommand(
            command=(python, "-m", module, *rest),
            arguments=3,
            folder=folder.resolve(),
            framework=framework,
            ranks=int(ranks) if ranks is not None and ranks.isdecimal() else None,
            notes=(note, why),
        )
    program = argv[0] if python == "python" else str(_find_program_file(argv[0], folder) or argv[0])
    counts = [
        (index, option)
        for option in RANKS
        for index, word in enumerate(rest)
        if word.partition("=")[0] == option
    ]
    ranks = take_flag_from(rest, counts[0][1])[0] if counts else None
    is_count = framework == "torchtune" or framework in MODULES
    recipe = next(
        (index for index, word in enumerate(rest) if "=" not in word and not word.startswith("-")),
        0,
    )
    if (
        is_count and counts
    ):  # tune run --nproc_per_node 8 RECIPE: the recipe comes after the launcher's options
        recipe = counts[0][0] + (1 if "=" in rest[counts[0][0]] else 2)
    return TypedCommand(
        command=(program, argv[1], *rest),
        arguments=2 + (recipe if framework == "torchtune" else 0),
        folder=folder.resolve(),
        framework=framework,
        launch="self" if framework in MODULES else None,
        ranks=int(ranks) if is_count and ranks is not None and ranks.isdecimal() else None,
        is_fixed=is_count and bool(counts),
        launcher_words=rest[:recipe] if framework == "torchtune" else (),
        notes=(note,),
    )


def _parse_console_script(argv: Sequence[str], folder: Path) -> TypedCommand:
    file = _find_program_file(argv[0], folder)
    interpreter = read_interpreter(file) if file is not None else None
    if file is None or interpreter is None or not is_python(interpreter):
        allowed = f"a Python script, python, {', '.join((*LAUNCHERS, *TOOLS))}, or another console script of Python"
        what = "not a Python program" if file is not None else "no such program on the PATH"
        raise _refusal_error(what, argv[:1], allowed)
    note = f"{argv[0]} is {file}, which {interpreter} runs"
    return TypedCommand(
        command=(str(file), *argv[1:]),
        arguments=1,
        folder=folder.resolve(),
        launch="self",
        notes=(note,),
    )


def _find_python_and_note(
    folder: Path, program: str, chosen_python: str | None = None
) -> tuple[str, str]:
    """Return (interpreter of a typed program as the job's command names it, note on where it comes
    from).
    """
    if chosen_python is not None and (is_python(program) or "/" not in program):
        return (
            chosen_python,
            f"{chosen_python} is the interpreter of the environment, not orc's own",
        )
    file = _find_program_file(program, folder)
    if file is None:
        return (
            "python",
            f"CHECK: no {program} is on the PATH here: `python` is orc's own, {sys.executable}",
        )
    interpreter = str(file) if is_python(file.name) else read_interpreter(file)
    if (
        interpreter is None
        or not is_python(interpreter)
        or Path(interpreter).parent == Path(sys.executable).parent
    ):
        return "python", f"`python` is orc's own interpreter, {sys.executable}"
    return interpreter, f"{interpreter} is the interpreter of {program}, not orc's own"


def find_environment_python(tool_command: Sequence[str], folder: Path) -> str | None:
    """Return the interpreter that `conda run -n NAME`, `uv run` and the like select; None where it
    is not on this machine.
    """
    name = (
        take_flag_from(tuple(tool_command), "-n")[0]
        or take_flag_from(tuple(tool_command), "--name")[0]
    )
    prefix = take_flag_from(tuple(tool_command), "-p")[0]
    program = shutil.which(tool_command[0])
    roots = [
        Path.home() / root
        for root in ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba")
    ]
    roots += [Path(program).resolve().parent.parent] if program is not None else []
    places = (
        [root / "envs" / name for root in roots] if name else [folder / prefix] if prefix else []
    )
    if tool_command[0] not in ("conda", "mamba", "micromamba"):
        places = [parent / ".venv" for parent in (folder, *folder.resolve().parents)]
    return next(
        (str(place / "bin/python") for place in places if (place / "bin/python").is_file()), None
    )


def _find_program_file(program: str, folder: Path) -> Path | None:
    if "/" in program:
        path = folder / os.path.expanduser(program)
        return path.parent.absolute() / path.name if path.is_file() else None
    file = shutil.which(program)
    return Path(file) if file is not None else None


def list_package_roots(typed: TypedCommand) -> tuple[Path, ...]:
    """Return the folders of packages that the program can import: its project's, then its
    interpreter's.
    """
    program = Path(typed.command[0])
    environment = (
        program.parent.parent if program.is_absolute() else Path(sys.executable).parent.parent
    )
    return (typed.folder, typed.folder / "src", *environment.glob("lib/python3*/site-packages"))


def _find_module_file(module: str, folder: Path, python: str) -> Path | None:
    """Return the file of a module, in the folder or the interpreter's packages; None if it is not
    found.

    The interpreter is not run.
    """
    environment = Path(sys.executable if python == "python" else python).parent.parent
    for root in (folder, folder / "src", *environment.glob("lib/python3*/site-packages")):
        path = root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py"):
            if file.is_file():
                return file
    return None
