"""Prints a job's events live until it ends."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import start_service
from orchestrator.service.client.logins import Login
from orchestrator.service.terminal.output import console_on, tell
from orchestrator.service.terminal.tables import attempts_table, progress_line, time_left
from orchestrator.service.views.records import AttemptView, JobView, failure_excerpt
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.units import format_bytes

ENDS = ("succeeded", "failed", "refused", "cancelled")
BAR_WIDTH = 20
PLAIN_EVERY_S = 5.0  # between two lines of progress without a terminal


def run_to_end(spec: JobSpec, fault: Fault | None, service: Path | Login, as_json: bool) -> int:
    """Submit the job and print its events; return the exit code. Starts a home's service if needed."""
    if isinstance(service, Path):
        start_service(service, None, None)
    client = Client(service)
    for job in client.list_jobs(ended_max=0):
        if job["name"] == spec.name:
            notice = (
                f"{job['id']} is {job['status']} and has this name: what follows is one more job"
            )
            print(notice, file=sys.stderr)
    fault_body = {"kind": fault.kind, "rank": fault.rank, "step": fault.step} if fault else None
    job_id = client.submit(spec.model_dump(mode="json"), fault_body)
    try:
        job = follow(
            client, job_id, console_on(sys.stderr if as_json else sys.stdout), may_ask=fault is None
        )
    except KeyboardInterrupt:
        print(f"{job_id} continues; `orc show {job_id}` shows its state", file=sys.stderr)
        return 130
    tell(dict(job), as_json, attempts_table([job], console_on(sys.stdout).width))
    excerpt = failure_excerpt(job)
    if job["status"] == "failed" and excerpt and not as_json:
        print(excerpt.rstrip(), file=sys.stderr)
    return 0 if job["status"] == "succeeded" else 1


def follow(client: Client, job_id: str, console: Console, *, may_ask: bool = True) -> JobView:
    """Print the job's events on `console` until it ends; return the ended job.

    A job with a question waits for its answer, up to a week. Without `may_ask`, as in a rehearsal, it is cancelled
    instead. A terminal shows a progress bar with the remaining time; other output gets a line every few seconds.
    """
    texts = [
        TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[said]")
    ]
    columns = SpinnerColumn(), texts[0], BarColumn(BAR_WIDTH), texts[1]
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"{job_id} is queued", total=None, said="")
        printed: list[str] = []
        printed_at_s = 0.0
        for job in _poll_job(client, job_id):
            for line in (*story(job), *_waiting(job, may_ask=may_ask)):
                if line not in printed:
                    printed.append(line)
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
            printed_at_s = _show_progress(job, bar, task, console, printed_at_s)
            if job["asks"] and not may_ask:
                with suppress(ServiceError):  # somebody else ended it meanwhile
                    client.cancel([job_id], whole_arrays=False)
    return job


def log_lines(
    client: Client, job_id: str, number: int | None, rank: int, to_the_end: bool
) -> Iterator[tuple[int, str]]:
    """Yield (attempt number, text) pieces of a rank's log; of the last attempt if `number` is None.

    With `to_the_end` it waits for more, and continues with later attempts, until the job has ended.
    """
    job, _ = client.fetch_job(job_id)
    current = max(1, len(job["attempts"])) if number is None else number
    offset = 0
    decoder = _decoder()
    while True:
        job, version = client.fetch_job(
            job_id
        )  # read before its log, so that the log of an ended attempt is complete
        count = len(job["attempts"])
        read = offset
        if current <= count or number is not None:
            for text in _pieces(client, job_id, current, rank, offset, to_the_end):
                offset += len(text)
                yield current, decoder.decode(text)
        if offset > read:
            continue
        ended = job["status"] in ENDS
        over = ended or (current <= count and job["attempts"][current - 1]["status"] == "ended")
        if number is None and over and current < count:
            current = current + 1
            offset = 0
            decoder = _decoder()
        elif not to_the_end or ended or (number is not None and over):
            return
        elif current > count or over:
            client.fetch_job(job_id, version)  # which waits for the next attempt


