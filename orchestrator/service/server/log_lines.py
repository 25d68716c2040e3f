"""Events and actions as lines and fields of the service's log."""

from __future__ import annotations

from orchestrator.service.server.logs import about
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import placement_text
from orchestrator.specs.events import (
    CancelRequested,
    DrainRequested,
    Event,
    NodesSeen,
    Observed,
    RetryRequested,
    Submitted,
    TimerFired,
    UpdateRequested,
)


def log_fields(subject: Event | Launch | Stop) -> dict[str, object]:
    """Return job and attempt as the fields of a log record."""
    if isinstance(subject, Launch):
        return about(subject.job.id, subject.attempt.number)
    return about(getattr(subject, "job_id", None), getattr(subject, "number", None))


def log_line(subject: Event | Launch | Stop) -> str:
    """Return a log line: kind, job, attempt; never a job's settings, which may hold secrets."""
    match subject:
        case NodesSeen():
            return f"nodes_seen nodes={len(subject.nodes)}"
        case TimerFired():
            return "woke"
        case DrainRequested():
            return f"drain_requested node={subject.node}{' undo' if subject.undo else ''}"
        case Observed():
            return f"observed outcomes={len(subject.observations)}"
        case Launch():
            devices = placement_text(subject.attempt.placement)
            return f"launch job={subject.job.id} attempt={subject.attempt.number} on={devices}"
        case Stop():
            return f"stop job={subject.job_id} attempt={subject.number}"
        case Submitted() | CancelRequested() | RetryRequested() | UpdateRequested():
            return f"{subject.type} job={subject.job_id}"
        case _:
            return f"{subject.type} job={subject.job_id} attempt={subject.number}"
