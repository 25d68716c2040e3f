"""Finds the training command in shell text: a script, a Slurm batch file, a SkyPilot task, a quoted text.

Nothing is run. A variable that the text does not set stays as it is, and is marked.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from orchestrator.service.commands.init.slurm import (
    TASK,
    TASK_VARIABLE,
    iterate_slurm_options_and_values,
    parse_array_indices,
)
from orchestrator.service.notes import Notes
from orchestrator.specs.command_line import Argv, Env
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.trainer import get_program_name, is_python

SCRIPT_BYTES_MAX = 2**20
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# A quoted or escaped part of a line, or where its command ends: a redirection, a pipe, the next one.
SHELL_PART = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?:^|(?<=\s))(?P<end>[|&;]+(?=\s|$)|\d?>|&>|<)"""
)
# What ends, joins or quotes in a text of several commands.
TEXT_PART = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*")|(?P<joined>\\\r?\n)|(?P<escaped>\\.)"""
    r"""|(?P<comment>(?<!\S)\#[^\n]*)|(?P<array>(?<!\S)[A-Za-z_]\w*\+?=\()|(?P<close>\))"""
    r"""|(?P<end>\r?\n|;+|&&)""",
    re.DOTALL,
)
ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)\)\s*", re.DOTALL)
VARIABLE = re.compile(
    r"""'[^']*'|\\.|(?P<double>"(?:\\.|[^"\\])*")"""
    r"""|\$\{(?P<braced>\w+(?:\[[@*]\])?|[@*])(?::(?P<first>\d+)|:?-(?P<default>[^}]*))?\}"""
    r"""|\$(?P<bare>\w+|[@*])""",
    re.DOTALL,
)
HIDDEN = re.compile(
    r"login|token|secret|passw|api.?key", re.IGNORECASE
)  # in a line that may hold a secret
SHELLS = ("bash", "sh", "zsh", "dash", "source", ".", "sbatch")
STARTERS = (
    "torchrun",
    "accelerate",
    "deepspeed",
    "trl",
    "llamafactory-cli",
    "lmf",
    "axolotl",
    "litgpt",
    "tune",
    "dora",
)
# Commands that only prepare a shell; the others that are left out are marked.
QUIET = (
    "set",
    "echo",
    "fi",
    "done",
    "then",
    "else",
    "wait",
    "exit",
    "mkdir",
    "date",
    "hostname",
    "nvidia-smi",
    "do",
)
PREPARES = ("module", "source", ".", "conda", "pip", "wandb", "git", *QUIET)


class ShellText(NamedTuple):
    """A text of shell commands, with a name of it for errors, its arguments, and the folder in
    which it runs.
    """

    text: str
    label: str
    arguments: Argv = ()
    beside: str = "."  # the script's folder, relative to that of the command


class InnerCommand(NamedTuple):
    """The training command inside a text of shell commands, with its folder, its variables, and
    notes for the user.
    """

    argv: Argv
    folder: Path
    env: Env
    notes: Notes


def starts_training(word: str) -> bool:
    """Return whether a word is a Python interpreter, a launcher (torchrun) or a Python script."""
    return (
        is_python(word)
        or get_program_name(word) in STARTERS
        or (word.endswith(".py") and not word.startswith("-"))
    )


