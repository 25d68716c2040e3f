"""The commands that list jobs and change them: queue, cancel, hold, release, suspend, resume, update and retry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.completion import complete_job_id
from orchestrator.service.terminal.options import AsJson, Home, JobId, Settings, connect_client
from orchestrator.service.terminal.output import make_console, print_answer
from orchestrator.specs.errors import SpecError
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.service.views.records import JobView

JobIds = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB...",
        help="Ids of jobs, as `orc queue` shows them.",
        autocompletion=complete_job_id,
    ),
]
User = Annotated[str | None, typer.Option("--user", help="Only jobs of this user.")]
LIVE = ("queued", "running")
STATUSES = (*LIVE, "succeeded", "failed", "refused", "cancelled")


def queue(
    ended: Annotated[
        int,
        typer.Option("--ended", min=0, max=1000, help="Number of ended jobs shown, newest first."),
    ] = 100,
    user: User = None,
    team: Annotated[str | None, typer.Option("--team", help="Only jobs of this team.")] = None,
    status: Annotated[
        str | None, typer.Option("--status", help="Only jobs with this status.")
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """List jobs: status, plan and reason."""
    from rich.console import Group

    from orchestrator.service.terminal.sweep_tables import make_sweeps_table
    from orchestrator.service.terminal.tables import make_queue_table

    _check_status(status, STATUSES)
    client = connect_client(home)
    everything = client.list_jobs(ended)
    jobs = [job for job in select_jobs(everything, user, status) if team in (None, job["team"])]
    shown = {job["id"] for job in jobs}
    sweeps = [
        sweep
        for sweep in client.list_sweeps()
        if not shown.isdisjoint(trial.job for trial in sweep.trials)
    ]
    rows: RenderableType = make_queue_table(jobs, make_console(sys.stdout).width)
    if isinstance(rows, str) and not as_json:
        print(rows)
        rows = f"{len(jobs):,} jobs"
    table = Group(rows, "", make_sweeps_table(sweeps)) if sweeps else rows
    empty = (
        "No job is like that."
        if everything
        else "The queue is empty. `orc submit FILE` adds a job."
    )
    print_answer(
        {"jobs": jobs, "sweeps": [*map(asdict, sweeps)]}, as_json, table if jobs else empty
    )


def select_jobs(jobs: Sequence[JobView], user: str | None, status: str | None) -> list[JobView]:
    """Return the jobs of this user and with this status; None admits all."""
    return [job for job in jobs if user in (None, job["user"]) and status in (None, job["status"])]


def _check_status(status: str | None, allowed: Sequence[str]) -> None:
    if status not in (None, *allowed):
        raise SpecError(
            "not a status of these jobs", path="--status", got=status, allowed=", ".join(allowed)
        )


def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB...]",
            help="Ids of jobs, as `orc queue` shows them.",
            autocompletion=complete_job_id,
        ),
    ] = None,
    whole_arrays: Annotated[
        bool, typer.Option("--array", help="Cancel the whole arrays of these jobs.")
    ] = False,
    user: User = None,
    status: Annotated[
        str | None, typer.Option("--status", help="Only jobs that are queued, or running.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All jobs that have not ended.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Cancel the live jobs among these, or a sweep. Ranks get SIGTERM, and SIGKILL ten seconds later."""
    from orchestrator.specs.job.sweep import SWEEP

    client = connect_client(home)
    filters = (user is not None, status is not None, every)
    if bool(ids) == any(filters) or (every and any(filters[:2])):
        what = "name jobs, or say which" if not ids else "either jobs are named, or filters"
        raise SpecError(
            what, source="orc cancel", allowed="JOB..., --user U, --status queued, or --all"
        )
    _check_status(status, LIVE)
    if not ids:
        live = [
            job for job in select_jobs(client.list_jobs(0), user, status) if job["status"] in LIVE
        ]
        ids = [job["id"] for job in live]
        running = sum(job["status"] == "running" for job in live)
        if ids and not is_sure:
            _ask_confirmation(
                f"Cancel {len(ids)} job{'' if len(ids) == 1 else 's'}, {running} of them running?",
                ids,
            )
    cancelled = client.cancel_jobs(ids, whole_arrays=whole_arrays) if ids else []
    are = "is" if len(cancelled) == 1 else "are"
    nothing = (
        "No live job is like that." if any(filters) else "No trial was live. The sweep has ended."
    )
    text = f"{', '.join(cancelled)} {are} being cancelled." if cancelled else nothing
    ended = (
        []
        if whole_arrays
        else [job_id for job_id in ids if job_id not in cancelled and not job_id.startswith(SWEEP)]
    )
    text += f" Ended before: {', '.join(ended)}." if ended else ""
    print_answer({"cancelled": cancelled}, as_json, text)


