"""Events and actions as lines and fields of the service's log."""

from __future__ import annotations

from orchestrator.service.server.logs import make_job_log_fields
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import format_placement
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


def make_log_fields(event_or_action: Event | Launch | Stop) -> dict[str, object]:
    """Return the job and the attempt of an event or action, as fields of a log record."""
    if isinstance(event_or_action, Launch):
        return make_job_log_fields(event_or_action.job.id, event_or_action.attempt.number)
    return make_job_log_fields(
        getattr(event_or_action, "job_id", None), getattr(event_or_action, "number", None)
    )


def make_log_line(event_or_action: Event | Launch | Stop) -> str:
    """Return a log line for an event or action: kind, job, attempt; never a job's settings, which
    may hold secrets.
    """
    match event_or_action:
        case NodesSeen():
            return f"nodes_seen nodes={len(event_or_action.nodes)}"
        case TimerFired():
            return "woke"
        case DrainRequested():
            return f"drain_requested node={event_or_action.node}{' undo' if event_or_action.undo else ''}"
        case Observed():
            return f"observed outcomes={len(event_or_action.observations)}"
        case Launch():
            devices = format_placement(event_or_action.attempt.placement)
            return f"launch job={event_or_action.job.id} attempt={event_or_action.attempt.number} on={devices}"
        case Stop():
            return f"stop job={event_or_action.job_id} attempt={event_or_action.number}"
        case Submitted() | CancelRequested() | RetryRequested() | UpdateRequested():
            return f"{event_or_action.type} job={event_or_action.job_id}"
        case _:
            return f"{event_or_action.type} job={event_or_action.job_id} attempt={event_or_action.number}"
