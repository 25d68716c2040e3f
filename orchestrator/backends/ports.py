"""Protocols between the controller and external systems: backend, nodes, launchers, event log, trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.actions import Action, Launch, Record, Stop
from orchestrator.specs.attempt import Attempt, format_placement
from orchestrator.specs.events import Event
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.settings import format_plan
from orchestrator.specs.state import State

Body = TypeVar("Body")  # what a row of an outbox holds
Sent = TypeVar("Sent", contravariant=True)
OutboxRow = tuple[int, Record]  # its number, which is never given again, and what it holds
EventAndDecisionText = tuple[Event, str | None]  # see `format_decisions`; None: none was stored
Decided = tuple[Event, Sequence[Action]]  # what happened, and what was decided to do about it


@frozen
class Totals:
    """Counts of rows in a journal (event log), by status or by receiver."""

    ended: Mapping[str, int]  # archived jobs by status
    undelivered: Mapping[str, int]  # records that each tracker has yet to get
    notices: Mapping[str, int]  # that each target of notifications has yet to get
    oldest_notices_s: Mapping[
        str, float
    ]  # when the oldest of them was made, for each target that lacks one


@frozen
class Submission:
    """The ids of the jobs that were submitted under one idempotency key, and the digest of the
    request.
    """

    digest: str  # SHA-256 of what was asked
    ids: tuple[str, ...]  # of its jobs


@frozen
class Lookups:
    """Functions by which a tracker reads jobs and sweeps of the service, callable from any
    thread.
    """

    state: Callable[[], State]  # the newest
    job: Callable[[str], Job | None]  # live or ended, by id
    sweep: Callable[[str], SweepReport | None]  # by id


class Backend(Protocol):
    """Runs attempts (one launch of a job each). Every call returns at once; results arrive as events."""

    def launch(self, action: Launch) -> None:
        """Start an attempt, or resume watching it where it already runs (after a restart of the service)."""

    def stop(self, action: Stop) -> None:
        """End an attempt. Unknown and ended attempts are no error."""

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Resume an attempt that the journal lists as live: watch it and report its end. Start it
        if it never began.
        """

    def await_events(self, timeout_s: float) -> Sequence[Event]:
        """Return the events since the last call; wait at most `timeout_s` for the first."""

    def wake(self) -> None:
        """Make a waiting `await_events` call of another thread return at once."""

    def close(self) -> None:
        """Stop watching the attempts; running attempts continue."""


class EventLog(Protocol):
    """Durable log of events. Every method may be called from any thread."""

    def load_state_and_events(self) -> tuple[State | None, Sequence[EventAndDecisionText]]:
        """Return (newest snapshot of the state, events after it, oldest first). The snapshot is
        None if there is none.

        Each event comes with its decisions as text (`format_decisions`); None where they were not
        stored.
        """

    def round_trip_event(self, event: Event) -> Event:
        """Return an event as the log will read it back. Raises SpecError where it could not be read
        back.
        """

    def describe_unreadable_rows(self) -> str | None:
        """Return a sentence that counts the rows that cannot be read; None where all can be
        read.
        """

    def load_live_jobs(self) -> Jobs:
        """Return the live jobs at the newest snapshot."""

    def append(self, decided: Sequence[Decided]) -> None:
        """Append events, their decisions, ended jobs and tracker records in one durable
        transaction.

        Raises UncertainError where the database does not say whether the transaction succeeded.
        After any other exception that is unknown, too.
        """

    def confirm_ownership(self, *, may_wait: bool = True) -> None:
        """Return None if this process owns the journal and may act; raise ServiceError otherwise.

        With `may_wait` false the call never waits, and raises in doubt.
        """

    def find_submissions(self, idempotency_keys: Sequence[str]) -> Mapping[str, Submission]:
        """Return {idempotency key: submission} for those of these keys under which jobs were
        submitted.
        """

    def store_snapshot(self, state: State) -> None:
        """Store the state after all appended events, so that a later load replays only newer
        events.
        """

    def find_ended_job(self, job_id: str) -> Job | None:
        """Return an ended job that is no longer in the state; None where there is no such job."""

    def list_ended_jobs(self, jobs_max: int, before_job_id: str | None = None) -> list[Job]:
        """Return at most `jobs_max` ended jobs, latest end first. With the job id `before_job_id`, only jobs
        that ended before that job.
        """

    def count_rows(self) -> Totals:
        """Return counts of ended jobs, and of the rows that trackers and targets of notices have
        yet to receive.
        """

    def read_first_event_at_s(self) -> float | None:
        """Return the time of the first event, in seconds since 1970; None before it."""


class Receiver(Protocol[Sent]):
    """Receives rows of an outbox. Its relay calls it, and retries after an error.

    Subclass it: override `refresh` and `shut_down` only where needed.
    """

    address: str  # for people: a URL, a path or a word
    threads: int = 1  # that may call `send` at once, each with rows of another group

    def get_group_name(self, body: Sent) -> str:
        """Return the name of the row's group; only rows of one group are sent together."""

    def send(self, rows: Sequence[tuple[int, Sent]]) -> None:
        """Store rows (number, body) of one group, oldest first; on return they are stored.

        The same row may come again with the same number. Raises OSError while the receiver is
        unavailable: the rows come again until it is available. Rows that raise another exception
        five times are dropped.
        """

    def refresh(self) -> None:
        """Do periodic work; called every few seconds. A tracker sends curves of running attempts,
        or supervises its server.
        """
        return

    def shut_down(self) -> None:
        """End the processes that the receiver started; `orc down` calls it."""
        return


class Tracker(Receiver[Record], Protocol):
    """Experiment tracker that stores the records of jobs and attempts. Its rows are grouped by job.

    Each row has the whole job with all attempts so far, so the last row includes the earlier ones.
    """

    def get_group_name(self, body: Record) -> str:
        """Return the id of the record's job."""
        return body.job.id


def format_decisions(actions: Sequence[Action]) -> str:
    """Return the decisions among these actions as text: one line for each attempt to start or to
    end.
    """
    return "\n".join(
        _format_decision(action) for action in actions if isinstance(action, Launch | Stop)
    )


def _format_decision(action: Launch | Stop) -> str:
    if isinstance(action, Stop):
        return f"stop {action.name}"
    attempt = action.attempt
    return (
        f"launch {attempt.name} on {format_placement(attempt.placement)} "
        f"as {format_plan(attempt.plan)}"
    )
