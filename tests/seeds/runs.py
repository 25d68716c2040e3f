"""Runs a project's job file from `jobs/` with tiny weights and data, and tells what happened in every attempt."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from mlflow import MlflowClient

from orchestrator.backends.mlflow.contact import EXPERIMENT
from orchestrator.backends.mlflow.tracker import MlflowTracker
from orchestrator.backends.ports import Lookups
from orchestrator.specs.actions import Record
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.parse import parse_job
from orchestrator.specs.preset_file import with_preset_file
from orchestrator.specs.yaml_text import read_document
from tests import fake_card
from tests.seeds import latentsync, musicgen, orpheus, parler, rvc
from tests.trainers.driver import Drive, card_cluster, cluster, log

HERE = Path(__file__).parent
JOBS = HERE.parents[1] / "jobs"
SITE = HERE / "site"
PROJECTS: tuple[ModuleType, ...] = (parler, orpheus, rvc, musicgen, latentsync)
# What an edit may change besides paths in the command: sizes of the model, its data, its devices
# and its guess.
SIZES = (
    "steps",
    "gpus",
    "global_batch_size",
    "profile",
    "trains",
    "data",
    "hang_timeout",
    "startup_timeout",
    "env",
    "plan",
)
MAKE_TIMEOUT_S = 240
ROW_TIMEOUT_S = 600.0  # of one run's attempts together


class Missing(Exception):
    """Why a project cannot be run here, for a person."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of a project: its place, device sizes and edits."""

    where: str  # "virtual" or "fake card"
    mib: tuple[int, ...]  # of each device
    options: Mapping[str, str]  # (option of the command: its new value; {...} are filled)
    sizes: Mapping[str, Any]  # (dotted key of the job file: new value)
    # step before which `orc rehearse` raises an out-of-memory error in rank 0; 0: none is rehearsed
    fails_at: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a run."""

    project: str
    commit: str
    where: str
    devices: str
    attempts: tuple[str, ...]
    resumed: str
    ended: str
    mlflow: str
    wall_s: int
    reason: str


def checkout(project: ModuleType) -> Path:
    """The project's checkout; raises Missing where SEEDS or the folder is not there."""
    if "SEEDS" not in os.environ:
        raise Missing("SEEDS names no folder of checkouts")
    folder = Path(os.environ["SEEDS"]).expanduser().absolute() / project.CHECKOUT
    if not folder.is_dir():
        raise Missing(f"SEEDS has no {project.CHECKOUT}")
    return folder


def interpreter(project: ModuleType) -> Path:
    """The Python of the project's environment: `.venv` of its checkout, else that of the folder of the checkouts."""
    folder = checkout(project)
    for python in (folder / ".venv/bin/python", folder.parent / ".venv/bin/python"):
        if python.exists():
            return python
    raise Missing(f"neither {project.CHECKOUT} nor SEEDS has a .venv with what the project needs")


def commit(project: ModuleType) -> str:
    """The commit that the job file names."""
    match = re.search(r" at ([0-9a-f]{7}) ", (JOBS / project.JOB).read_text())
    assert match is not None, project.JOB
    return match[1]


def edited(
    project: ModuleType, case: Case, paths: Mapping[str, str], env: Mapping[str, str]
) -> JobSpec:
    """The job file with `case`'s sizes, and with `paths` in its braces; nothing else of it may change."""
    file = JOBS / project.JOB

    def read_beside(name: str) -> str:
        return (file.parent / name).read_text()

    data = dict(with_preset_file(read_document(file.read_text(), str(file)), read_beside).data)
    for key, value in case.sizes.items():
        *above, last = key.split(".")
        is_batch_size = above[:1] == ["knobs"] and last in ("default", "also")
        assert is_batch_size or (*above, last)[0] in SIZES, key
        place = data
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    command = data["command"].split()
    data["python"] = paths["python"]
    for option, value in case.options.items():
        if option.endswith("="):  # key=value of Hydra, whose last wins
            command.append(option + value.format(**paths))
        else:
            command[command.index(option) + 1] = value.format(**paths)
    before = data.get("resume", {}).get("before", "").split()
    if before:
        data["resume"]["before"] = shlex.join(
            [paths["python"], str((JOBS / project.JOB).parent / before[1]), *before[2:]]
        )
    relative = Path(data["workdir"].removeprefix("~/")).relative_to(project.CHECKOUT)
    data |= {"command": shlex.join(command), "workdir": str(Path(paths["checkout"]) / relative)}
    data["env"] = {**data.get("env", {}), **env}
    return parse_job(yaml.safe_dump(data), project.JOB)


