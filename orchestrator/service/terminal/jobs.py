"""`orc submit`, `run`, `rehearse`, `show`, `explain`, `logs` and `get`: a job from its file to its output."""

# Imports of heavy packages stand in the commands that need them.
from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import (
    AsJson,
    Home,
    JobFile,
    JobId,
    JobOrFolder,
    Pinned,
    Settings,
    connect_client,
    select_login_or_home,
)
from orchestrator.service.terminal.output import (
    make_console,
    print_answer,
    show_spinner,
    write_log_piece,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.run import DEFAULT_HOME
from orchestrator.specs.units import format_bytes

if TYPE_CHECKING:
    from orchestrator.specs.job.spec import JobSpec


def submit(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Job files (YAML).")],
    settings: Settings = None,
    pins: Pinned = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Submit jobs to the queue, all or none. Exits with 1 where a job or its guarantee is refused."""
    from orchestrator.service.client.sending import read_and_upload_jobs
    from orchestrator.service.intake.intake import read_options
    from orchestrator.service.terminal.tables import describe_guarantee
    from orchestrator.specs.job.sweep import SWEEP

    specs = read_and_upload_jobs(
        select_login_or_home(home), files, read_options(settings, pins), home
    )
    client = connect_client(home)
    batch = client.submit_jobs([spec.model_dump(mode="json") for spec in specs])
    ids = batch["ids"]
    promises = batch["promises"]
    refused = batch["refused"]
    sweeps = [
        f"{SWEEP}{job_id}"
        for job_id, spec in zip(ids, specs, strict=True)
        if spec.trial is not None
    ]
    shown_ids = [f"{SWEEP}{job_id}" if f"{SWEEP}{job_id}" in sweeps else job_id for job_id in ids]
    print_answer({**batch, "sweeps": sweeps}, as_json, "\n".join(shown_ids))
    for job_id, message in batch["late"].items():
        print(f"{job_id} {message}", file=sys.stderr)
    for job_id, promise in promises.items():
        print(f"{job_id} {describe_guarantee(promise)}", file=sys.stderr)
    for job_id, reason in refused.items():
        print(f"{job_id} was refused: {reason}", file=sys.stderr)
    raise typer.Exit(bool(refused) or any(promise["refused"] for promise in promises.values()))


def _read_single_job(file: Path, settings: Settings, home: Path) -> JobSpec:
    from orchestrator.service.client.sending import read_and_upload_jobs
    from orchestrator.service.intake.intake import read_overrides

    overrides = read_overrides(settings)
    (spec,) = read_and_upload_jobs(
        select_login_or_home(home), [file], overrides, home, only_one=True
    )
    return spec


def run(
    file: JobFile, settings: Settings = None, home: Home = DEFAULT_HOME, as_json: AsJson = False
) -> None:
    """Submit a job, show its progress to the end, and exit with its result. Starts a service that is down."""
    from orchestrator.service.terminal.follow import run_to_end

    spec = _read_single_job(file, settings, home)
    raise typer.Exit(run_to_end(spec, None, select_login_or_home(home), as_json))


def rehearse(
    file: JobFile,
    fail: Annotated[
        FaultKind, typer.Option("--fail", help="Failure to inject into the first attempt.")
    ],
    rank: Annotated[
        int, typer.Option("--rank", min=0, help="Rank that fails, counted from 0.")
    ] = 0,
    step: Annotated[
        int,
        typer.Option(
            "--step", min=1, help="Optimizer step before whose end it fails, counted from 1."
        ),
    ] = 1,
    settings: Settings = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Inject a failure into the first attempt of a job, and follow its recovery."""
    from orchestrator.service.terminal.follow import run_to_end

    spec = _read_single_job(file, settings, home)
    if rank >= spec.gpus.max:
        allowed = f"0 to {spec.gpus.max - 1}: the job takes {spec.gpus.max} gpus at most"
        raise SpecError("the job never has this rank", source="--rank", got=rank, allowed=allowed)
    if not spec.is_script and step > spec.training.max_steps:
        allowed = f"1 to training.max_steps={spec.training.max_steps}"
        raise SpecError("the job ends before this step", source="--step", got=step, allowed=allowed)
    raise typer.Exit(
        run_to_end(
            spec, Fault(kind=fail, rank=rank, step=step), select_login_or_home(home), as_json
        )
    )


def show(job_id: JobOrFolder, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show everything about one job: attempts, changes, predicted and measured peaks, failures; or a sweep's trials."""
    from orchestrator.service.terminal.sweep_tables import make_sweep_panel
    from orchestrator.service.terminal.tables import make_job_panel
    from orchestrator.specs.job.sweep import SWEEP

    if Path(job_id).is_dir():
        from orchestrator.service.commands.launch.shown import view_folder

        launched = view_folder(Path(job_id))
        print_answer(
            dict(launched), as_json, make_job_panel(launched, make_console(sys.stdout).width)
        )
        return
    client = connect_client(home)
    if job_id.startswith(SWEEP) and any(sweep.id == job_id for sweep in client.list_sweeps()):
        sweep = client.fetch_sweep(job_id)
        print_answer(asdict(sweep), as_json, make_sweep_panel(sweep))
        return
    job, _ = client.fetch_job_and_version(job_id)
    print_answer(dict(job), as_json, make_job_panel(job, make_console(sys.stdout).width))


def explain(job_id: JobOrFolder, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Explain a job: what would start it sooner, predicted and measured bytes by cause, what each attempt changed."""
    from orchestrator.service.terminal.plan_tables import make_explanation_panel

    if Path(job_id).is_dir():
        from orchestrator.service.commands.launch.shown import explain_folder

        explanation = explain_folder(Path(job_id))
    else:
        with show_spinner("asking what would start it sooner"):
            explanation = connect_client(home).fetch_explanation(job_id)
    print_answer(dict(explanation), as_json, make_explanation_panel(explanation))


def logs(
    job_id: JobId,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the log until the job ends.")
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt",
            min=1,
            help="Number of the attempt, counted from 1; without it, the last one.",
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option("--rank", min=0, help="Rank whose log is printed, counted from 0.")
    ] = 0,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Print the log of one rank of a job."""
    from orchestrator.service.terminal.follow import iterate_attempt_numbers_and_log

    lines = iterate_attempt_numbers_and_log(connect_client(home), job_id, attempt, rank, follow)
    for number, text in lines:
        if as_json:
            print(
                json.dumps({"job": job_id, "attempt": number, "rank": rank, "text": text}),
                flush=True,
            )
        else:
            write_log_piece(text)


def get(
    job_id: JobId,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FOLDER", help="New folder; without it, one of the job's name."
        ),
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Fetch the output folder of a job, whole or not at all."""
    folder = (to or Path(job_id)).expanduser()
    size_bytes, left_out = connect_client(home).download_output_and_count(job_id, folder)
    summary = f"{format_bytes(size_bytes)} are in {folder}."
    if left_out:
        summary += f" Links that leave the folder were left out: {left_out}."
    print_answer(
        {"folder": str(folder), "bytes": size_bytes, "left_out": left_out}, as_json, summary
    )
