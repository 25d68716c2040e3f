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
from orchestrator.service.terminal.output import make_console, print_answer
from orchestrator.service.terminal.tables import (
    format_progress_line,
    format_time_left,
    make_attempts_table,
)
from orchestrator.service.views.records import AttemptView, JobView, get_failure_excerpt
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.units import format_bytes

ENDS = ("succeeded", "failed", "refused", "cancelled")
BAR_WIDTH = 20
PLAIN_EVERY_S = 5.0  # between two lines of progress without a terminal


def run_to_end(spec: JobSpec, fault: Fault | None, service: Path | Login, as_json: bool) -> int:
    """Submit the job, print its events until it ends, and return the exit code of `orc run`.

    Starts a home's service if it is down.
    """
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
    job_id = client.submit_job(spec.model_dump(mode="json"), fault_body)
    try:
        job = follow_job(
            client,
            job_id,
            make_console(sys.stderr if as_json else sys.stdout),
            may_ask=fault is None,
        )
    except KeyboardInterrupt:
        print(f"{job_id} continues; `orc show {job_id}` shows its state", file=sys.stderr)
        return 130
    print_answer(dict(job), as_json, make_attempts_table([job], make_console(sys.stdout).width))
    excerpt = get_failure_excerpt(job)
    if job["status"] == "failed" and excerpt and not as_json:
        print(excerpt.rstrip(), file=sys.stderr)
    return 0 if job["status"] == "succeeded" else 1