def _pieces(
    client: Client, job_id: str, number: int, rank: int, offset: int, to_the_end: bool
) -> Iterator[bytes]:
    if to_the_end:
        yield from client.follow_log(job_id, number, rank, offset)
    elif text := client.read_log(job_id, number, rank, offset)[0]:
        yield text


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _poll_job(client: Client, job_id: str) -> Iterator[JobView]:
    """Yield the job now, then at every change and every few seconds, until its end."""
    version: int | None = None
    while True:
        job, version = client.fetch_job(job_id, version)
        yield job
        if job["status"] in ENDS:
            return


def _waiting(job: JobView, *, may_ask: bool) -> list[str]:
    """Return why the job waits; of one that asks, also what becomes of it."""
    if job["status"] != "queued":
        return []
    if not job["asks"]:
        return [f"{job['id']}: queued: {job['reason']}"]
    if not may_ask:
        return [f"{job['id']}: did not recover: {job['asks']}"]
    waits = "waits for your answer; Ctrl-C leaves the job in the queue"
    return [f"{job['id']}: queued: {job['reason']}", f"{job['id']}: {waits}"]


def story(job: JobView) -> list[str]:
    """Return the history of the job's attempts, one line per event, in order. Later calls only append."""
    lines = []
    before = None
    for attempt in job["attempts"]:
        lines.append(
            f"{job['id']}: attempt {attempt['number']} on {attempt['placement']}: {attempt['plan']}"
        )
        if attempt["change"]:
            lines.append(f"{job['id']}:   {_change(attempt, before)}")
        lines += _ending(job, attempt)
        before = attempt
    if job["status"] in ENDS:
        lines.append(f"{job['id']}: {job['status']}: {job['reason']}")
    return lines


def _change(attempt: AttemptView, before: AttemptView | None) -> str:
    """Return what the attempt changed, from which step it goes on, and why where the end before did not say so."""
    changes = ", ".join(attempt["change"])
    step = before["checkpoint_step"] if before else None
    resumed = f"; resumed at step {step}" if step else ""
    failure = before["failure"] if before else None
    is_repeated = failure is not None and failure["reason"] == attempt["change_reason"]
    why = "" if is_repeated else f": {attempt['change_reason']}"
    return f"-> {changes}{resumed}{why}"


def _ending(job: JobView, attempt: AttemptView) -> list[str]:
    failure = attempt["failure"]
    if attempt["status"] != "ended":
        return []
    if failure is None:
        return [f"{job['id']}: attempt {attempt['number']} succeeded{_peaks(attempt)}"]
    return [
        f"{job['id']}: attempt {attempt['number']} ended: {failure['kind']}: {failure['reason']}"
    ]


def _peaks(attempt: AttemptView) -> str:
    if not attempt["peak_bytes"]:
        return ""
    predicted = attempt["predicted_bytes"]
    beside = f", {format_bytes(predicted)} predicted" if predicted else ""
    return f": peak {format_bytes(attempt['peak_bytes'])}{beside}"


def _show_progress(
    job: JobView, bar: Progress, task: TaskID, console: Console, printed_at_s: float
) -> float:
    """Bring the bar up to date, or print a line if none was printed lately; returns when the last one was.

    A line like the one before tells nothing and is not printed.
    """
    progress = job["progress"]
    left = time_left(job["progress"])
    line = " · ".join(filter(None, (f"{left} left" if left else "", progress_line(progress))))
    if console.is_terminal:
        step, total = (progress["step"], progress["max_steps"]) if progress else (0, None)
        bar.update(
            task, description=f"{job['id']} {job['status']}", completed=step, total=total, said=line
        )
    elif (
        line
        and time.monotonic() - printed_at_s > PLAIN_EVERY_S
        and line != bar.tasks[task].fields["said"]
    ):
        bar.update(task, said=line)
        console.print(f"{job['id']}: {line}", highlight=False, markup=False, soft_wrap=True)
        return time.monotonic()
    return printed_at_s
