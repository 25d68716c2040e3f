"""What `orc show`, `explain` and `report` say of a folder in which `orc launch` ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.scheduling.reports.morning import MorningReport, make_morning_report
from orchestrator.scheduling.reports.provenance import describe_provenance
from orchestrator.service.commands.launch.core import judge_last_attempt
from orchestrator.service.commands.launch.devices import read_holder
from orchestrator.service.commands.launch.records import FOLDER, Records
from orchestrator.service.views.records import (
    ExplanationView,
    JobView,
    make_explanation_view,
    make_job_view,
)
from orchestrator.specs.errors import SpecError

PARENTS_MAX = 4  # folders above an output folder that may be the work folder


def read_records(folder: Path) -> Records:
    """Return the records of the `orc launch` that ran last in a work folder, or that wrote an
    output folder.

    Its last attempt is judged, but no file is changed. Raises SpecError where there is none.
    """
    newest = max(
        _iterate_record_files(folder.resolve()),
        key=lambda path: path.stat().st_mtime_ns,
        default=None,
    )
    if newest is None:
        hint = "`orc launch` leaves its records in .orc-launch of the folder in which it was typed"
        raise SpecError("no line ran here", source="the folder", got=str(folder), hint=hint)
    records = Records(newest.parent)
    records.writes = False
    if read_holder(records.lock) is None:
        judge_last_attempt(records)
    return records


def _iterate_record_files(folder: Path) -> Iterator[Path]:
    """Yield the record file of each `orc launch` in a work folder; if none, of those whose output
    folder it is.
    """
    lines = [*folder.glob(f"{FOLDER}/*/records.jsonl")]
    yield from lines
    for parent in () if lines else list(folder.parents)[:PARENTS_MAX]:
        for path in parent.glob(f"{FOLDER}/*/records.jsonl"):
            output = Records(path.parent).run.get("output")
            if output is not None and (parent / output).resolve() == folder:
                yield path


def view_folder(folder: Path) -> JobView:
    """Return the view of the last run of `orc launch` in a folder. Raises SpecError where there is
    none.
    """
    job = read_records(folder).job
    return {**make_job_view(job), "provenance": describe_provenance(job.spec)}


def explain_folder(folder: Path) -> ExplanationView:
    """Return the explanation of the last run of `orc launch` in a folder. Raises SpecError where
    there is none.
    """
    records = read_records(folder)
    return make_explanation_view(records.drive.scheduler.state, records.job, ())


def report_folder(folder: Path, since_s: float, until_s: float) -> MorningReport:
    """Return the morning report of the last run of `orc launch` in a folder. Raises SpecError where
    there is none.
    """
    records = read_records(folder)
    jobs = [records.job] if records.job.status.ended else []
    return make_morning_report(records.drive.scheduler.state, jobs, since_s, until_s, ())
