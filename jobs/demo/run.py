"""`make demo`: five jobs through the real service, Ray, MLflow and two virtual devices.

Exit code 0 only if each of them ended as expected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from jobs.demo.corpus import write_corpus
from orchestrator.service.server.client import Client
from orchestrator.service.terminal.tables import attempts_table, queue_table

FOLDER = Path(__file__).parent
CLUSTER = FOLDER.parents[1] / "clusters" / "two-virtual-devices.yaml"
HOME = Path(os.environ.get("ORC_HOME", ".demo")).resolve()
ORC = (sys.executable, "-m", "orchestrator.cli")
TIMEOUT_S = 1800.0  # on two cores under a load of ten the five audio jobs took 740 s (2026-11-22)
EXPERIMENT, MLFLOW_TIMEOUT_S = "orchestrator", 20.0  # of backends/mlflow/tracker.py, whose import takes seconds
PLAIN_WIDTH = 160  # columns if the output is not a terminal
ENDED = ("succeeded", "failed", "refused", "cancelled")

Job = dict[str, Any]
Promise = tuple[str, Callable[[Job], bool]]  # in words, and as a check


def outcomes(job: Job) -> list[str]:
    return [attempt["outcome"] for attempt in job["attempts"]]


def fitted(job: Job) -> bool:
    return job["status"] == "succeeded" and outcomes(job) == ["succeeded"]


def recovered(job: Job) -> bool:
    """At least one real out-of-memory failure, then only cheaper plans with the same global batch, then success."""
    failed = outcomes(job)[:-1]
    batches = {attempt["settings"]["global_batch_size"] for attempt in job["attempts"]}
    return job["status"] == "succeeded" and set(failed) == {"device_oom"} and len(batches) == 1


def recovered_at_once(job: Job) -> bool:
    """One out-of-memory failure was enough to find a plan that fits."""
    return recovered(job) and len(job["attempts"]) == 2


def resumed(job: Job) -> bool:
    """Recovered from a checkpoint, not from the start."""
    return recovered_at_once(job) and job["attempts"][0]["checkpoint_step"] > 0


def stopped_with_traceback(job: Job) -> bool:
    shown = job["attempts"][-1]["failure"]["excerpt"] if job["attempts"] else ""
    return job["status"] == "failed" and outcomes(job) == ["unknown", "user_error"] and "KeyError: 'labels'" in shown


def refused(job: Job) -> bool:
    return job["status"] == "refused" and not job["attempts"] and "would fit" in job["reason"]


EXPECTED: dict[str, Promise] = {
    "fits.yaml": ("is planned to fit, and does", fitted),
    "wrong_profile.yaml": ("runs out of memory once, resumes from its checkpoint with a cheaper plan, ends", resumed),
    "foreign.yaml": ("runs out of memory once, finishes degraded through its knobs, unmodified", recovered_at_once),
    "bug.yaml": ("ends twice at the same step, then stops with its own traceback", stopped_with_traceback),
    "never_fits.yaml": ("is refused before anything starts", refused),
}


def main() -> int:
    write_corpus()
    _, wrong = night({FOLDER / name: promised for name, promised in EXPECTED.items()})
    return 1 if wrong else 0


def night(expected: Mapping[Path, Promise]) -> tuple[list[Job], list[Path]]:
    """The jobs of these files once all have ended, and the files whose jobs did not end as promised."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    began_s = time.monotonic()
    subprocess.run([*ORC, "up", "--cluster", str(CLUSTER), "--home", str(HOME)], check=True)
    client = Client(HOME)
    ids = {path: submit(path) for path in expected}
    jobs = follow(client, list(ids.values()), console)
    console.print()
    console.print(attempts_table(jobs))  # type: ignore[arg-type]
    for job in jobs:
        if len(job["attempts"]) != 1 or job["attempts"][0]["failure"]:  # otherwise the table says it all
            console.print(ending(job))
    by_id = {job["id"]: job for job in jobs}
    wrong = []
    console.print()
    for path, (promise, kept) in expected.items():
        held = by_id[ids[path]]["status"] in ENDED and kept(by_id[ids[path]])
        console.print(Text("  ✓ " if held else "  ✗ ", style="green" if held else "red") + f"{ids[path]} {promise}")
        wrong += [] if held else [path]
    failures = sum(outcomes(job).count("device_oom") for job in jobs)
    console.print(
        f"\n{time.monotonic() - began_s:.0f} s, {sum(map(recovered, jobs))} jobs recovered from {failures} real"
        " out-of-memory failures."
    )
    console.print(f"Predicted beside measured, attempt by attempt, in MLflow: {comparison(client)}")
    console.print(f"The service is still up: `{Path(sys.executable).parent / 'orc'} down --home {HOME}` ends it.")
    client.close()
    return jobs, wrong


def comparison(client: Client) -> str:
    """MLflow's page with predicted and measured peak and step time of every attempt."""
    uri = client.cluster()["trackers"]["mlflow"]
    path = f"api/2.0/mlflow/experiments/get-by-name?experiment_name={EXPERIMENT}"
    signed = {"Authorization": f"Bearer {(HOME / 'token').read_text()}"}
    request = urllib.request.Request(f"{uri}/{path}", headers=signed)
    try:
        with urllib.request.urlopen(request, timeout=MLFLOW_TIMEOUT_S) as answer:
            return f"{uri}/#/experiments/{json.load(answer)['experiment']['experiment_id']}"
    except OSError:  # MLflow is still starting
        return f"{uri}/#/experiments"


def submit(path: Path) -> str:
    """Submit a job with `orc submit`; returns its id.

    Each demo has its own family: otherwise the service would know from the last one what fails, and nothing would.
    """
    family = f"{path.stem}-{time.time_ns()}"
    command = (*ORC, "submit", str(path), "--set", f"family={family}", "--home", str(HOME))
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def follow(client: Client, ids: list[str], console: Console) -> list[Job]:
    """The jobs once all have ended, or their state after TIMEOUT_S."""
    deadline_s = time.monotonic() + TIMEOUT_S
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while True:
            known = {job["id"]: job for job in client.jobs()}
            jobs = [known[job_id] for job_id in ids]
            left_s = deadline_s - time.monotonic()
            live.update(Group(Text(), queue_table(jobs)))  # type: ignore[arg-type]
            if left_s < 0 or all(job["status"] in ENDED for job in jobs):
                return jobs
            time.sleep(0.5)


def ending(job: Job) -> Panel:
    """The outcome of the job, and the reason of each restart."""
    lines = [f"{job['status']}: {job['reason']}"]
    for attempt in job["attempts"]:
        if attempt["change"]:
            lines.append(f"attempt {attempt['number']}: {', '.join(attempt['change'])}")
            lines.append(f"  because {attempt['change_reason']}")
    failure = job["attempts"][-1]["failure"] if job["attempts"] else None
    if failure:
        lines.append(failure["excerpt"])
    return Panel("\n".join(lines), title=job["id"], title_align="left", border_style="dim")


if __name__ == "__main__":
    sys.exit(main())
