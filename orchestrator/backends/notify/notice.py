"""Notices: messages to people, each sent once, derived from scheduler decisions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from orchestrator.backends.ports import Decided
from orchestrator.backends.redaction import make_hider
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.specs.actions import Record
from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.events import Event, Finished
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.notify import NoticeKind

TEXT_MAX = 200_000  # characters


@frozen
class Notice:
    """A message to people. Its id is the same each time it is sent."""

    id: str
    kind: str  # a NoticeKind, or "test"
    at_s: float
    title: str
    text: str  # Markdown
    data: Mapping[str, str] = field(default_factory=dict)  # for programs


def make_notice(
    kind: str, event_key: str, at_s: float, title: str, text: str, data: Mapping[str, str]
) -> Notice:
    """Return a notice whose id is derived from `kind` and `event_key`, so that a repeated notice has the
    same id in every home.
    """
    digest = hashlib.sha256(f"{kind}/{event_key}".encode()).hexdigest()[:32]
    return Notice(
        id=f"msg_{digest}", kind=kind, at_s=at_s, title=title[:200], text=text[:TEXT_MAX], data=data
    )


def make_job_notice(
    kind: NoticeKind, job: Job, event_key: str, at_s: float, job_event: str, reason: str
) -> Notice:
    """Return a notice about one job, with its secrets hidden. Its title is the job's id followed by
    `job_event`.
    """
    reason = make_hider(job.spec, os.environ)(reason)
    data = {
        "job": job.id,
        "name": job.spec.name,
        "user": job.user,
        "status": job.status.value,
        "reason": reason,
    }
    text = f"{reason}\n\n`orc explain {job.id}` says more."
    return make_notice(kind, event_key, at_s, f"{job.id} {job_event}", text, data)


def derive_notices(decisions: Sequence[Decided]) -> Iterator[Notice]:
    """Yield the notices that follow from these decisions; the same decisions give the same ids."""
    for event, actions in decisions:
        for action in actions:
            if isinstance(action, Record):
                yield from _record_notices(event, action)


def _record_notices(event: Event, record: Record) -> Iterator[Notice]:
    job = record.job
    attempt = record.attempt
    if isinstance(event, Finished) and attempt is not None and attempt.number == event.number:
        failure = attempt.failure
        if failure is not None and failure.kind is FailureKind.NODE_LOST:
            nodes = ", ".join(sorted({part.node for part in attempt.placement}))
            reason = f"Attempt {attempt.number} ran on {nodes}: {failure.reason}."
            reason += f" The job is {job.status}: {describe_status(job)}"
            key = f"{job.key}/{attempt.number}"
            yield make_job_notice(
                NoticeKind.NODE_LOST, job, key, event.at_s, "lost its node", reason
            )
    if job.asks:
        yield make_job_notice(
            NoticeKind.FAILED,
            job,
            f"{job.key}/asks/{len(job.attempts)}",
            event.at_s,
            "asks",
            job.asks,
        )
    if job.status in (JobStatus.FAILED, JobStatus.REFUSED):
        verdict = "failed" if job.status is JobStatus.FAILED else "was refused"
        yield make_job_notice(NoticeKind.FAILED, job, job.key, event.at_s, verdict, job.reason)
