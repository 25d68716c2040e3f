"""`orc demo`: runs jobs through the real service, Ray, MLflow and two virtual devices, and checks each result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import start_service
from orchestrator.service.demo.corpus import write_corpus
from orchestrator.service.demo.promises import (
    PROMISES,
    SHORT,
    Promise,
    has_recovered,
    list_attempt_outcomes,
)
from orchestrator.service.intake.intake import EMBEDDED_CLUSTER, read_jobs, read_overrides
from orchestrator.service.terminal.follow import ENDS, describe_attempts
from orchestrator.service.terminal.tables import make_attempts_table
from orchestrator.service.views.records import JobView

FILES = Path(__file__).with_name("files")
HOME, CLUSTER = "home", "two-virtual-devices.yaml"  # in the folder of the demo
BRIEF = ("training.max_steps=12",)  # of two jobs: the long sample of the second comes at step 8
TIMEOUT_S = 1800.0  # on two cores under a load of ten five jobs took 740 s (2026-11-22)
POLL_S = 0.3


def write_demo_files(folder: Path) -> None:
    """Write the demo's job files, scripts, corpus and cluster file into the folder; existing files
    are replaced.
    """
    shutil.copytree(FILES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_corpus(folder / "corpus")
    (folder / CLUSTER).write_text(EMBEDDED_CLUSTER)


def run_demo(folder: Path, home: Path, console: Console, *, all_jobs: bool) -> int:
    """Run two jobs, or with `all_jobs` all five; return the exit code, 0 only if each ends as
    expected.
    """
    console.print(
        f"Writing job files to {folder}; starting the service, Ray and MLflow. No GPU is used."
    )
    write_demo_files(folder)
    promises = {folder / name: PROMISES[name] for name in (PROMISES if all_jobs else SHORT)}
    _, broken = run_and_check_jobs(
        promises, home, folder / CLUSTER, console, () if all_jobs else BRIEF
    )
    console.print(f"\nThe service is still up. Go on with:\n\n  export ORC_HOME={home}")
    for command, meaning in (
        (
            "orc explain wrong-profile-2",
            "predicted bytes beside the measured ones, and what recovery changed",
        ),
        (f"orc plan {folder / 'fits.yaml'}", "every plan of a job, before anything starts"),
        ("orc open", "the pages in a browser, signed in"),
    ):
        console.print(f"  {command:<44} # {meaning}", soft_wrap=True)
    console.print("\n`orc down` stops the service.")
    return 1 if broken else 0


def run_and_check_jobs(
    promise_by_file: Mapping[Path, Promise],
    home: Path,
    cluster_file: Path,
    console: Console,
    settings: Sequence[str] = (),
) -> tuple[list[JobView], list[Path]]:
    """Run the jobs of these files with `--set` settings; return (ended jobs, files whose jobs did
    not end as promised).

    Each run has new family names, since the service would otherwise remember from the last run what
    fails.
    """
    began_s = time.monotonic()
    start_service(home, cluster_file, None)
    with closing(Client(home)) as client:
        specs = []
        for path in promise_by_file:
            (spec,) = read_jobs(
                path, read_overrides([f"family={path.stem}-{time.time_ns()}", *settings]), home
            )
            specs.append(spec.model_dump(mode="json"))
        job_ids = client.submit_jobs(specs)["ids"]
        jobs = _follow_jobs(client, job_ids, console)
    console.print()
    console.print(make_attempts_table(jobs, console.width))
    console.print()
    broken = []
    for (path, (promise, holds)), job in zip(promise_by_file.items(), jobs, strict=True):
        is_kept = job["status"] in ENDS and holds(job)
        mark = "[green]✓[/]" if is_kept else "[red]✗[/]"
        console.print(f"  {mark} {job['id']} {promise}")
        broken += [] if is_kept else [path]
    failures = sum(list_attempt_outcomes(job).count("device_oom") for job in jobs)
    console.print(
        f"\n{time.monotonic() - began_s:.0f} s. Recovered: {sum(map(has_recovered, jobs))} of {len(jobs)} jobs. Real"
        f" out-of-memory failures: {failures}."
    )
    return jobs, broken


def _follow_jobs(client: Client, job_ids: list[str], console: Console) -> list[JobView]:
    """Print what happens to the jobs, and return them once all have ended, or after TIMEOUT_S."""
    until_s = time.monotonic() + TIMEOUT_S
    printed: dict[str, int] = dict.fromkeys(job_ids, 0)
    while True:
        views = {job["id"]: job for job in client.list_jobs()}
        jobs = [views[job_id] for job_id in job_ids]
        for job in jobs:
            lines = describe_attempts(job)
            for line in lines[printed[job["id"]] :]:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            printed[job["id"]] = len(lines)
        if time.monotonic() > until_s or all(job["status"] in ENDS for job in jobs):
            return jobs
        time.sleep(POLL_S)
