"""Why a queued job waits, as one of a few codes. `Job.reason` has the full sentence."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.specs.job_record import Job


class Pending(StrEnum):
    """Codes for why a job waits, each with the phrase by which its sentence is recognised."""

    _value_: str
    phrase: str

    def __new__(cls, word: str, phrase: str = "") -> Pending:
        pending = str.__new__(cls, word)
        pending._value_, pending.phrase = word, phrase
        return pending

    HELD = "held"  # by a person
    DEPENDENCY = "dependency"
    BACK_OFF = "back_off"  # after a failure
    CLUSTER_UNSEEN = "cluster_unseen", "waiting for the cluster to be seen"
    ARRAY_LIMIT = "array_limit", "waits for others of the array"
    FOREIGN_MEMORY = "foreign_memory", "waits for memory that other processes hold"
    UNREADABLE = "unreadable", "waits for devices that cannot be read"  # by the driver
    NODES_AWAY = "nodes_away", "to come back"
    DRAIN = "drain", "nothing new"
    MAINTENANCE = "maintenance", "it would not end before the maintenance of"
    START_WINDOW = "start_window", "(start_window "
    DEVICES = "devices", "waits for devices"  # that others hold, or that are kept for others


def pending(job: Job, at_s: float) -> Pending:
    """Return the code of why a queued job waits at this time."""
    if job.held_by is not None:
        return Pending.HELD
    if job.waits_for:
        return Pending.DEPENDENCY
    if job.not_before_s > at_s:
        return Pending.BACK_OFF
    return next(
        (member for member in Pending if member.phrase and member.phrase in job.reason),
        Pending.DEVICES,
    )