def run(project: ModuleType, case: Case, folder: Path) -> tuple[Row, Job]:
    """Make the weights, drive the job to its end, put it into MLflow and find it there; raises Missing and Overrun."""
    python, began_s = interpreter(project), time.monotonic()
    copy, made, home = folder / project.CHECKOUT, folder / "made", folder / "home"
    shutil.copytree(checkout(project), copy, ignore=shutil.ignore_patterns(".git", ".venv"))
    made.mkdir()
    site = os.pathsep.join([str(copy), str(SITE)])
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    offline |= {
        "HF_HOME": str(folder / "hf"),
        "MPLCONFIGDIR": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
    }
    offline["PATH"] = os.pathsep.join(
        [str(python.parent), os.environ["PATH"]]
    )  # audiocraft calls ffmpeg by its name
    env = {**os.environ, **offline, "PYTHONPATH": site, "USER": "orc"}
    argv = [str(python), str(project.__file__), str(made), str(copy)]
    try:
        making = subprocess.run(
            argv,
            env=env,
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
            timeout=MAKE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as slow:
        raise Missing(f"its tiny weights were not made in {MAKE_TIMEOUT_S} s") from slow
    if making.returncode:
        raise Missing(f"its tiny weights cannot be made: {making.stderr[-2000:]}")
    if case.where == "virtual":
        env, nodes = {"PYTHONPATH": site}, cluster(f"{case.mib[0]}MiB", len(case.mib))
    else:
        env = fake_card.environment(folder, case.mib)
        nodes = card_cluster(env)
        env["PYTHONPATH"] = os.pathsep.join([site, env["PYTHONPATH"]])
    paths = {"python": str(python), "made": str(made), "checkout": str(copy)}
    spec = edited(project, case, paths, {**offline, **env})
    drive = Drive(home, nodes, ROW_TIMEOUT_S)
    job = drive.run(
        spec, Fault(kind=FaultKind.OOM, rank=0, step=case.fails_at) if case.fails_at else None
    )
    lookups = Lookups(
        state=lambda: drive.drive.scheduler.state, job=lambda _: job, sweep=lambda _: None
    )
    uri = f"sqlite:///{folder}/mlflow.db"
    MlflowClient(uri).create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
    return _row(
        project, case, job, home, MlflowTracker(uri, home, lookups), uri, time.monotonic() - began_s
    ), job


def _row(
    project: ModuleType,
    case: Case,
    job: Job,
    home: Path,
    tracker: MlflowTracker,
    uri: str,
    wall_s: float,
) -> Row:
    steps = [_started_at(project, log(home, attempt.number)) for attempt in job.attempts[1:]]
    sizes = sorted(set(case.mib))
    return Row(
        project=project.CHECKOUT,
        commit=commit(project),
        where=case.where,
        devices=f"{len(case.mib)} x {'/'.join(map(str, sizes))} MiB",
        attempts=tuple(_attempt(job, index) for index in range(len(job.attempts))),
        resumed=", ".join(filter(None, steps)) or "-",
        ended=str(job.status),
        mlflow=_tracked(job, tracker, uri),
        wall_s=round(wall_s),
        reason=job.reason,
    )


def _started_at(project: ModuleType, text: str) -> str:
    match = re.search(project.RESUMED, text)
    return match[1] if match else ""


def _attempt(job: Job, index: int) -> str:
    attempt = job.attempts[index]
    plan, evidence = attempt.plan, attempt.evidence
    settings = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}, {plan.micro_batch_size} x "
    settings += f"{plan.gradient_accumulation_steps}"
    if plan.activation_checkpointing.value != "none":
        settings += ", checkpointing"
    if plan.zero_stage:
        settings += f", {plan.sharding}"
    settings += "".join(f", {phase} {size}" for phase, size in plan.phase_batch_sizes)
    done = max((beat.steps_done or 0 for beat in evidence.heartbeats), default=0) if evidence else 0
    peak = (
        max((beat.peak_bytes or 0 for beat in evidence.heartbeats), default=0) >> 20
        if evidence
        else 0
    )
    end = (
        f"{attempt.failure.kind} in {attempt.failure.phase or '?'}"
        if attempt.failure
        else "finished"
    )
    return f"{settings}: {end}, {done} steps, {peak} MiB"


def _tracked(job: Job, tracker: MlflowTracker, uri: str) -> str:
    """The runs of the job that MLflow holds: how many, and each attempt's outcome there."""
    tracker.send([(1, Record(job=job, attempt=job.last))])
    client = MlflowClient(uri)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(ids, f"tags.`orc.job_id` = '{job.id}'")
    numbers = sorted((int(run.data.tags["orc.attempt"]), run.info.status) for run in runs)
    return ", ".join(
        f"{number}: {status.lower()}" if number else f"job: {status.lower()}"
        for number, status in numbers
    )