def split_line(line: str) -> list[str]:
    """Return the words of a shell line; a line with unclosed quotes is split at its spaces."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def split_first_command(line: str) -> Argv:
    """Return the words of a shell line up to a redirection, a pipe or a second command. Quoted
    operators are words.
    """
    ends = (match.start() for match in SHELL_PART.finditer(line) if match["end"])
    command = line[: next(ends, len(line))]
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return tuple(command.split())


def find_shell_text(argv: Argv, folder: Path, slurm_options: dict[str, str]) -> ShellText | None:
    """Return the shell commands that a command runs: a script, `bash -c`, a SkyPilot task, or a
    quoted text; else None.

    Slurm options on the command line, and SkyPilot's devices, are added to `slurm_options`. Raises
    SpecError for a missing script.
    """
    name = get_program_name(argv[0])
    if len(argv) == 1 and " " in argv[0].strip():
        return ShellText(argv[0], argv[0])
    if name in SHELLS and "-c" in argv[1:3]:
        return ShellText(" ".join(argv[argv.index("-c") + 1 :][:1]), shlex.join(argv))
    index = _find_script_index(argv, folder)
    if index is None or (named := argv[index]).endswith(".py"):
        return None
    path = folder / os.path.expanduser(named)
    is_shell = named.endswith((".sh", ".bash", ".sbatch", ".slurm")) or name in SHELLS
    if is_shell and not path.is_file():
        raise SpecError("the shell script does not exist", source="orc init", got=named)
    if not path.is_file() or not (is_shell or "/" in named or named.endswith((".yaml", ".yml"))):
        return None
    text = path.read_bytes()[:SCRIPT_BYTES_MAX].decode(errors="replace")
    if named.endswith((".yaml", ".yml")):
        text = _read_skypilot_commands(text, slurm_options)
    elif not is_shell and not re.match(r"#!.*\b(?:ba|z|da)?sh\b", text):
        return None
    if name == "sbatch":
        slurm_options |= dict(iterate_slurm_options_and_values(argv[1:index]))
    beside = os.path.relpath(path.parent, folder)
    return ShellText(text, shlex.join(argv), argv[index + 1 :], beside) if text else None


def _find_script_index(argv: Sequence[str], folder: Path) -> int | None:
    """Return the index in `argv` of the script that a shell, Slurm or SkyPilot runs; None where it
    has no script.

    It is 0 where the command is none of these.
    """
    name = get_program_name(argv[0])
    if name not in (*SHELLS, "sky"):
        return 0
    if name == "sky" and argv[1:2] == ("launch",):
        return next(
            (index for index, word in enumerate(argv) if word.endswith((".yaml", ".yml"))), None
        )
    first = next(
        (index for index, word in enumerate(argv) if index and not word.startswith("-")), None
    )
    if name == "sbatch" and first is not None:  # an option's value may stand before the script
        return next(
            (index for index, word in enumerate(argv) if index and (folder / word).is_file()), first
        )
    return first


def _read_skypilot_commands(task_yaml: str, slurm_options: dict[str, str]) -> str:
    """Return the shell commands of a SkyPilot task, after assignments of its variables; "" for
    other YAML.

    Its devices are added to `slurm_options` (docs.skypilot.co, task YAML).
    """
    try:
        task = yaml.safe_load(task_yaml)
    except (ValueError, yaml.YAMLError):
        return ""
    if not isinstance(task, Mapping) or not isinstance(task.get("run"), str):
        return ""
    resources = task.get("resources") or {}
    envs = task.get("envs") or {}
    nodes = task.get("num_nodes") or 1
    devices = resources.get("accelerators") if isinstance(resources, Mapping) else None
    if isinstance(devices, Mapping):
        devices = ":".join(map(str, next(iter(devices.items()), ())))
    count = str(devices).rpartition(":")[2] if ":" in str(devices) else "1" if devices else ""
    if count:
        slurm_options |= {"--gpus-per-node": count, "--nodes": str(nodes)}
    variables = {"SKYPILOT_NUM_GPUS_PER_NODE": count, "SKYPILOT_NUM_NODES": nodes}
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    lines += (
        [f"export {name}={shlex.quote(str(value))}" for name, value in envs.items()] if envs else []
    )
    return "\n".join([*lines, task["run"]])


def find_inner_command(
    script: ShellText, folder: Path, env: Env, slurm_options: dict[str, str]
) -> InnerCommand:
    """Return the training command inside shell commands, with their variables filled in.

    The first command with a launcher is chosen, else the last with Python. #SBATCH options are
    added to `slurm_options`. Raises SpecError if there is no such command.
    """
    arguments = script.arguments
    values = {**env, "SLURM_SUBMIT_DIR": "."}
    exported = dict[str, str]()
    notes = list[str]()
    commands = list[tuple[Argv, Path]]()
    slurm_options |= _parse_sbatch_options(script.text)
    if "--nodes" in slurm_options:
        values |= {
            "SLURM_NNODES": slurm_options["--nodes"],
            "SLURM_JOB_NUM_NODES": slurm_options["--nodes"],
        }
    if parse_array_indices(slurm_options):
        values[TASK_VARIABLE] = f"{{{TASK}}}"
    folder_of_script = r"\$\(dirname +\"?\$(?:0|\{BASH_SOURCE\[0\]\}|BASH_SOURCE)\"?\)"
    arrays = dict[str, Argv]()
    for line in _iterate_commands(re.sub(folder_of_script, script.beside, script.text)):
        filled = _fill_variables(line, values, {**arrays, "@": arguments})
        array = ARRAY.fullmatch(filled)
        if array is not None:
            before = arrays.get(f"{array[1]}[@]", ()) if array[2] else ()
            arrays[f"{array[1]}[@]"] = (*before, *split_first_command(array[3]))
            continue
        parts = split_first_command(filled)
        if not parts:
            continue
        if parts[0] == "cd" and len(parts) > 1 and "$" not in parts[1]:
            folder = folder / os.path.expanduser(parts[1])
        elif parts[0] == "shift":
            arguments = arguments[int(parts[1]) if parts[1:2] and parts[1].isdecimal() else 1 :]
        elif all(map(ASSIGNMENT.fullmatch, parts[1:] if parts[0] == "export" else parts)):
            pairs = dict(part.split("=", 1) for part in parts if "=" in part)
            values |= pairs
            exported |= pairs if parts[0] == "export" else {}
        elif any(map(starts_training, parts)) and parts[0] not in PREPARES:
            commands.append((parts, folder))
        elif parts[0] not in QUIET:
            shown = parts[0] + " with a secret" if HIDDEN.search(line) else line[:200]
            notes.append(f"CHECK: not in the job: {shown}")
    if not commands:
        what = "the shell script has no line that starts Python or a launcher"
        raise SpecError(
            what, source="orc init", got=script.label, hint="name the command that it starts"
        )
    argv, folder = next(
        (command for command in commands if _has_launcher(command[0])), commands[-1]
    )
    notes += _iterate_notes(argv, [parts for parts, _ in commands])
    return InnerCommand(argv=argv, folder=folder, env=exported, notes=tuple(notes))


def _iterate_notes(
    chosen_command: Sequence[str], commands: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield notes on the commands that were not chosen, and on unknown variables in the chosen
    command.
    """
    yield from (
        f"CHECK: not in the job: {shlex.join(parts)}"
        for parts in commands
        if parts != chosen_command
    )
    if unknown := [word for word in chosen_command if "$" in word or "`" in word]:
        yield f"CHECK: not known, replace by their values: {' '.join(unknown)}"


