"""What `orc show`, `explain` and `report` say of a folder in which `orc launch` ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.scheduling.reports.morning import MorningReport, make_morning_report
from orchestrator.scheduling.reports.provenance import describe_provenance
from orchestrator.service.commands.launch.core import settle
from orchestrator.service.commands.launch.devices import read_holder
from orchestrator.service.commands.launch.records import FOLDER, Records
from orchestrator.service.views.records import ExplanationView, JobView, explanation_view, job_view
from orchestrator.specs.errors import SpecError

PARENTS_MAX = 4  # folders above an output folder that may be the work folder


def read_records(folder: Path) -> Records:
    """Return the newest line of a work folder, or the one that wrote an output folder, judged but not changed.

    Raises SpecError where there is none.
    """
    newest = max(_lines(folder.resolve()), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        hint = "`orc launch` leaves its records in .orc-launch of the folder in which it was typed"
        raise SpecError("no line ran here", source="the folder", got=str(folder), hint=hint)
    records = Records(newest.parent)
    records.writes = False
    if read_holder(records.lock) is None:
        settle(records)
    return records


def _lines(folder: Path) -> Iterator[Path]:
    """Yield the records of each line in a work folder; else of those whose output folder it is."""
    lines = [*folder.glob(f"{FOLDER}/*/records.jsonl")]
    yield from lines
    for parent in () if lines else list(folder.parents)[:PARENTS_MAX]:
        for path in parent.glob(f"{FOLDER}/*/records.jsonl"):
            output = Records(path.parent).run.get("output")
            if output is not None and (parent / output).resolve() == folder:
                yield path


def show_folder(folder: Path) -> JobView:
    """Return the last run of a folder. Raises SpecError."""
    job = read_records(folder).job
    return {**job_view(job), "provenance": describe_provenance(job.spec)}


def explain_folder(folder: Path) -> ExplanationView:
    """Return the explanation of a folder's last run. Raises SpecError."""
    records = read_records(folder)
    return explanation_view(records.drive.scheduler.state, records.job, ())


def report_folder(folder: Path, since_s: float, until_s: float) -> MorningReport:
    """Return the report of a folder's last run. Raises SpecError."""
    records = read_records(folder)
    jobs = [records.job] if records.job.status.ended else []
    return make_morning_report(records.drive.scheduler.state, jobs, since_s, until_s, ())
