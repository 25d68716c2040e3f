"""Reads job and cluster files from disk, with absolute paths. A bad file gives one SpecError."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from importlib.util import find_spec
from operator import getitem
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import yaml

from orchestrator.backends.attempts.program import find_start_problem
from orchestrator.backends.environment import make_base_variables
from orchestrator.memory.profiles import is_memory_known
from orchestrator.service.intake.git import read_code_source
from orchestrator.service.intake.hub import CONFIG, load_hub_config, make_hint_for_unknown_model
from orchestrator.service.intake.profiling import TraceScope, trace_model
from orchestrator.specs.clock import check_time_zone, parse_deadline, parse_window
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.model import ModelSpec
from orchestrator.specs.job.paths import KINDS_OF_FILES, list_paths
from orchestrator.specs.job.pins import SHORT
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import is_python, replace_interpreter
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.parse import (
    Override,
    apply_remedy,
    join_problems,
    parse_cluster,
    parse_job,
    parse_jobs,
)
from orchestrator.specs.replace import replace
from orchestrator.specs.run import DEFAULT_HOME

OWN_PYTHON = ("python", "python3")
FINETUNE = ("transformers", "peft")  # that a rank of `model.hf` imports
NO_CONFIG = f"no {CONFIG} can be read"
EMBEDDED_CLUSTER = """\
name: two-virtual-devices
network_bandwidth: 1GB/s
nodes:
  - name: virtual
    devices: 2
    host_memory: 4GiB
    device:
      name: virtual-256MiB
      kind: virtual
      memory: 256MiB
      bf16_tflops: 0.02
      fp32_tflops: 0.05
      memory_bandwidth: 8GB/s
      link_bandwidth: 1GB/s