def _ask_confirmation(question: str, job_ids: Sequence[str]) -> None:
    """Ask the question at the terminal; a no ends the command. Raises SpecError where nobody can be
    asked.
    """
    if not sys.stdin.isatty():
        hint = "say --yes to cancel them"
        raise SpecError(
            f"nobody confirms the end of {len(job_ids)} jobs",
            source="orc cancel",
            got=", ".join(job_ids),
            hint=hint,
        )
    typer.confirm(question, abort=True, err=True)


def hold(ids: JobIds, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Hold waiting jobs, all or none: they do not start until `orc release`. A guarantee is given up."""
    _change_jobs_by_verb("hold", ids, home, as_json)


def release(ids: JobIds, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Release held jobs, all or none: they wait for devices again."""
    _change_jobs_by_verb("release", ids, home, as_json)


def suspend(ids: JobIds, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Suspend jobs, all or none: running ones save within two minutes and leave their devices until `orc resume`."""
    _change_jobs_by_verb("suspend", ids, home, as_json)


def resume(ids: JobIds, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Resume suspended or held jobs, all or none: they go on from their newest checkpoint."""
    _change_jobs_by_verb("resume", ids, home, as_json)


DONE = {"hold": "held", "release": "released", "suspend": "suspended", "resume": "resumed"}


def _change_jobs_by_verb(verb: str, ids: Sequence[str], home: Home, as_json: bool) -> None:
    changed = connect_client(home).change_jobs(verb, ids)
    same = [job_id for job_id in dict.fromkeys(ids) if job_id not in changed]
    lines = [f"{', '.join(changed)}: {DONE[verb]}."] if changed else []
    lines += [f"{', '.join(same)}: unchanged."] if same else []
    print_answer({"changed": changed}, as_json, "\n".join(lines))


def update(
    job_id: JobId,
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...", help="New values of priority, deadline or time_limit."
        ),
    ],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Change the priority, deadline or time limit of a job that has not ended."""
    from orchestrator.service.intake.intake import add_time_zones, read_overrides

    is_changed = connect_client(home).update_job(
        job_id, add_time_zones(read_overrides(settings, "orc update"))
    )
    print_answer(
        {"changed": is_changed}, as_json, f"{job_id}: {'updated' if is_changed else 'unchanged'}."
    )


def retry(
    job_id: JobId,
    settings: Settings = None,
    allow: Annotated[
        str | None, typer.Option(metavar="CLASS", help="numeric or semantic changes.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step from now on.")
    ] = None,
    learning_rate: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="linear, sqrt or same: how it follows a smaller batch."),
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Submit an ended job again, or allow a job to change its training as it asks."""
    from orchestrator.service.intake.intake import add_time_zones, read_overrides

    overrides = add_time_zones(read_overrides(settings))
    answer = connect_client(home).retry_job(
        job_id,
        overrides,
        allow=allow,
        global_batch_size=global_batch_size,
        learning_rate=learning_rate,
    )
    is_new = answer["id"] != job_id
    text = f"{answer['id']} retries {job_id}: {answer['why']}." if is_new else f"{job_id} goes on."
    print_answer({"retried": job_id, **answer}, as_json, text)
