"""Runs a project's job file from `jobs/` with tiny weights and data, and tells what happened in every attempt."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from orchestrator.backends.mlflow.contact import EXPERIMENT
from orchestrator.backends.mlflow.tracker import MlflowTracker
from orchestrator.backends.ports import Lookups
from orchestrator.scheduling.reports.advice import advise_after_failure
from orchestrator.specs.actions import Record
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import parse_job
from orchestrator.specs.preset_file import merge_preset_file
from orchestrator.specs.yaml_text import read_document
from tests import fake_card
from tests.seeds import latentsync, musicgen, orpheus, parler, rvc
from tests.seeds.checkouts import JOBS, Broken, build_environment, find_checkout, name_commit
from tests.trainers.driver import Drive, card_cluster, cluster, log, story

SITE = Path(__file__).parent / "site"
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
MAKE_TIMEOUT_S = 1800.0
ROW_PROCESSOR_LIMIT_S = 1200.0  # of a run's attempts together: on a busy machine it stays the same
ATTEMPT_TIMEOUT_S = 3600.0  # of a clock, for what waits and computes nothing


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of a project: its place, device sizes and edits, and what has to come of it."""

    where: str  # "virtual" or "fake card"
    mib: tuple[int, ...]  # of each device
    options: Mapping[str, str]  # (option of the command: its new value; {...} are filled)
    sizes: Mapping[str, Any]  # (dotted key of the job file: new value)
    story: tuple[str, ...]  # outcome of each attempt
    end: str  # pattern that the whole of the row's `ended` matches
    resumed: str = "-"  # the row's
    note: str = ""  # for people: what differs from the project's other cases
    # step before which `orc rehearse` raises an out-of-memory error in rank 0; 0: none is rehearsed
    fails_at: int = 0

    @property
    def place(self) -> str:
        """Where it runs, and what differs there."""
        return ", ".join(filter(None, [self.where, self.note]))

    @property
    def devices(self) -> str:
        """The number of devices and their size."""
        return f"{len(self.mib)} x {'/'.join(map(str, sorted(set(self.mib))))} MiB"


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
    processor_s: int
    advice: str  # what a person can do, of a job that failed
    wrong: str  # what came otherwise than the case says; "" for nothing


CASES = [(project, Case(**fields)) for project in PROJECTS for fields in project.CASES]


def name_of(project: ModuleType) -> str:
    """The project's name on the command line."""
    return project.__name__.rpartition(".")[2]


def edited(
    project: ModuleType, case: Case, paths: Mapping[str, str], env: Mapping[str, str]
) -> JobSpec:
    """The job file with `case`'s sizes, and with `paths` in its braces; nothing else of it may change."""
    file = JOBS / project.JOB

    def read_beside(name: str) -> str:
        return (file.parent / name).read_text()

    data = dict(merge_preset_file(read_document(file.read_text(), str(file)), read_beside).data)
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


def run(
    project: ModuleType,
    case: Case,
    folder: Path,
    change: Callable[[Path], object] | None = None,
) -> Row:
    """Make the weights, drive the job to its end, put it into MLflow and find it there.

    `change` may change the copy of the checkout before the job starts. Raises Missing, Broken and
    Overrun.
    """
    source = find_checkout(project)
    python = build_environment(project, source.parent)
    began_s = time.monotonic()
    copy, made, home = folder / project.CHECKOUT, folder / "made", folder / "home"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git", ".venv"))
    made.mkdir()
    site = os.pathsep.join([str(copy), str(SITE)])
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"),
        "TORCH_HOME": str(folder / "torch"),
        "MPLCONFIGDIR": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
        # ffmpeg is called by its name
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
    }
    _make(project, python, made, copy, {**os.environ, **offline, "PYTHONPATH": site, "USER": "orc"})
    if change is not None:
        change(copy)
    if case.where == "virtual":
        env, nodes = {"PYTHONPATH": site}, cluster(f"{case.mib[0]}MiB", len(case.mib))
    else:
        try:
            env = fake_card.environment(folder, case.mib)
        except pytest.skip.Exception as lack:
            raise Broken(str(lack)) from lack
        nodes = card_cluster(env)
        env["PYTHONPATH"] = os.pathsep.join([site, env["PYTHONPATH"]])
    paths = {"python": str(python), "made": str(made), "checkout": str(copy)}
    spec = edited(project, case, paths, {**offline, **env})
    drive = Drive(home, nodes, ATTEMPT_TIMEOUT_S, ROW_PROCESSOR_LIMIT_S)
    fault = Fault(kind=FaultKind.OOM, rank=0, step=case.fails_at) if case.fails_at else None
    job = drive.run(spec, fault)
    lookups = Lookups(
        state=lambda: drive.drive.scheduler.state, job=lambda _: job, sweep=lambda _: None
    )
    uri = f"sqlite:///{folder}/mlflow.db"
    MlflowClient(uri).create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
    steps = [_started_at(project, log(home, attempt.number)) for attempt in job.attempts[1:]]
    row = Row(
        project=project.CHECKOUT,
        commit=name_commit(project, source),
        where=case.place,
        devices=case.devices,
        attempts=tuple(_attempt(job, index) for index in range(len(job.attempts))),
        resumed=", ".join(filter(None, steps)) or "-",
        ended=_ended(job),
        mlflow=_tracked(job, MlflowTracker(uri, home, lookups), uri),
        wall_s=round(time.monotonic() - began_s),
        processor_s=round(drive.processor_s),
        advice=advise_after_failure(job.attempts[-1].failure)
        if job.status is JobStatus.FAILED
        else "",
        wrong="",
    )
    return replace(row, wrong=_wrong(case, row, story(job)))


def _make(project: ModuleType, python: Path, made: Path, copy: Path, env: dict[str, str]) -> None:
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
        raise Broken(f"its tiny weights were not made in {MAKE_TIMEOUT_S:.0f} s") from slow
    if making.returncode:
        last = making.stderr.strip().rpartition("\n")[2]
        raise Broken(f"its tiny weights cannot be made: {last}")


def _ended(job: Job) -> str:
    if job.asks:
        return f"asks: {job.asks}"
    state = "job failed" if job.status is JobStatus.FAILED else job.status
    return f"{state}: {job.reason}".removesuffix(": finished")


def _wrong(case: Case, row: Row, outcomes: Sequence[str]) -> str:
    """What of the run is not as the case says."""
    wrong = []
    if tuple(outcomes) != case.story:
        wrong.append(f"the attempts are {', '.join(outcomes)}, not {', '.join(case.story)}")
    if not re.fullmatch(case.end, row.ended, re.S):
        wrong.append(f"its end is not {case.end!r}")
    if row.resumed != case.resumed:
        wrong.append(f"resumed at {row.resumed}, not {case.resumed}")
    ends = ["finished" if outcome == "finished" else "failed" for outcome in outcomes]
    tracked = ", ".join(f"{number}: {end}" for number, end in enumerate(ends, start=1))
    if not row.mlflow.endswith(tracked) or not row.mlflow.startswith("job: "):
        wrong.append(f"MLflow lacks an attempt of {tracked}")
    return "; ".join(wrong)


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