def _iterate_commands(text: str) -> Iterator[str]:
    """Yield each command of a shell text, without comments. Line ends, `;` and `&&` outside of
    quotes separate them.

    An array of several lines is one command. A quote that is never closed is an ordinary character.
    """
    command = ""
    begin = 0
    is_array = False
    for match in TEXT_PART.finditer(text):
        command += text[begin : match.start()]
        begin = match.end()
        match match.lastgroup:
            case "joined":
                command += " "
            case "end" if is_array:
                command += " "
            case "end":
                yield command.strip()
                command = ""
            case "quoted" if match[0].startswith('"'):
                command += re.sub(r"\\\r?\n", "", match[0])
            case "array" | "close":
                is_array = match.lastgroup == "array"
                command += match[0]
            case "quoted" | "escaped":
                command += match[0]
    yield (command + text[begin:]).strip()


def _has_launcher(argv: Sequence[str]) -> bool:
    modules = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
    return any(get_program_name(word) in STARTERS or word in modules for word in argv)


def _find_variable_value(
    match: re.Match[str], variables: Env, arrays: Mapping[str, Sequence[str]]
) -> str:
    """Return the value of the shell variable that `match` has matched; the unchanged text where it
    is not known.
    """
    name = match["braced"] or match["bare"]
    arguments = arrays["@"]
    if name is None:
        return match[0]
    if name in ("@", "*"):
        return shlex.join(arguments[int(match["first"] or 1) - 1 :])
    if name.endswith("]"):
        elements = arrays.get(name.replace("*", "@"))
        return match[0] if elements is None else shlex.join(elements)
    text = variables.get(name)
    if name.isdecimal() and 0 < int(name) <= len(arguments):
        text = arguments[int(name) - 1]
    default = match["default"]
    return text or (match[0] if default is None else default.strip("\"'"))


def _fill_variables(line: str, variables: Env, arrays: Mapping[str, Sequence[str]]) -> str:
    """Return a line of shell with `$NAME`, `${NAME:-default}`, `$1`, `$@` and `${NAME[@]}` replaced
    where known.

    `arrays` has the script's arguments under "@". Text in single quotes, and escaped characters,
    are unchanged.
    """

    def value(match: re.Match[str]) -> str:
        if match["double"] is not None:
            inner = match["double"][1:-1]
            whole = VARIABLE.fullmatch(inner)
            if whole is not None and (whole["braced"] or whole["bare"] or "").endswith(("@", "@]")):
                return value(whole)
            return f'"{VARIABLE.sub(value_in_quotes, inner)}"'
        return _find_variable_value(match, variables, arrays)

    def value_in_quotes(match: re.Match[str]) -> str:
        # an apostrophe in double quotes quotes nothing
        if match[0].startswith("'"):
            return f"'{VARIABLE.sub(value_in_quotes, match[0][1:])}"
        return value(match)

    return VARIABLE.sub(value, line)


def _parse_sbatch_options(text: str) -> dict[str, str]:
    """Return {long name: value} of the options in the #SBATCH lines of a batch file."""
    lines = (
        line.removeprefix("#SBATCH") for line in text.splitlines() if line.startswith("#SBATCH")
    )
    return {
        name: value
        for line in lines
        for name, value in iterate_slurm_options_and_values(split_line(line))
    }
