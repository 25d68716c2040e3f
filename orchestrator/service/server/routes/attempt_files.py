"""Reads a live attempt's files for the API: heartbeats, log tails, and why it runs without the guard."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from orchestrator.backends.attempts.durable import open_untrusted
from orchestrator.backends.attempts.ended_files import describe_removals
from orchestrator.backends.attempts.left_files import Reports, read_heartbeats
from orchestrator.backends.redaction import list_secret_values, mask_secrets
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.service.server.routes.waits import Waits
from orchestrator.service.views.records import JobView, make_job_view
from orchestrator.specs.attempt import AttemptStatus, Heartbeat
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.run import JobFolder

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.specs.job_record import Job
    from orchestrator.specs.policy import PolicySpec

UNWATCHED_CHARACTERS_MAX = 300
LOG_BYTES_MAX = 2**18  # per response; the client requests the next offset


def view_job(home: Path, job: Job, policy: PolicySpec, service_problems: Sequence[str]) -> JobView:
    """Return the job as JSON, with the newest progress of its live attempt.

    A waiting job's reason includes `service_problems`. For a job that cannot be shown, the JSON has
    no attempts, and its reason says why.
    """
    try:
        return _view_job(home, job, policy, service_problems)
    except Exception as error:  # the edge of a row: a list has other jobs
        log.exception("job %s cannot be shown", job.id)
        reason = (
            f"{describe_status(job)}; its attempts cannot be shown: {type(error).__name__}: {error}"
        )
        return make_job_view(replace(job, attempts=(), reason=reason), policy=policy)


def _view_job(home: Path, job: Job, policy: PolicySpec, service_problems: Sequence[str]) -> JobView:
    if service_problems and job.status is JobStatus.QUEUED:
        return {
            **make_job_view(job, policy=policy),
            "reason": "; ".join((*service_problems, describe_status(job))),
        }
    attempt = job.last
    if attempt is None or attempt.status is AttemptStatus.ENDED:
        removed = describe_removals(home, job.id) if job.status.ended else []
        return {**make_job_view(job, policy=policy), "removed": removed}
    folder = JobFolder(home, job.id).attempt(attempt.number)
    lines = read_with_secrets_masked(folder.unwatched, 0, list_secret_values(job.spec, os.environ))
    unwatched = lines.decode(errors="replace").partition("\n")[0][:UNWATCHED_CHARACTERS_MAX]
    reports = read_newest_heartbeats(home, job)
    return make_job_view(job, reports.reports, policy, unwatched, reports.problems)


def read_newest_heartbeats(home: Path, job: Job) -> Reports[Heartbeat]:
    """Return the last heartbeat (progress report) of each rank of the job's newest attempt."""
    if job.last is None:
        return Reports()
    return read_heartbeats(
        JobFolder(home, job.id).attempt(job.last.number), job.last.plan.world_size
    )


def read_with_secrets_masked(path: Path, offset: int, secret_values: Sequence[bytes]) -> bytes:
    """Return at most `LOG_BYTES_MAX` bytes of a file from an offset; b"" where the file is missing.

    Each byte of a value in `secret_values` becomes an asterisk, even where the value crosses either
    end.
    """
    around = max(map(len, secret_values), default=0)
    margin = min(offset, around)
    try:
        with open_untrusted(path) as file:
            file.seek(offset - margin)
            text = mask_secrets(file.read(margin + LOG_BYTES_MAX + around), secret_values)
    except OSError:
        return b""
    return text[margin : margin + LOG_BYTES_MAX]


async def follow_file_with_secrets_masked(
    path: Path,
    offset: int,
    secret_values: Sequence[bytes],
    is_complete: Callable[[], bool],
    waits: Waits,
    wait_s: float,
) -> AsyncIterator[bytes]:
    """Yield the bytes of a growing file from an offset, until `is_complete` returns true, or for
    `wait_s` seconds.

    Each byte of a value in `secret_values` becomes an asterisk.
    """
    until_s = time.monotonic() + wait_s
    while True:
        was_over = is_complete()  # asked before the file is read, so that nothing is missed
        text = await run_in_threadpool(read_with_secrets_masked, path, offset, secret_values)
        offset += len(text)
        if text:
            yield text
        left_s = until_s - time.monotonic()
        if left_s <= 0 or (was_over and not text):
            return
        if not text:
            await waits.wait_until(
                partial(_has_more_bytes_or_is_complete, path, offset, is_complete), left_s
            )


def _has_more_bytes_or_is_complete(
    path: Path, offset: int, is_complete: Callable[[], bool]
) -> bool:
    try:
        return path.stat().st_size > offset or is_complete()
    except OSError:
        return is_complete()
