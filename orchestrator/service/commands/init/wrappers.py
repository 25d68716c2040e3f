"""Strips assignments, wrappers, shell scripts and batch files from the front of a training command.

One grammar for all: a wrapper has options with and without a value, and then the command. A wrapper that is not in the
table stays in the command as typed, and is marked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from pathlib import Path

from orchestrator.service.commands.init.meanings import find_quantity_and_count
from orchestrator.service.commands.init.shell_text import (
    ASSIGNMENT,
    SHELLS,
    find_inner_command,
    find_shell_text,
    starts_training,
)
from orchestrator.service.commands.init.slurm import (
    SlurmOptions,
    count_ranks_and_devices,
    iterate_slurm_notes,
    iterate_slurm_options_and_values,
)
from orchestrator.service.commands.init.vocabulary import VOCABULARY
from orchestrator.service.notes import Notes
from orchestrator.specs.command_line import Argv, Env
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.trainer import get_program_name

DEPTH_MAX = 16  # wrappers in each other
SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)$")
# Variables that each plan sets for its ranks (backends/attempts/launch_request.py).
PLANNED = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
WRAPPERS: dict[str, list[str]] = VOCABULARY["wrappers"]
ENVIRONMENTS = (
    "uv",
    "poetry",
    "pdm",
    "pipenv",
    "hatch",
    "rye",
    "pixi",
    "conda",
    "mamba",
    "micromamba",
)


@frozen
class Unwrapped:
    """A command without its wrappers (`env`, `srun`, a shell script), and the settings that they
    gave.
    """

    argv: Argv
    folder: Path
    env: Env = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    prefix: Argv = ()  # an unknown wrapper, which stays
    environment: Argv = ()  # words of the tool that chooses an interpreter
    ranks: int | None = None  # processes that srun or an unknown wrapper starts
    devices: int | None = None  # that Slurm gives, or CUDA_VISIBLE_DEVICES shows
    name: str | None = None
    slurm: SlurmOptions = field(default_factory=dict)  # options of sbatch and srun
    notes: Notes = ()


def unwrap_command(argv: Sequence[str], folder: Path) -> Unwrapped:
    """Return the training command inside assignments of variables, wrappers, shell scripts and
    batch files.

    Raises SpecError for a shell script without a training command.
    """
    env = dict[str, str]()
    notes = list[str]()
    slurm = dict[str, str]()
    prefix = Argv()
    environment = Argv()
    rest = tuple(argv)
    has_srun = False
    for _ in range(DEPTH_MAX):
        if not rest:
            break
        if match := ASSIGNMENT.fullmatch(rest[0]):
            env[match[1]] = match[2]
            rest = rest[1:]
            continue
        name = get_program_name(rest[0])
        script = find_shell_text(rest, folder, slurm)
        if script is not None:
            inner = find_inner_command(script, folder, env, slurm)
            rest = inner.argv
            folder = inner.folder
            notes += [f"Read from `{script.label}`", *inner.notes]
            env |= inner.env
            continue
        key = name if name in WRAPPERS else " ".join((name, *rest[1:2]))
        if key in WRAPPERS:
            wrapper, rest = _split_wrapper_and_command(key, rest)
            if name == "srun":
                has_srun = True
                slurm |= dict(iterate_slurm_options_and_values(wrapper[1:]))
            environment = wrapper if name in ENVIRONMENTS else environment
            notes.append(f"Taken off the command: {shlex.join(wrapper)}")
            continue
        start = _find_training_word(rest)
        if start and not prefix and not starts_training(rest[0]):
            prefix = rest[:start]
            rest = rest[start:]
            notes.append(
                f"CHECK: not known what `{shlex.join(prefix)}` does: it stays before the command"
            )
            break
        break
    secrets = _drop_unusable_variables(env, notes)
    tasks, devices = count_ranks_and_devices(slurm)
    notes += iterate_slurm_notes(slurm)
    planned = {name: env.pop(name) for name in PLANNED if name in env}
    notes += [f"Each plan sets this itself: {name}={value}" for name, value in planned.items()]
    visible = [
        number for number in planned.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.strip()
    ]
    return Unwrapped(
        argv=rest,
        folder=folder,
        env=env,
        secrets=secrets,
        prefix=prefix,
        environment=environment,
        ranks=tasks if has_srun and tasks > 1 else _count_prefix_ranks(prefix),
        devices=devices if devices is not None else len(visible) or None,
        name=slurm.get("--job-name"),
        slurm=slurm,
        notes=tuple(notes),
    )


def _drop_unusable_variables(env: dict[str, str], notes: list[str]) -> tuple[str, ...]:
    """Remove secrets, and variables whose value is unknown, from `env`; return the names of the
    secrets.

    A note is added to `notes` for each variable of unknown value.
    """
    secrets = tuple(variable for variable in env if SECRET.search(variable))
    for variable in secrets:
        del env[variable]
    for variable in [variable for variable, value in env.items() if "$" in value or "`" in value]:
        notes.append(
            f"CHECK: not in the job, since its value is not known: {variable}={env.pop(variable)}"
        )
    return secrets


def _count_prefix_ranks(prefix: Sequence[str]) -> int | None:
    """Return the number of ranks in the options of an unknown wrapper or an MPI starter; None
    without such an option.
    """
    counts_n = bool(prefix) and get_program_name(prefix[0]) in ("mpirun", "mpiexec", "composer")
    for option, value in pairwise(prefix):
        name, equals, text = option.partition("=")
        means_ranks = (
            name.startswith("-") and (find_quantity_and_count(name) or ("", ""))[0] == "ranks"
        )
        if (means_ranks or name == "-np" or (name == "-n" and counts_n)) and (
            text if equals else value
        ).isdecimal():
            return int(text if equals else value) or None
    return None


def _split_wrapper_and_command(wrapper: str, argv: Argv) -> tuple[Argv, Argv]:
    """Return (the wrapper with its options, the command after it)."""
    index = len(wrapper.split())
    while index < len(argv) and argv[index].startswith("-"):
        option = argv[index]
        index += 1
        if option == "--":
            break
        # srun has a hundred options, most with a value: one that is not listed takes what cannot
        # start a command.
        following = argv[index] if index < len(argv) else "-"
        is_value = wrapper == "srun" and option.startswith("--") and not _is_command(following)
        if "=" not in option and (
            option in WRAPPERS[wrapper] or (is_value and _find_training_word(argv[index:]))
        ):
            index += 1
    index += VOCABULARY["words_before_command"].get(wrapper, 0)
    return argv[:index], argv[index:]


def _is_command(word: str) -> bool:
    """Return whether a word may be the start of a command, and not the value of the option before
    it.

    After an option that no table lists, any word is taken as that option's value.
    """
    names = {*SHELLS, *(key.split()[0] for key in WRAPPERS)}
    is_named = starts_training(word) or get_program_name(word) in names or word.endswith(".sh")
    return is_named or word.startswith("-") or ASSIGNMENT.fullmatch(word) is not None


def _find_training_word(argv: Sequence[str]) -> int:
    """Return the index of the first word that starts a training; 0 if there is none after the first
    word.
    """
    return next((index for index, word in enumerate(argv) if index and starts_training(word)), 0)
