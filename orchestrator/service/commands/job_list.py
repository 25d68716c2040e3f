"""Lists of job files with submission times, for `orc simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.backends.simulated.traces import Arrival, Trace, trace_of
from orchestrator.service.intake.intake import local_zone, read_jobs, read_text
from orchestrator.service.server.sweeps.trials import trials_of
from orchestrator.specs.clock import parse_deadline
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.units import parse_seconds
from orchestrator.specs.yaml_text import read_document


def read_list(path: Path, home: Path) -> Trace:
    """Return the jobs of a file with `begins: 2026-11-23T18:00` and `jobs: [{at: 10min, file: job.yaml}, ...]`.

    Files are relative to the list. Jobs of one file, and files with the same `at`, are submitted together; `at`
    defaults to the list's begin. A sweep has all its trials. Only hours and deadlines need `begins`. Raises SpecError.
    """
    source = str(path)
    content: dict[str, Any] = read_document(read_text(path), source).data
    entries = content.get("jobs")
    if (
        not {"jobs"} <= set(content) <= {"jobs", "begins"}
        or not isinstance(entries, list)
        or not entries
    ):
        allowed = "begins: 2026-11-23T18:00 (if wanted), jobs: [{at: 10min, file: job.yaml}]"
        raise SpecError(
            "not a list of jobs", source=source, got=", ".join(content), allowed=allowed
        )
    begins_s = _begin(content["begins"], source) if "begins" in content else None
    submissions: list[tuple[float, JobSpec, str]] = []
    for index, entry in enumerate(entries):
        where = f"jobs.{index}"
        if not isinstance(entry, dict) or not {"file"} <= set(entry) <= {"at", "file"}:
            raise SpecError(
                "an entry has `file` and optionally `at`", source=source, path=where, got=entry
            )
        try:
            at_s = parse_seconds(entry.get("at", "0s"))
        except ValueError as error:
            raise SpecError(
                str(error), source=source, path=f"{where}.at", got=entry["at"]
            ) from None
        submissions += [
            (at_s, spec, f"{source}: {where}")
            for spec in read_jobs(path.parent / str(entry["file"]), (), home)
        ]
    first_s = min((at_s for at_s, _, _ in submissions), default=0.0)
    arrivals, to_come = list[Arrival](), dict[str, tuple[Arrival, ...]]()
    for number, (at_s, spec, where) in enumerate(submissions):
        specs = (spec,) if spec.trial is None else trials_of(spec, f"{spec.name}#{number}", home)
        first, *rest = (_arrival(trial, at_s, first_s, begins_s, where) for trial in specs)
        arrivals.append(first)
        if spec.trial is not None:
            to_come[f"{spec.name}#{number}"] = tuple(rest)
    date_s = None if begins_s is None else begins_s + first_s
    return replace(trace_of(path.stem, arrivals), trials=to_come, begins_s=date_s)


def _begin(value: object, source: str) -> float:
    """Return the list's `begins` in seconds since 1970."""
    try:
        moment = parse_deadline(value)
    except ValueError:
        moment = None
    if moment is None or moment.day is None:
        allowed = "2026-11-23T18:00, 2026-11-23T18:00 Europe/Berlin or 2026-11-23T18:00+01:00"
        raise SpecError(
            "not a day and a time", source=source, path="begins", got=value, allowed=allowed
        )
    return replace(moment, zone=moment.zone or local_zone()).due_s(0.0)


def _arrival(
    spec: JobSpec, at_s: float, first_s: float, begins_s: float | None, where: str
) -> Arrival:
    """Return a job of a list; its hours count from the first arrival, its deadline from the list's begin."""
    if spec.optimizer_steps is None:
        raise SpecError(
            "the job's length is not known", source=where, path="steps", hint="set `steps`"
        )
    if spec.start_window is None and spec.deadline is None:
        return Arrival(at_s=at_s, spec=spec)
    if begins_s is None:
        hint = "set `begins` in the list, such as `begins: 2026-11-23T18:00`"
        key = "start_window" if spec.start_window is not None else "deadline"
        raise SpecError("the list does not say when it begins", source=where, path=key, hint=hint)
    between = (
        None if spec.start_window is None else spec.start_window.counted_from(begins_s + first_s)
    )
    deadline_s = None if spec.deadline is None else spec.deadline.due_s(begins_s + at_s) - begins_s
    if deadline_s is not None and deadline_s <= at_s:
        raise SpecError(
            "the deadline is over", source=where, path="deadline", got=str(spec.deadline)
        )
    return Arrival(
        at_s=at_s,
        spec=spec.model_copy(update={"start_window": between, "deadline": None}),
        deadline_s=deadline_s,
    )
