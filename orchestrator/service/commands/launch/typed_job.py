"""A typed command as a job: what runs first is its argv, and a restart differs from that in its knobs only."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.backends.attempts.launch_request import GUARD, RankRequest
from orchestrator.service.commands.init.proposal import UNKNOWN_BATCH, Proposal, read_proposal
from orchestrator.service.commands.init.wrappers import unwrap_command
from orchestrator.service.intake.intake import read_job
from orchestrator.service.notes import Notes
from orchestrator.specs.command_line import Argv, Env
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.frameworks import take_flag_from
from orchestrator.specs.job.sections import Retries
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Knob, Success, is_python
from orchestrator.specs.parse import parse_job

FILE_BYTES_MAX = 2**24  # of a script or configuration whose content is a part of a line's identity
JOB_FILES = (".yaml", ".yml")
# A signal that ended the script alone came from a person as likely as from a host.
RETRIES = Retries(preemption=2)
CONFIGURATIONS = (".py", ".json", ".toml", *JOB_FILES)


@frozen
class TypedJob:
    """A typed command as a job. `argv` is the command as typed; None if a job file was given."""

    spec: JobSpec
    argv: Argv | None
    lead: Argv = ()  # wrappers before the program, which stay
    python: str | None = None  # the typed word of its interpreter
    output: str | None = None  # its output folder, where that is known
    hints: str = ""  # flags of a command that no plan changes, by which it may need less memory
    logs_itself: bool = True  # to MLflow; a command that cannot be read may
    notes: Notes = ()


def read_typed_job(command: Sequence[str], folder: Path, device_count: int, home: Path) -> TypedJob:
    """Return the job of a typed command, or of a job file. Raises SpecError only for a wrong job
    file.

    A command that cannot be read becomes a job without knobs (settings that plans may change). It
    runs as typed, and nothing is refused.
    """
    if len(command) == 1 and command[0].endswith(JOB_FILES) and (folder / command[0]).is_file():
        spec = read_job(folder / command[0], [("probe", "never")], home)
        return TypedJob(spec=spec, argv=None, logs_itself=False)
    argv = tuple(command)
    if argv[0].endswith(".py") and not os.access(folder / argv[0], os.X_OK):
        argv = ("python", *argv)
    hints = ""
    note = ""
    try:
        proposal = read_proposal(argv, folder, {})
        hints = _suggest_flags(proposal)
        return _read_proposed(argv, folder, device_count, proposal)
    except SpecError as error:
        note = str(error).splitlines()[0]
    except (
        Exception
    ) as error:  # a fault in reading other people's text keeps no command from running
        note = f"{type(error).__name__}: {error}"
    notes = (f"runs as typed, and no plan changes it: {note}",)
    return TypedJob(spec=make_job_without_knobs(argv, folder), argv=argv, hints=hints, notes=notes)


def _suggest_flags(proposal: Proposal) -> str:
    """Return flags with which the command needs less memory, such as half the batch size with twice
    the accumulation.

    It is "" where they are unknown.
    """
    hints = list[str]()
    knobs = proposal.bare.knobs
    for name, factor in (("micro_batch_size", 0.5), ("gradient_accumulation_steps", 2)):
        knob = knobs.get(name)
        if isinstance(knob, Mapping) and "flag" in knob and "default" in knob:
            hints.append(f"{knob['flag']} {max(1, int(knob['default'] * factor))}")
    knob = knobs.get("activation_checkpointing")
    if isinstance(knob, Mapping) and "switch" in knob:
        hints.append(str(knob["switch"]))
    return " ".join(hints)


def make_job_without_knobs(argv: Argv, folder: Path) -> JobSpec:
    """Return a job without knobs (settings that plans may change), so that every plan runs the
    command as typed.
    """
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(argv[0]).name.lower()).strip("-._")[:63] or "job"
    return JobSpec(
        name=name,
        command=argv,
        workdir=str(folder),
        launch="self",
        global_batch_size=1,
        probe="never",
        retries=RETRIES,
    )


def _read_proposed(argv: Argv, folder: Path, device_count: int, proposal: Proposal) -> TypedJob:
    """Return the job that `orc init` would propose for the command, with the typed output folder.
    Raises SpecError.
    """
    has_batch = "\nglobal_batch_size:" in proposal.text
    text = proposal.text if has_batch else f"{proposal.text}{UNKNOWN_BATCH}\n"
    ranks = proposal.bare.ranks or 1
    spec = parse_job(text, "the command", [("probe", "never"), ("gpus", str(ranks))])
    inner = unwrap_command(argv, folder)
    tail = (*inner.prefix, *inner.argv)
    if argv[len(argv) - len(tail) :] != tail:
        what = "its training command stands in a script of a shell, where no plan changes it"
        raise SpecError(what, source="orc launch")
    if ranks > device_count:
        raise SpecError(f"it starts {ranks} ranks on {device_count} devices", source="orc launch")
    output, typed_output = _find_output_folder_and_arguments(proposal, spec.knobs.output_dir)
    changes: dict[str, object] = {
        "command": (*proposal.bare.command, *typed_output),
        "success": Success(),  # the exit code alone, as of the bare command
        "env": tuple(inner.env.items()),
        "retries": RETRIES,
    }
    if output is not None:
        begin = glob.escape(output.rstrip("/"))
        patterns = tuple(
            pattern if os.path.isabs(pattern) else f"{begin}/{pattern}"
            for pattern in spec.resume.checkpoints
        )
        changes["resume"] = spec.resume.model_copy(update={"checkpoints": patterns})
    changes["knobs"] = spec.knobs.model_copy(update={"output_dir": None})
    return TypedJob(
        spec=spec.model_copy(update=changes),
        argv=argv,
        lead=argv[: len(argv) - len(tail)],
        python=inner.argv[0] if is_python(inner.argv[0]) and not inner.prefix else None,
        output=output,
        logs_itself=_may_log_to_mlflow(proposal, argv),
        notes=tuple(note for note in proposal.bare.notes if note.startswith("CHECK")),
    )


def _may_log_to_mlflow(proposal: Proposal, argv: Sequence[str]) -> bool:
    """Return whether a script may log to MLflow: by its imports or words, or because its trainer
    does so.
    """
    script = proposal.script
    named = any("mlflow" in word.lower() for word in (*script.imports, *argv))
    return named or (script.training_arguments is not None and "--report_to" not in argv)


def _find_output_folder_and_arguments(
    proposal: Proposal, knob: Knob | None
) -> tuple[str | None, Argv]:
    """Return (output folder or None if unknown, the typed arguments that set it)."""
    if knob is None:
        return None, ()
    typed = proposal.typed.command[proposal.typed.arguments :]
    if knob.flag is not None:
        value, _ = take_flag_from(typed, knob.flag)
        if value is not None:
            return value, (knob.flag, value)
        defaults = (flag.default for flag in proposal.script.flags if flag.name == knob.flag)
        default = next(defaults, None)
        return (default if isinstance(default, str) else None), ()
    for word in reversed(typed):
        if word.startswith(f"{knob.override}="):
            return word.partition("=")[2], (word,)
    return None, ()


def make_restart_argv(
    request: RankRequest, spec: JobSpec, wrappers: Sequence[str], python: str | None
) -> Argv:
    """Return the command of a restart: wrappers and interpreter as typed; environment variables
    alone start the guard.

    An interpreter that ignores these variables (-I, -E, -S) runs the guard by its path.
    """
    argv = request.argv
    if str(GUARD) in argv:
        place = argv.index(str(GUARD))
        flags = "".join(word for word in argv[1:place] if re.fullmatch("-[A-Za-z]+", word))
        if not {"I", "E", "S"} & set(flags):
            argv = (*argv[:place], *argv[place + 3 :])
    if python is not None and spec.launch in ("ranks", "self"):
        argv = (python, *argv[1:])
    return (*wrappers, *argv)


def compute_command_digest(command: Sequence[str], folder: Path, environment: Env) -> str:
    """Return the digest that names a command line's records: of its folder, its words, and its
    place in a Slurm array.
    """
    parts = (str(folder), environment.get("SLURM_ARRAY_TASK_ID", ""), *command)
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def compute_named_files_digest(command: Sequence[str], folder: Path) -> str:
    """Return the digest of the contents of the scripts and configuration files that a command
    names.
    """
    digest = hashlib.sha256()
    for path in _iterate_named_files(command, folder):
        with path.open("rb") as file:
            digest.update(file.read(FILE_BYTES_MAX))
    return digest.hexdigest()[:16]


def _iterate_named_files(command: Sequence[str], folder: Path) -> Iterator[Path]:
    for word in command:
        for name in (word, word.rpartition("=")[2], f"{word.replace('.', '/')}.py"):
            path = folder / name
            if name.endswith(CONFIGURATIONS) and len(name) < 1024 and path.is_file():
                yield path