def follow_job(client: Client, job_id: str, console: Console, *, may_ask: bool) -> JobView:
    """Print the job's events on `console` until it ends; return its final record.

    A job with a question waits up to a week for its answer. Without `may_ask`, as in a rehearsal,
    it is cancelled instead. A terminal shows a progress bar with the remaining time; other output
    gets a line every few seconds.
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
            for line in (*describe_attempts(job), *_describe_wait(job, may_ask=may_ask)):
                if line not in printed:
                    printed.append(line)
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
            printed_at_s = _update_bar_or_print_line(job, bar, task, console, printed_at_s)
            if job["asks"] and not may_ask:
                with suppress(ServiceError):  # somebody else ended it meanwhile
                    client.cancel_jobs([job_id], whole_arrays=False)
    return job


def iterate_attempt_numbers_and_log(
    client: Client, job_id: str, attempt_number: int | None, rank: int, until_end: bool
) -> Iterator[tuple[int, str]]:
    """Yield (attempt number, piece of text) of a rank's log; of the last attempt if
    `attempt_number` is None.

    With `until_end` it waits for more text, and continues with later attempts, until the job has
    ended.
    """
    job, _ = client.fetch_job_and_version(job_id)
    current = max(1, len(job["attempts"])) if attempt_number is None else attempt_number
    offset = 0
    decoder = _make_decoder()
    while True:
        job, version = client.fetch_job_and_version(
            job_id
        )  # read before its log, so that the log of an ended attempt is complete
        count = len(job["attempts"])
        read = offset
        if current <= count or attempt_number is not None:
            for text in _iterate_log_bytes(client, job_id, current, rank, offset, until_end):
                offset += len(text)
                yield current, decoder.decode(text)
        if offset > read:
            continue
        ended = job["status"] in ENDS
        over = ended or (current <= count and job["attempts"][current - 1]["status"] == "ended")
        if attempt_number is None and over and current < count:
            current = current + 1
            offset = 0
            decoder = _make_decoder()
        elif not until_end or ended or (attempt_number is not None and over):
            return
        elif current > count or over:
            client.fetch_job_and_version(job_id, version)  # which waits for the next attempt


def _iterate_log_bytes(
    client: Client, job_id: str, attempt_number: int, rank: int, offset: int, until_end: bool
) -> Iterator[bytes]:
    if until_end:
        yield from client.follow_log(job_id, attempt_number, rank, offset)
    elif text := client.read_log_and_offset(job_id, attempt_number, rank, offset)[0]:
        yield text


def _make_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _poll_job(client: Client, job_id: str) -> Iterator[JobView]:
    """Yield the job now, at every change and every few seconds, until it has ended."""
    version: int | None = None
    while True:
        job, version = client.fetch_job_and_version(job_id, version)
        yield job
        if job["status"] in ENDS:
            return


def _describe_wait(job: JobView, *, may_ask: bool) -> list[str]:
    """Return lines that say why the job waits; if it asks a question, also what will happen without
    an answer.
    """
    if job["status"] != "queued":
        return []
    if not job["asks"]:
        return [f"{job['id']}: queued: {job['reason']}"]
    if not may_ask:
        return [f"{job['id']}: did not recover: {job['asks']}"]
    waits = "waits for your answer; Ctrl-C leaves the job in the queue"
    return [f"{job['id']}: queued: {job['reason']}", f"{job['id']}: {waits}"]


def describe_attempts(job: JobView) -> list[str]:
    """Return the history of the job's attempts, one line per event, in order.

    As the job goes on, lines are only appended.
    """
    lines = []
    before = None
    for attempt in job["attempts"]:
        lines.append(
            f"{job['id']}: attempt {attempt['number']} on {attempt['placement']}: {attempt['plan']}"
        )
        if attempt["change"]:
            lines.append(f"{job['id']}:   {_describe_change_of_attempt(attempt, before)}")
        lines += _describe_ending(job, attempt)
        before = attempt
    if job["status"] in ENDS:
        lines.append(f"{job['id']}: {job['status']}: {job['reason']}")
    return lines


def _describe_change_of_attempt(attempt: AttemptView, earlier_attempt: AttemptView | None) -> str:
    """Return a phrase on what the attempt changed, and its first step.

    The reason is part of it unless the end of the attempt before gave it.
    """
    changes = ", ".join(attempt["change"])
    step = earlier_attempt["checkpoint_step"] if earlier_attempt else None
    resumed = f"; resumed at step {step}" if step else ""
    failure = earlier_attempt["failure"] if earlier_attempt else None
    is_repeated = failure is not None and failure["reason"] == attempt["change_reason"]
    why = "" if is_repeated else f": {attempt['change_reason']}"
    return f"-> {changes}{resumed}{why}"


def _describe_ending(job: JobView, attempt: AttemptView) -> list[str]:
    failure = attempt["failure"]
    if attempt["status"] != "ended":
        return []
    if failure is None:
        return [f"{job['id']}: attempt {attempt['number']} succeeded{_format_peaks(attempt)}"]
    return [
        f"{job['id']}: attempt {attempt['number']} ended: {failure['kind']}: {failure['reason']}"
    ]


def _format_peaks(attempt: AttemptView) -> str:
    if not attempt["peak_bytes"]:
        return ""
    predicted = attempt["predicted_bytes"]
    beside = f", {format_bytes(predicted)} predicted" if predicted else ""
    return f": peak {format_bytes(attempt['peak_bytes'])}{beside}"


def _update_bar_or_print_line(
    job: JobView, bar: Progress, task: TaskID, console: Console, last_printed_s: float
) -> float:
    """Update the progress bar, or print a line if none was printed lately; return when the last
    line was printed.

    A line that equals the last one is not printed again.
    """
    progress = job["progress"]
    left = format_time_left(job["progress"])
    line = " · ".join(
        filter(None, (f"{left} left" if left else "", format_progress_line(progress)))
    )
    if console.is_terminal:
        step, total = (progress["step"], progress["max_steps"]) if progress else (0, None)
        bar.update(
            task, description=f"{job['id']} {job['status']}", completed=step, total=total, said=line
        )
    elif (
        line
        and time.monotonic() - last_printed_s > PLAIN_EVERY_S
        and line != bar.tasks[task].fields["said"]
    ):
        bar.update(task, said=line)
        console.print(f"{job['id']}: {line}", highlight=False, markup=False, soft_wrap=True)
        return time.monotonic()
    return last_printed_s
