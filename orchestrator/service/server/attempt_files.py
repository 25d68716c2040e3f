"""Reads a live attempt's files for the API: heartbeats, log tails, and why it runs without the guard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from orchestrator.backends.attempts.durable import open_left
from orchestrator.backends.attempts.ended_files import removal_words
from orchestrator.backends.redaction import hidden_bytes, mask
from orchestrator.service.server.waits import Waits
from orchestrator.service.views.records import JobView, job_view
from orchestrator.specs.attempt import AttemptStatus, Heartbeat
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.run import AttemptFolder, JobFolder

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.specs.job_record import Job
    from orchestrator.specs.policy import PolicySpec

LOG_BYTES_MAX = 2**18  # per response; the client requests the next offset


def view_of(home: Path, job: Job, policy: PolicySpec, problems: Sequence[str]) -> JobView:
    """Return the job as JSON, with its live attempt's heartbeats. A waiting job's reason includes `problems`."""
    if problems and job.status is JobStatus.QUEUED:
        return {**job_view(job, policy=policy), "reason": "; ".join((*problems, job.reason))}
    attempt = job.last
    if attempt is None or attempt.status is AttemptStatus.ENDED:
        removed = removal_words(home, job.id) if job.status.ended else []
        return {**job_view(job, policy=policy), "removed": removed}
    folder = JobFolder(home, job.id).attempt(attempt.number)
    lines = read_from(folder.unwatched, 0, hidden_bytes(job.spec, os.environ))
    unwatched = lines.decode(errors="replace").partition("\n")[0]
    return job_view(job, beats(home, job), policy, unwatched)


def beats(home: Path, job: Job) -> list[Heartbeat]:
    """Return the last heartbeats (progress reports) of the newest attempt's ranks."""
    if job.last is None:
        return []
    folder = JobFolder(home, job.id).attempt(job.last.number)
    read = (_read_heartbeat(folder, rank) for rank in range(job.last.plan.world_size))
    return [beat for beat in read if beat is not None]


def _read_heartbeat(folder: AttemptFolder, rank: int) -> Heartbeat | None:
    try:
        with open_left(folder.heartbeat(rank)) as file:
            return Heartbeat(**json.load(file))
    except (OSError, ValueError, TypeError):  # missing, or written by another version
        return None


def read_from(path: Path, offset: int, hidden: Sequence[bytes]) -> bytes:
    """Return at most `LOG_BYTES_MAX` bytes of a file from an offset; b"" where the file is missing.

    Each byte of a `hidden` value becomes an asterisk, even where the value crosses either end.
    """
    around = max(map(len, hidden), default=0)
    margin = min(offset, around)
    try:
        with open_left(path) as file:
            file.seek(offset - margin)
            text = mask(file.read(margin + LOG_BYTES_MAX + around), hidden)
    except OSError:
        return b""
    return text[margin : margin + LOG_BYTES_MAX]


async def follow_file(
    path: Path, offset: int, hidden: Sequence[bytes], is_over: Callable[[], bool], waits: Waits, wait_s: float
) -> AsyncIterator[bytes]:
    """Yield bytes of a growing file from an offset, until it is complete, or for `wait_s` seconds."""
    until_s = time.monotonic() + wait_s
    while True:
        was_over = is_over()  # asked before the file is read, so that nothing is missed
        text = await run_in_threadpool(read_from, path, offset, hidden)
        offset += len(text)
        if text:
            yield text
        left_s = until_s - time.monotonic()
        if left_s <= 0 or (was_over and not text):
            return
        if not text:
            await waits.until(partial(_has_more, path, offset, is_over), left_s)


def _has_more(path: Path, offset: int, is_over: Callable[[], bool]) -> bool:
    try:
        return path.stat().st_size > offset or is_over()
    except OSError:
        return is_over()