"""  # clusters/two-virtual-devices.yaml: an installed package lacks it
# Fields of a job that intake and scheduling fill in; a file must not set them.
LEARNED = {
    "traced": ("what is traced", "set `profile`"),
    "measured": ("what is measured", "set `profile`"),
    "relative_to": ("what outcomes are relative to", "set `profile`"),
    "source": ("the commit of the code", "it is that of the git work tree that the code is in"),
}
OF_SCRIPTS = (
    "training.optimizer",
    "training.clip_norm",
)  # what plans of a script follow of its training


@frozen
class ReadJob:
    """A job that was read from a file, with absolute paths, and the keys whose paths are on this
    machine.
    """

    spec: JobSpec
    local_keys: frozenset[
        str
    ]  # keys whose paths are of this machine; the others are of the service's


# a job file, or what one says, whose paths start at the current folder
JobSource = Path | Mapping[str, Any]


def read_job(
    file: JobSource,
    overrides: Sequence[Override] = (),
    cache_home: Path | None = None,
    *,
    to_run: bool = True,
    allow_other_machine: bool = False,
    trace_scope: Callable[[JobSpec], TraceScope] = lambda _: TraceScope(),
) -> JobSpec:
    """Return the job in a file; paths become absolute, relative to the file's folder. Raises
    SpecError.

    A model without a profile or formula is traced; the result is cached in `cache_home` (None: the
    environment's home). Only with `to_run`, its data, folder and programs must exist: a job for
    another machine can be planned without them. With `allow_other_machine`, absolute paths in the
    file may be those of another machine. `trace_scope` returns the plans for which to trace the
    model.
    """
    text, source, folder = _load_text_name_and_folder(file)
    spec = parse_job(text, source, overrides, lambda name: read_text(folder / name))
    _check_overrides(spec, overrides)
    read = _resolve_job(
        spec,
        source,
        folder,
        cache_home,
        to_run=to_run,
        allow_other_machine=allow_other_machine,
        trace_scope=trace_scope,
    )
    return _add_commits([read], folder)[0].spec if to_run else read.spec


def read_jobs(
    file: JobSource, overrides: Sequence[Override] = (), home: Path | None = None
) -> list[JobSpec]:
    """Return the jobs in a file: one job, or all members of an array. Everything else is as in
    `read_job`.
    """
    return [
        job.spec for job in read_jobs_for_service(file, overrides, home, is_other_machine=False)
    ]


def read_jobs_for_service(
    file: JobSource,
    overrides: Sequence[Override] = (),
    home: Path | None = None,
    *,
    only_one: bool = False,
    is_other_machine: bool = True,
) -> list[ReadJob]:
    """Return the jobs in a file for a service, which is on another machine unless
    `is_other_machine` is false.

    Absolute paths in the file are those of the service's machine. With `only_one`, an array is an
    error.
    """
    text, source, folder = _load_text_name_and_folder(file)
    parse = parse_job if only_one else parse_jobs
    parsed = parse(text, source, overrides, lambda name: read_text(folder / name))
    specs = [parsed] if isinstance(parsed, JobSpec) else parsed
    _check_overrides(specs[0], overrides)
    read = [
        _resolve_job(spec, source, folder, home, to_run=True, allow_other_machine=is_other_machine)
        for spec in specs
    ]
    return _add_commits(read, folder)


def _load_text_name_and_folder(file: JobSource) -> tuple[str, str, Path]:
    """Return (text, name for errors, folder to which its paths are relative) of a job file."""
    if isinstance(file, Path):
        return read_text(file), str(file), file.resolve().parent
    try:
        return json.dumps(dict(file)), "the job", Path.cwd()  # JSON is YAML
    except (TypeError, ValueError) as error:
        raise SpecError(f"not what a job file can say: {error}", source="the job") from None


def check_files(spec: JobSpec, job_source: str) -> None:
    """Raise SpecError where a file or folder that the job names does not exist on this machine."""
    problems = [
        *_iterate_errors_of_missing_files(spec, job_source),
        *_iterate_script_errors(spec, job_source, check_programs=False),
    ]
    if problems:
        raise join_problems(problems, job_source)


def check_packages(spec: JobSpec, job_source: str) -> None:
    """Raise SpecError where a Python package that every rank of the job imports is missing here."""
    if spec.is_script or spec.model is None or spec.model.hf is None:
        return
    if missing := [name for name in FINETUNE if find_spec(name) is None]:
        hint = "where the service runs: pip install 'orchestrator[finetune]'"
        raise SpecError(
            f"not installed here: {', '.join(missing)}",
            source=job_source,
            path="model.hf",
            hint=hint,
        )


def _check_overrides(spec: JobSpec, overrides: Sequence[Override]) -> None:
    """Raise SpecError where an override has no effect: no plan has that setting, or the script is
    not given it.
    """
    for key, value in overrides if spec.is_script else ():
        if key.startswith("training.") and key not in OF_SCRIPTS:
            raise SpecError(
                "nothing tells the script this",
                source="--set",
                path=key,
                got=value,
                allowed=", ".join(OF_SCRIPTS),
                hint="say it in `command`, or in the script's own config file",
            )
    key = "knobs.micro_batch_size.default"
    knob = spec.knobs.micro_batch_size
    default = knob.default if knob is not None and key in dict(overrides) else None
    if isinstance(default, int) and default > spec.global_batch_size:
        raise SpecError(
            "no plan has a micro-batch above the global batch",
            source="--set",
            path=key,
            got=default,
            allowed=f"at most global_batch_size={spec.global_batch_size}",
            hint=f"say `--set global_batch_size={default}` too; `--set plan.micro_batch_size=N` pins that of the plan",
        )


def _resolve_job(
    spec: JobSpec,
    source: str,
    folder: Path,
    cache_home: Path | None,
    *,
    to_run: bool,
    allow_other_machine: bool,
    trace_scope: Callable[[JobSpec], TraceScope] = lambda _: TraceScope(),
) -> ReadJob:
    for name, (what, hint) in LEARNED.items():
        if getattr(spec, name):
            raise SpecError(f"{what} is no setting", source=source, path=name, hint=hint)
    resolved = _make_paths_absolute(spec, folder)
    remote_keys = {key for key, _ in list_paths(resolved)} & {
        key for key, path in list_paths(spec) if path.startswith("/")
    }
    if not allow_other_machine:
        remote_keys.clear()
    problems = [
        problem
        for problem in _iterate_errors_of_missing_files(resolved, source)
        if (to_run or not problem.path.startswith("data."))
        and (problem.path not in remote_keys or problem.what == NO_CONFIG)
    ]
    problems += _iterate_errors_of_duplicate_knobs(resolved, source)
    for remedy in resolved.remedies:
        try:
            apply_remedy(resolved, remedy)
        except SpecError as error:
            problems.append(error)
    is_here = to_run or isdir(resolved.workdir or "")
    if is_here and "workdir" not in remote_keys:
        problems += _iterate_script_errors(
            resolved, source, check_programs=to_run and not allow_other_machine
        )
    if problems:
        raise join_problems(problems, source)
    local_keys = frozenset(key for key, _ in list_paths(resolved) if key not in remote_keys)
    model = resolved.known_model
    if model is not None and not is_memory_known(resolved):
        if isinstance(model.hf, str) and not model.config:
            path = f"{_find_job_key_of_model(spec)}.hf"
            raise SpecError(
                "the model's sizes are not known",
                source=source,
                path=path,
                got=model.hf,
                hint=make_hint_for_unknown_model(model.hf),
            )
        cache_home = cache_home or Path(os.environ.get("ORC_HOME", DEFAULT_HOME))
        resolved = resolved.model_copy(
            update={
                "traced": trace_model(
                    resolved, cache_home.expanduser(), source, trace_scope(resolved)
                )
            }
        )
    return ReadJob(spec=resolved, local_keys=local_keys)


def _add_commits(jobs: Sequence[ReadJob], folder: Path) -> list[ReadJob]:
    """Return the jobs with the git commits of their working directories, else of the job file's
    folder.
    """
    folders = {
        job.spec.workdir or str(folder)
        for job in jobs
        if job.spec.workdir is None or "workdir" in job.local_keys
    }
    commits = {path: read_code_source(Path(path)) for path in folders}
    return [
        replace(
            job,
            spec=job.spec.model_copy(
                update={"source": commits.get(job.spec.workdir or str(folder))}
            ),
        )
        for job in jobs
    ]


def read_cluster(path: Path | None) -> ClusterSpec:
    """Return the cluster in a file; with None, the built-in cluster of two virtual devices. Raises
    SpecError.
    """
    if path is None:
        return parse_cluster(EMBEDDED_CLUSTER, "the embedded cluster")
    cluster = parse_cluster(read_text(path), str(path))
    # a client that submits a job needs no tracker
    from orchestrator.backends.trackers import check_trackers

    check_trackers(cluster.trackers, str(path))
    return cluster


def read_options(settings: Sequence[str] | None, pins: str | None) -> tuple[Override, ...]:
    """Return the overrides of `--set`, followed by the pins of `--plan zero_stage=3,micro_batch=2`,
    as (key, value).

    Raises SpecError as `read_overrides`.
    """
    pairs = read_overrides(pins.split(",") if pins else None, "--plan")
    pinned = ((f"plan.{SHORT.get(key, key)}", value) for key, value in pairs)
    return (*read_overrides(settings), *pinned)


def read_overrides(
    settings: Sequence[str] | None, option_name: str = "--set"
) -> tuple[Override, ...]:
    """Return `key=value` texts as (key, value). Raises SpecError if a `=` is missing or a key is
    repeated.
    """
    pairs = [setting.partition("=") for setting in settings or ()]
    for key, equals, value in pairs:
        if not equals or not key:
            raise SpecError(
                "a setting is missing its `=`", source=option_name, got=key, allowed="key=value"
            )
        if sum(key == other for other, _, _ in pairs) > 1:
            raise SpecError("the setting is given twice", source=option_name, path=key, got=value)
    return tuple((key, value) for key, _, value in pairs)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises SpecError where it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError("the file does not exist", source=str(path)) from None
    except UnicodeDecodeError as error:
        raise SpecError("the file is not UTF-8 text", source=str(path), got=error.reason) from None
    except OSError as error:
        raise SpecError(f"the file cannot be read: {error.strerror}", source=str(path)) from None


def _make_paths_absolute(spec: JobSpec, folder: Path) -> JobSpec:
    files: JsonObject = {
        kind: tuple(str(_make_absolute(folder, file)) for file in getattr(spec.data, kind))
        for kind in KINDS_OF_FILES
    }
    tokenizer = _resolve_if_folder(folder, spec.data.tokenizer)
    changed: dict[str, object] = {"data": replace(spec.data, tokenizer=tokenizer, **files)}
    if spec.start_window is not None and spec.start_window.zone is None:
        changed["start_window"] = replace(spec.start_window, zone=find_local_time_zone())
    if spec.deadline is not None and spec.deadline.zone is None:
        changed["deadline"] = replace(spec.deadline, zone=find_local_time_zone())
    if spec.is_script or spec.workdir is not None:
        changed["workdir"] = str(_make_absolute(folder, spec.workdir or "."))
    if spec.python is not None and spec.command is not None:
        # not resolved: a virtual environment's interpreter is a link
        python = os.path.abspath(Path(str(changed["workdir"])) / Path(spec.python).expanduser())
        changed |= {"python": python, "command": replace_interpreter(spec.command, python)}
    if (
        spec.resume.before is not None
    ):  # its program may be beside the job's file, but it runs in `workdir`
        # not resolved: a virtual environment's interpreter is a link, and its target has other
        # packages
        command = [
            os.path.abspath(folder / word) if isfile(folder / word) else word
            for word in spec.resume.before
        ]
        changed["resume"] = spec.resume.model_copy(update={"before": tuple(command)})
    if spec.known_model is not None:
        model = _resolve_model(spec.known_model, folder, is_of_script=spec.is_script)
        changed[_find_job_key_of_model(spec)] = model
    return spec.model_copy(update=changed)


def _find_job_key_of_model(spec: JobSpec) -> str:
    """Return the job file's key that names the model of which the sizes must be known."""
    return "trains" if spec.is_script else "model"


def _resolve_model(model: ModelSpec, folder: Path, *, is_of_script: bool) -> ModelSpec:
    """Return the model with absolute paths and its published configuration.

    With `is_of_script`, the model's `config` in the job file may complete that configuration.
    """
    if model.factory is not None:
        file, colon, function = model.factory.rpartition(":")
        return (
            replace(model, factory=f"{_make_absolute(folder, file)}:{function}") if colon else model
        )
    if isinstance(model.hf, str):
        hf = str(_resolve_if_folder(folder, model.hf))
        folder_config = _read_folder_config(hf) if Path(hf).is_absolute() else {}
        completes = is_of_script and "model_type" not in model.config
        config = folder_config or ({} if completes else model.config)
        if not config and not Path(hf).is_absolute():
            config = load_hub_config(hf)
        return replace(model, hf=hf, config={**config, **model.config} if completes else config)
    return model


def add_time_zones(settings: Sequence[Override]) -> tuple[Override, ...]:
    """Return the settings, with this machine's time zone added to each `deadline` and
    `start_window` without one.
    """
    return tuple((key, _add_time_zone(key, value)) for key, value in settings)


def _add_time_zone(key: str, value: str) -> str:
    parse = {"deadline": parse_deadline, "start_window": parse_window}.get(key)
    try:
        moment: Any = parse(value.strip("'\"")) if parse is not None else None
    except ValueError:
        return value  # the service says what is wrong
    return (
        value
        if moment is None or moment.zone is not None
        else str(replace(moment, zone=find_local_time_zone()))
    )


def find_local_time_zone() -> str:
    """Return the name of this machine's time zone, from TZ or the link /etc/localtime, else UTC."""
    link_name = str(Path("/etc/localtime").resolve()).rpartition("zoneinfo/")[2]
    for name in (os.environ.get("TZ", "").removeprefix(":"), link_name):
        with suppress(ValueError):
            return check_time_zone(name)
    return "UTC"


def _make_absolute(base_folder: Path, path: str) -> Path:
    """Return the path as an absolute one. Raises SpecError where its `~user` does not exist."""
    try:
        return (base_folder / Path(path).expanduser()).resolve()
    except RuntimeError as error:  # no such user, or no home
        raise SpecError(
            str(error), source=str(base_folder), got=path, hint="write the path without ~"
        ) from None


def _resolve_if_folder(folder: Path, path_or_hub_name: str | None) -> str | None:
    """Return an absolute path if this is, or looks like, a folder; else the text unchanged, as a
    hub name. None stays None.
    """
    if path_or_hub_name is None or not (
        path_or_hub_name.startswith((".", "/", "~"))
        or isdir(_make_absolute(folder, path_or_hub_name))
    ):
        return path_or_hub_name
    return str(_make_absolute(folder, path_or_hub_name))


def _read_folder_config(folder: str) -> JsonObject:
    """Return the content of a model folder's config.json; {} if it cannot be read, which is
    reported elsewhere.
    """
    try:
        config = json.loads((Path(folder) / CONFIG).read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _iterate_errors_of_missing_files(spec: JobSpec, job_source: str) -> Iterator[SpecError]:
    for kind in KINDS_OF_FILES:
        for index, file in enumerate(getattr(spec.data, kind)):
            if not isfile(file):
                yield SpecError(
                    "the file does not exist",
                    source=job_source,
                    path=f"data.{kind}[{index}]",
                    got=file,
                )
    model = spec.known_model
    key = _find_job_key_of_model(spec)
    folders = {
        "data.tokenizer": spec.data.tokenizer,
        f"{key}.hf": model.hf if model is not None else None,
    }
    for path, folder in folders.items():
        if isinstance(folder, str) and folder.startswith("/") and not isdir(folder):
            yield SpecError("the folder does not exist", source=job_source, path=path, got=folder)
    hf = folders[f"{key}.hf"]
    if model is not None and isinstance(hf, str) and isdir(hf) and not model.config:
        hint = "use a folder as `save_pretrained` writes it"
        yield SpecError(NO_CONFIG, source=job_source, path=f"{key}.hf", got=hf, hint=hint)
    if model is not None and model.factory is not None:
        file, _, function = model.factory.rpartition(":")
        if not file or not function.isidentifier():
            form = "path/to/file.py:function"
            yield SpecError(
                "no function",
                source=job_source,
                path=f"{key}.factory",
                got=model.factory,
                allowed=form,
            )
        elif not isfile(file):
            yield SpecError(
                "the file does not exist", source=job_source, path=f"{key}.factory", got=file
            )


def _iterate_script_errors(
    spec: JobSpec, job_source: str, *, check_programs: bool
) -> Iterator[SpecError]:
    if spec.workdir is not None and not isdir(spec.workdir):
        yield SpecError(
            "the folder does not exist", source=job_source, path="workdir", got=spec.workdir
        )
    elif spec.command is not None and spec.workdir is not None:
        folder = Path(spec.workdir)
        files = [("script", "command", _find_script_path(spec.command, folder))]
        if spec.config is not None:
            files.append(("file", "config.file", spec.config.file))
            yield from _iterate_errors_of_missing_keys(spec, folder / spec.config.file, job_source)
        if check_programs:
            yield from _iterate_errors_of_missing_programs(spec, job_source)
        for kind, path, file in files:
            if file is not None and not isfile(folder / file):
                yield SpecError(
                    f"the {kind} does not exist",
                    source=job_source,
                    path=path,
                    got=file,
                    hint=f"write its path relative to `workdir`, here {folder}: it may have moved",
                )


def _iterate_errors_of_missing_programs(spec: JobSpec, job_source: str) -> Iterator[SpecError]:
    """Yield an error for each program of the job that cannot start here; a bare `python` is the
    service's own.
    """
    assert spec.command is not None, "only a script has programs"
    env = {**make_base_variables(), **dict(spec.env)}
    key = "command" if spec.python is None else "python"
    programs = {key: spec.command[0], "resume.before": (spec.resume.before or ("python",))[0]}
    for key, program in programs.items():
        problem = (
            None if program in OWN_PYTHON else find_start_problem(program, str(spec.workdir), env)
        )
        if problem is not None:
            what, places, hint = problem
            if key == "python":
                hint = "make the environment there, or name another one by `--set python=PATH`"
            yield SpecError(
                what,
                source=job_source,
                path=key,
                got=program,
                allowed=f"a program; tried {places}",
                hint=hint,
            )


def _iterate_errors_of_missing_keys(
    spec: JobSpec, file: Path, job_source: str
) -> Iterator[SpecError]:
    """Yield an error for each knob whose key the script's config file lacks: the script may not
    read that key.

    A file that is made of others (Hydra's `defaults`), or that cannot be read, is not judged.
    """
    try:
        content = yaml.safe_load(file.read_bytes())
    except (OSError, yaml.YAMLError):
        return
    for name, knob in spec.knobs.items():
        try:
            if knob.key and not spec.trainer and "defaults" not in content:
                reduce(getitem, knob.key.split("."), content)
        except (LookupError, TypeError):
            yield SpecError(
                "the file has no such key",
                source=job_source,
                path=f"knobs.{name}.key",
                got=knob.key,
                hint=f"write it as {file} has it, or add it there if the script reads it",
            )


def _find_script_path(command: Sequence[str], workdir: Path) -> str | None:
    """Return the path of the script that the command `python [-u ...] script.py` or `-m module`
    starts.

    None for other commands, and for a module of `workdir` that exists in any form.
    """
    program, *arguments = command
    if not is_python(program):
        return None
    first = next((argument for argument in arguments if not argument.startswith("-")), "")
    if "." in first and "-m" in arguments[: arguments.index(first)]:
        path = workdir / first.replace(".", "/")
        is_absent = isdir(path.parent) and not any(path.parent.glob(f"{path.name}*"))
        first = f"{path}.py" if is_absent else ""
    return first if first.endswith(".py") else None


def _iterate_errors_of_duplicate_knobs(spec: JobSpec, job_source: str) -> Iterator[SpecError]:
    """Yield an error for each knob whose flag or variable the job also sets itself: that would
    override the plan.
    """
    for name, knob in spec.knobs.items():
        word = knob.flag or knob.switch or knob.override
        if word and any(
            argument == word or argument.startswith(f"{word}=") for argument in spec.command or ()
        ):
            yield SpecError(
                "the flag of a knob is already in `command`",
                source=job_source,
                path=f"knobs.{name}",
                got=word,
                hint="remove it from `command`: it is added with the value of each plan; or remove the knob",
            )
        if knob.env and any(knob.env == variable for variable, _ in spec.env):
            yield SpecError(
                "the variable of a knob is already in `env`",
                source=job_source,
                path=f"knobs.{name}",
                got=knob.env,
                hint="remove it from `env`: it is set to the value of each plan; or remove the knob",
            )
