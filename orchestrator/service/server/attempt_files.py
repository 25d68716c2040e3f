"""What a live attempt's files say to the API: heartbeats, the tail of a log, and why no guard watches it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.service.views.records import JobView, job_view
from orchestrator.specs.attempt import AttemptStatus, Heartbeat
from orchestrator.specs.run import AttemptFolder, JobFolder

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.specs.job_record import Job
    from orchestrator.specs.policy import PolicySpec

LOG_BYTES_MAX = 2**18  # per response; the client requests the next offset


def view_of(home: Path, job: Job, policy: PolicySpec) -> JobView:
    """The job, with the heartbeats of the live attempt's processes."""
    attempt = job.last
    if attempt is None or attempt.status is AttemptStatus.ENDED:
        return job_view(job, policy=policy)
    folder = JobFolder(home, job.id).attempt(attempt.number)
    unwatched = read_from(folder.unwatched, 0).decode(errors="replace").partition("\n")[0]
    return job_view(job, beats(home, job), policy, unwatched)


def beats(home: Path, job: Job) -> list[Heartbeat]:
    """The last heartbeats of the newest attempt's ranks."""
    if job.last is None:
        return []
    folder = JobFolder(home, job.id).attempt(job.last.number)
    read = (_beat(folder, rank) for rank in range(job.last.plan.world_size))
    return [beat for beat in read if beat is not None]


def _beat(folder: AttemptFolder, rank: int) -> Heartbeat | None:
    try:
        return Heartbeat(**json.loads(folder.heartbeat(rank).read_text()))
    except (OSError, ValueError, TypeError):  # missing, or written by another version
        return None


def read_from(path: Path, offset: int) -> bytes:
    """At most `LOG_BYTES_MAX` bytes of a file from an offset; none where the file is missing."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(LOG_BYTES_MAX)
    except OSError:
        return b""
