"""Lists of job files with submission times, for `orc simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from orchestrator.backends.simulated.traces import Arrival, Trace, make_trace
from orchestrator.service.intake.intake import find_local_time_zone, read_jobs, read_text
from orchestrator.service.server.sweeps.trials import list_remaining_trials
from orchestrator.specs.clock import Deadline, parse_deadline
from orchestrator.specs.errors import SpecError
from orchestrator.specs.fields import Seconds
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import validate_document
from orchestrator.specs.replace import replace
from orchestrator.specs.spec_model import SpecModel
from orchestrator.specs.yaml_text import read_document


def _parse_begin_time(raw: object) -> Deadline:
    try:
        moment = parse_deadline(raw)
    except ValueError:
        moment = None
    if moment is None or moment.day is None:
        allowed = "2026-11-23T18:00, 2026-11-23T18:00 Europe/Berlin or 2026-11-23T18:00+01:00"
        raise SpecError("not a day and a time", allowed=allowed)
    return moment


class _Entry(SpecModel):
    """An entry of a job list: a job file with the time of its submission."""

    file: str
    at_s: Seconds = Field(default=0.0, alias="at")


class _JobList(SpecModel):
    """A list of job files, with the date and time from which their submission times count."""

    jobs: tuple[_Entry, ...]
    begins: Annotated[Deadline, BeforeValidator(_parse_begin_time)] | None = None


def read_job_list(list_file: Path, home: Path) -> Trace:
    """Return the trace of a file with `begins: 2026-11-23T18:00` and `jobs: [{at: 10min, file:
    job.yaml}, ...]`.

    Files are relative to the list. Jobs of one file, and files with the same `at`, are submitted
    together; `at` defaults to the list's begin. A sweep has all its trials. Only hours and
    deadlines need `begins`. Raises SpecError.
    """
    source = str(list_file)
    listed = validate_document(_JobList, read_document(read_text(list_file), source))
    if not listed.jobs:
        raise SpecError("the list has no jobs", source=source, path="jobs")
    begins_s = (
        None
        if listed.begins is None
        else replace(
            listed.begins, zone=listed.begins.zone or find_local_time_zone()
        ).compute_due_s(0.0)
    )
    submissions = [
        (entry.at_s, spec, f"{source}: jobs.{index}")
        for index, entry in enumerate(listed.jobs)
        for spec in read_jobs(list_file.parent / entry.file, (), home)
    ]
    first_s = min(at_s for at_s, _, _ in submissions)
    arrivals = list[Arrival]()
    to_come = dict[str, tuple[Arrival, ...]]()
    for number, (at_s, spec, where) in enumerate(submissions):
        specs = (
            (spec,)
            if spec.trial is None
            else list_remaining_trials(spec, f"{spec.name}#{number}", home)
        )
        first, *rest = (_make_arrival(trial, at_s, first_s, begins_s, where) for trial in specs)
        arrivals.append(first)
        if spec.trial is not None:
            to_come[f"{spec.name}#{number}"] = tuple(rest)
    date_s = None if begins_s is None else begins_s + first_s
    return replace(make_trace(list_file.stem, arrivals), trials=to_come, begins_s=date_s)


def _make_arrival(
    spec: JobSpec,
    submitted_at_s: float,
    first_submitted_at_s: float,
    list_begins_s: float | None,
    file_name: str,
) -> Arrival:
    """Return the arrival of a job of the list in a simulation.

    Its start window counts from the first arrival, its deadline from the list's begin. `file_name`
    is for errors.
    """
    if spec.optimizer_steps is None:
        raise SpecError(
            "the job's length is not known", source=file_name, path="steps", hint="set `steps`"
        )
    if spec.start_window is None and spec.deadline is None:
        return Arrival(at_s=submitted_at_s, spec=spec)
    if list_begins_s is None:
        hint = "set `begins` in the list, such as `begins: 2026-11-23T18:00`"
        key = "start_window" if spec.start_window is not None else "deadline"
        raise SpecError(
            "the list does not say when it begins", source=file_name, path=key, hint=hint
        )
    between = (
        None
        if spec.start_window is None
        else spec.start_window.shift_to_start_at(list_begins_s + first_submitted_at_s)
    )
    deadline_s = (
        None
        if spec.deadline is None
        else spec.deadline.compute_due_s(list_begins_s + submitted_at_s) - list_begins_s
    )
    if deadline_s is not None and deadline_s <= submitted_at_s:
        raise SpecError(
            "the deadline is over", source=file_name, path="deadline", got=str(spec.deadline)
        )
    return Arrival(
        at_s=submitted_at_s,
        spec=spec.model_copy(update={"start_window": between, "deadline": None}),
        deadline_s=deadline_s,
    )
