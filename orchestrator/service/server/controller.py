"""The controller loop: receive events, run the scheduler, commit to the journal, perform the actions."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import datetime

from orchestrator.backends.ports import Backend, Decided, EventLog, format_decisions
from orchestrator.scheduling.base.migration import MOVE_GRACE_S
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.transitions import CANCEL_GRACE_S
from orchestrator.service.server.health import Health
from orchestrator.service.server.log_lines import make_log_fields, make_log_line
from orchestrator.service.server.logs import make_job_log_fields
from orchestrator.service.server.retry import RetryStart
from orchestrator.service.server.submissions import (
    GROUP,
    SubmissionQueue,
    SubmissionRequest,
    answer_submitters,
    make_submission_events,
)
from orchestrator.service.server.tally import Figures, Tally
from orchestrator.service.server.verbs import Change
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import Attempt, AttemptStatus, Evidence
from orchestrator.specs.cluster import describe_unreadable
from orchestrator.specs.errors import (
    ReadOnlyError,
    ServiceError,
    StorageError,
    UncertainError,
    UnknownError,
    suggest_word,
)
from orchestrator.specs.events import (
    CancelRequested,
    DrainRequested,
    Event,
    Finished,
    NodesSeen,
    Observed,
    RequestKey,
    RetryRequested,
    TimerFired,
)
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.observation import Observation
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

POLL_S = (
    0.5  # longest rest of the loop: it sees a stop then. A change by a request wakes it at once
)
STORAGE_S = 1.0  # pause after the journal could not be written
DEAF_S = 1.0  # pause after the backend failed to return events
# fewest events between snapshots; with more live jobs, as many events as jobs
SNAPSHOT_EVENTS = 500
# without the end of a decision that is under way: one takes milliseconds, beside load a second
STANDSTILL_S = 10.0
ERROR_CHARACTERS_MAX = 500

_DIVERGED = """the journal has these decisions on {event}:
{then}
and this version of the orchestrator would decide:
{now}
Attempts may be running that this version does not know. Start the version that wrote the journal, then stop it with \
SIGTERM (`kill`, not `kill -9`). It saves a snapshot, so that no decision has to be repeated."""

_READ_ONLY = """the service is read-only: {unreadable}. Without them the decisions since the last snapshot cannot be \
repeated, and attempts may be running that are not known here. Start the version that wrote the journal, or restore a \
backup. {error}"""

log = logging.getLogger(__name__)


class Controller:
    """The owner of the scheduler's state: it stores each event, lets the scheduler decide, and
    passes actions to the backend.

    Only the thread in `run` calls the backend; other methods are thread-safe.
    """

    def __init__(
        self,
        journal: EventLog,
        backend: Backend,
        clock: Callable[[], float],
        make_scheduler: Callable[[State], Scheduler] = Scheduler,
        check_job: Callable[[State, JobSpec], None] = lambda _state, _spec: None,
    ) -> None:
        """Restore the state from the journal, and adopt every attempt that holds devices.

        `make_scheduler` makes the Scheduler of a state: a benchmark gives one that measures its
        time. `check_job` raises SpecError for a job on which no decision can be made
        (`FirstDecisions`); it is called outside of all locks.
        """
        self._check_first = check_job
        snapshot, tail = journal.load_state_and_events()
        deciding = make_scheduler(snapshot or State())
        self._read_only: str | None = None  # why nothing is decided
        try:
            _check_same_decisions(deciding, tail)
        except ServiceError as error:
            if (unreadable := journal.describe_unreadable_rows()) is None:
                raise
            self._read_only = _READ_ONLY.format(unreadable=unreadable, error=error)
            tail = ()
            deciding = make_scheduler(snapshot or State(jobs=journal.load_live_jobs()))
        self.health = Health()
        self.health.register_source(lambda: self._storage_problem, is_fatal=True)
        self.health.register_source(lambda: self._read_only, is_fatal=True)
        self.health.register_source(journal.describe_unreadable_rows)
        self.health.register_source(self.describe_standstill, is_fatal=True)
        self.health.register_source(lambda: describe_unreadable_devices(self._state))
        # kind, log line and monotonic start of a decision
        self._under_way: tuple[str, str, float] | None = None
        self._storage_problem: str | None = None
        # the journal may know what this process does not
        self._uncertain: UncertainError | None = None
        self._uncommitted: list[Event] = []  # of the backend, and not in the journal yet
        self._began_at_s = journal.read_first_event_at_s()
        self._journal = journal
        self._backend = backend
        self._clock = clock
        self._scheduler_of = make_scheduler
        self._scheduler = deciding
        self._state = state = deciding.state  # the newest that is committed
        self._version = 0
        self._tally = Tally()
        self._unsaved_events = len(tail)
        self._pending: deque[Launch | Stop] = deque()
        self._loop: int | None = None  # the thread of `run`
        self._submissions = SubmissionQueue(self._commit_submissions)
        self._changed = threading.Condition()
        log.info("restored jobs=%d events=%d", len(state.jobs), len(tail))
        for job in state.jobs.values() if self._read_only is None else ():
            for attempt in job.attempts:
                if not attempt.released and (not job.unreadable or job.cancelling):
                    self._adopt_attempt(job, attempt)

    @property
    def state(self) -> State:
        """The latest state, which is immutable, so that any thread may read it."""
        return self._state

    @property
    def version(self) -> int:
        """Number of changes of the state since the service started; read it before the state."""
        return self._version

    def get_now_s(self) -> float:
        """Return the current time of the service's clock, in seconds since 1970."""
        return self._clock()

    def describe_standstill(self, *, name_job: bool = False) -> str | None:
        """Return a sentence if a decision has taken more than STANDSTILL_S seconds so far; None
        otherwise. Takes no lock.

        With `name_job` it names the job; without, anonymous callers may read it.
        """
        under_way = self._under_way
        if under_way is None or (taken_s := time.monotonic() - under_way[2]) < STANDSTILL_S:
            return None
        since = datetime.fromtimestamp(time.time() - taken_s).astimezone()
        what = under_way[1] if name_job else under_way[0]
        return (
            f"no decision has ended for {taken_s:.0f} s: {what}, since {since:%Y-%m-%d %H:%M:%S %Z}"
        )

    def wake_at_s(self) -> float | None:
        """Return when the loop next decides without an event, in seconds since 1970; None if only
        an event makes it decide.
        """
        with self._changed:
            return self._scheduler.wake_at_s()

    def confirm_ownership(self) -> None:
        """Return if this service owns its journal and makes decisions; raise ServiceError
        otherwise. Never waits.
        """
        self._check_makes_decisions()
        self._journal.confirm_ownership(may_wait=False)

    def _check_makes_decisions(self) -> None:
        """Raise ReadOnlyError while this service makes no decisions."""
        if self._read_only is not None:
            raise ReadOnlyError(self._read_only)

    def describe_unreadable_rows(self) -> str | None:
        """Return a sentence that counts the journal's rows that cannot be read; None where all can
        be read.
        """
        return self._journal.describe_unreadable_rows()

    def find_job(self, job_id: str) -> Job | None:
        """Return the job's current record, or its last one if it has ended; None for an unknown id."""
        return self._state.jobs.get(job_id) or self._journal.find_ended_job(job_id)

    def list_ended_jobs(self, jobs_max: int, before_job_id: str | None = None) -> list[Job]:
        """Return at most `jobs_max` jobs that ended and left the queue, the latest end first; see
        `Journal.list_ended_jobs`.
        """
        return self._journal.list_ended_jobs(jobs_max, before_job_id)

    def limit_report_start_s(self, requested_s: float) -> float:
        """Return when a report may begin, in seconds since 1970: at `requested_s`, but not before
        the journal's first event.
        """
        if self._began_at_s is None:
            self._began_at_s = self._journal.read_first_event_at_s()
        return requested_s if self._began_at_s is None else max(requested_s, self._began_at_s)

    def read_figures(self) -> Figures:
        """Return the numbers of `/metrics`, all of the same moment. Raises ServiceError if the
        journal cannot be read.
        """
        with self._changed:
            totals = self._journal.count_rows()
            ends_s = self._scheduler.list_expected_end_s_by_job_id()
            at_s = self._clock()
            tally = deepcopy(self._tally)
            return Figures(at_s=at_s, state=self._state, totals=totals, ends_s=ends_s, tally=tally)

    def submit(
        self, spec: JobSpec, fault: Fault | None = None, idempotency_key: RequestKey | None = None
    ) -> str:
        """Submit a job, and return its id once it is in the journal. Raises ServiceError if it
        cannot be stored.

        `fault` is a planned failure for tests. A job that is submitted again under the same
        `idempotency_key` is the same job.
        """
        return self.submit_all([(spec, fault)], idempotency_key)[0]

    def submit_all(
        self,
        jobs: Sequence[tuple[JobSpec, Fault | None]],
        idempotency_key: RequestKey | None = None,
    ) -> list[str]:
        """Submit jobs atomically, and return their ids once they are in the journal. Raises
        ServiceError if it cannot store them.

        Submitted again under the same idempotency key, they are the same jobs. Raises SpecError if
        a job depends on an unknown job, or on one whose end excludes it, or missed its deadline, or
        if something else was submitted under the key.

        Group commit: submissions that arrive during a transaction share the next one.
        """
        return self._commit_request(SubmissionRequest(jobs, idempotency_key))

    def submit_retry(
        self, job: Job, spec: JobSpec, start: RetryStart, idempotency_key: RequestKey | None
    ) -> str:
        """Submit an ended job again, as `submit` does, from the checkpoint that `start` names;
        return the new job's id.
        """
        request = SubmissionRequest(
            [(spec, None)], idempotency_key, job.id, start.continues_from, start.step
        )
        return self._commit_request(request)[0]

    def _commit_request(self, request: SubmissionRequest) -> list[str]:
        """Commit a submission, and return its jobs' ids once they are in the journal."""
        self._check_makes_decisions()
        for spec, _ in request.jobs:
            self._check_first(self._state, spec)
        return self._submissions.commit(request)

    def cancel_jobs(self, job_ids: Sequence[str], *, whole_arrays: bool = False) -> list[str]:
        """Request cancellation of these jobs, and return the ids of the jobs to cancel.

        With `whole_arrays`, every live job of their arrays is cancelled, too. On an error none is
        cancelled. Raises ServiceError for an unknown or ended job; with `whole_arrays` also for a
        job outside any array, and for an array that has ended.
        """
        with self._changed:
            live_ids = [
                job_id
                for job_id in job_ids
                if (job := self.find_job(job_id)) is None or not job.status.ended
            ]
            named_ids = job_ids if whole_arrays or not live_ids else live_ids
            ids = [
                live_id
                for job_id in named_ids
                for live_id in self._list_cancellable_job_ids(job_id, whole_array=whole_arrays)
            ]
            at_s = self._clock()
            self._apply_events(
                [CancelRequested(job_id=job_id, at_s=at_s) for job_id in dict.fromkeys(ids)]
            )
            return [*dict.fromkeys(ids)]

    def continue_job_with_spec(self, job_id: str, spec: JobSpec) -> None:
        """Let a job that asks a question continue with this spec. Raises ServiceError for a job
        that asks none.
        """
        with self._changed:
            job = self._state.jobs.get(job_id)
            if job is None or not job.asks:
                raise ServiceError(
                    f"job {job_id} asks nothing: `orc show {job_id}` tells how it stands"
                )
            self._apply_events([RetryRequested(job_id=job_id, spec=spec, at_s=self._clock())])

    def change_jobs(self, job_ids: Sequence[str], make_event: Change) -> list[str]:
        """Hold, release or update these jobs, all or none; return the ids of the jobs that changed.

        `make_event` returns the event that changes a job, or raises. Raises ServiceError for an
        unknown or ended job.
        """
        with self._changed:
            live_ids = [
                live
                for job_id in dict.fromkeys(job_ids)
                for live in self._list_cancellable_job_ids(job_id, whole_array=False)
            ]
            at_s = self._clock()
            events = [
                event
                for job_id in live_ids
                if (event := make_event(self._state.jobs[job_id], at_s)) is not None
            ]
            if events:
                self._apply_events(events)
            return [event.job_id for event in events]

    def cancel_with_reason(self, job_id: str, reason: str) -> None:
        """Request the cancellation of a job for a reason of the service's own; ended jobs are
        ignored.
        """
        with self._changed:
            self._apply_events([CancelRequested(job_id=job_id, reason=reason, at_s=self._clock())])

    def _list_cancellable_job_ids(self, job_id: str, *, whole_array: bool) -> list[str]:
        job = self.find_job(job_id)
        if job is None:
            raise UnknownError(f"there is no job {job_id!r}: `orc queue` lists them")
        if not whole_array:
            if job.status.ended:
                raise ServiceError(
                    f"job {job_id} has ended already: {job.status}. `orc retry {job_id}` runs it again"
                )
            return [job_id]
        if job.array is None:
            raise ServiceError(f"job {job_id} is of no array: cancel it without --array")
        members = [
            member.id
            for member in self._state.jobs.values()
            if member.array == job.array and not member.status.ended
        ]
        if not members:
            raise ServiceError(f"all jobs of the array {job.array} have ended already")
        return members

    def drain_node(self, node_name: str, *, undo: bool) -> None:
        """Let a node take no new jobs (drain it), or with `undo` take them again. Raises
        ServiceError if there is no such node.
        """
        with self._changed:
            state = self._state
            names = {spec.name for spec in (*state.nodes, *state.declared)} | {*state.drained}
            if node_name not in names:
                hint = suggest_word(node_name, names, "`orc drain` lists them")
                raise UnknownError(f"there is no node {node_name!r}: {hint}")
            is_suspended = any(entry.node == node_name for entry in state.suspensions)
            if undo == (node_name in state.drained) or (undo and is_suspended):
                self._apply_events([DrainRequested(node=node_name, undo=undo, at_s=self._clock())])

    def store_and_count_new_observations(self, observations: Sequence[Observation]) -> int:
        """Store observations (predicted and measured values) of another home; return how many of
        them were new.
        """
        with self._changed:
            earlier = set(self._state.observations)
            self._apply_events([Observed(observations=tuple(observations), at_s=self._clock())])
            return len(set(self._state.observations) - earlier)

    def wait_for_change(self, known_version: int, timeout_s: float) -> int:
        """Wait at most `timeout_s` until the state's version differs from `known_version`; return
        the version then.

        It is 0 before the first change.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version != known_version, timeout_s)
            return self._version

    def run(self, stop: threading.Event) -> None:
        """Decide and act until `stop` is set. Raises ServiceError if the journal is lost, since no
        action may go unrecorded.
        """
        self._loop = threading.get_ident()
        while not stop.is_set():
            try:
                self.run_once(POLL_S)
            except StorageError:  # a full disk: what runs goes on, and what it tells waits
                stop.wait(STORAGE_S)
        with self._changed:
            # a snapshot: another version may decide differently, and then has no events to fold
            self._store_snapshot()

    def run_once(self, wait_s: float) -> None:
        """Run one iteration: perform pending actions, wait at most `wait_s` for events, decide,
        perform the new actions.
        """
        if self._uncertain is not None:
            raise self._uncertain
        self._journal.confirm_ownership()
        if self._read_only is not None:
            time.sleep(min(wait_s, POLL_S))
            return
        if self._storage_problem is not None:
            self._check_storage_by_writing()
        self._perform_actions()
        wake_s = self.wake_at_s()
        if wake_s is not None:
            wait_s = min(wait_s, max(0.0, wake_s - self._clock()))
        self._uncommitted = self._uncommitted or list(self._read_events(wait_s))
        while self._uncommitted:
            self._apply_events(self._uncommitted[:GROUP])
            del self._uncommitted[:GROUP]
        wake_s = self.wake_at_s()
        now_s = self._clock()
        if wake_s is not None and wake_s <= now_s:
            self._apply_events([TimerFired(at_s=now_s)])
        self._perform_actions()

    def _check_storage_by_writing(self) -> None:
        """Write to the journal, to see whether it can be written. Raises StorageError if not."""
        with self._changed:
            self._unsaved_events += 1
            self._store_snapshot()
            if self._storage_problem is not None:
                raise StorageError(self._storage_problem)

    def _record_storage_problem(self, problem: str | None) -> None:
        """Record why the journal cannot be written, or None if it can be, and log each change of
        that.
        """
        if (problem is None) != (self._storage_problem is None):
            log.error("%s", problem) if problem is not None else log.info(
                "the journal is written again"
            )
        self._storage_problem = problem

    def _read_events(self, wait_s: float) -> Sequence[Event]:
        try:
            events = map(self._read_back_as_stored, self._backend.await_events(wait_s))
            return [event for event in events if event is not None]
        except Exception:  # a backend's fault: the queue goes on
            log.exception("backend failed to return events")
            time.sleep(DEAF_S)
            return ()

    def _read_back_as_stored(self, event: Event) -> Event | None:
        """Return a backend's event as the journal will read it back.

        None where it cannot be stored and ends no attempt.
        """
        try:
            return self._journal.round_trip_event(event)
        except Exception as error:  # the edge of an event: others are heard
            log.error("%s is left out: %s", make_log_line(event), error)
            if not isinstance(event, Finished):
                return None
            return replace(
                event,
                evidence=Evidence(
                    collect_error=f"it cannot be kept: {error}"[:ERROR_CHARACTERS_MAX]
                ),
            )

    def _commit_submissions(self) -> None:
        """Commit waiting submissions, oldest first, in one transaction with about GROUP jobs."""
        error: BaseException | None = None
        with self._changed:
            requests = self._submissions.take_requests()
            try:
                self._apply_events(
                    make_submission_events(
                        requests, self._state, self._journal, self._clock(), self.find_job
                    )
                )
            except (
                BaseException
            ) as failure:  # re-raised in the thread of every submitter of this group
                error = failure
        answer_submitters(requests, error)

    def _apply_events(self, events: Sequence[Event]) -> None:
        """Decide on each event, and commit all of them together. Only then the state changes, and
        actions become pending.
        """
        self._check_makes_decisions()
        with self._changed:
            if self._uncertain is not None:
                raise self._uncertain
            try:
                decisions_made, decisions_s = self._decide_events_and_measure_s(events)
                if not decisions_made:
                    return
                commit = f"commit of {len(decisions_made)} events"
                self._under_way = commit, commit, time.monotonic()
                self._journal.append(decisions_made)
                self._record_storage_problem(None)
            except BaseException as error:  # noted, and raised again below
                if isinstance(error, StorageError):
                    self._record_storage_problem(str(error))
                if isinstance(error, UncertainError):
                    self._uncertain = error
                self._scheduler = self._scheduler_of(self._state)  # nothing of this has happened
                raise
            finally:
                self._under_way = None
            self._state = state = self._scheduler.state
            self._version += 1
            for (event, actions), decision_s in zip(decisions_made, decisions_s, strict=True):
                self._tally.count_event(event, actions, decision_s, state.policy)
                if log.isEnabledFor(logging.INFO):
                    log.info("event %s", make_log_line(event), extra=make_log_fields(event))
                self._pending.extend(
                    action for action in actions if isinstance(action, Launch | Stop)
                )
            self._changed.notify_all()
            if threading.get_ident() != self._loop:
                self._backend.wake()  # there may be a launch, or an earlier timer
            self._unsaved_events += len(decisions_made)
            # a snapshot writes one row per changed job, so at most one per event
            if self._unsaved_events >= max(SNAPSHOT_EVENTS, len(state.jobs)):
                self._store_snapshot()

    def _decide_events_and_measure_s(
        self, events: Sequence[Event]
    ) -> tuple[list[Decided], list[float]]:
        """Pass each event that changes something to the scheduler; return (decisions, seconds that
        each decision took).
        """
        decisions_made = list[Decided]()
        decisions_s = list[float]()
        for event in events:
            if isinstance(event, NodesSeen) and _changes_nothing(self._scheduler.state, event):
                continue
            began_s = time.perf_counter()
            self._under_way = event.type, make_log_line(event), time.monotonic()
            decisions_made.append((event, self._scheduler.step(event)))
            decisions_s.append(time.perf_counter() - began_s)
        return decisions_made, decisions_s

    def _store_snapshot(self) -> None:
        """Store the whole state in the journal, so that a restart is fast. If that fails, the
        journal still has all events.
        """
        if not self._unsaved_events:
            return
        try:
            self._journal.store_snapshot(self._state)
        except StorageError as error:
            self._record_storage_problem(str(error))
        except UncertainError as error:
            # what was appended is kept: whoever waits for that has an answer
            self._uncertain = error
        else:
            self._unsaved_events = 0
            self._record_storage_problem(None)

    def _perform_actions(self) -> None:
        while self._pending:
            self._journal.confirm_ownership()
            action = self._pending.popleft()
            log.info("action %s", make_log_line(action), extra=make_log_fields(action))
            if isinstance(action, Launch):
                self._launch(action)
            else:
                self._stop(action)

    def _launch(self, action: Launch) -> None:
        try:
            self._backend.launch(action)
        except Exception as error:  # a backend's fault ends the attempt, not the queue
            try:
                self._end_unlaunched(action.attempt, error)
            except StorageError:
                self._pending.appendleft(action)  # a launch that is repeated takes up what there is
                raise

    def _stop(self, action: Stop) -> None:
        job = self._state.jobs.get(action.job_id)
        try:
            if job is not None and job.unreadable:  # nobody watches it yet
                self._backend.adopt(job, job.attempts[action.number - 1])
            self._backend.stop(action)
        except Exception:  # a backend's fault: the queue goes on
            log.exception(
                "backend failed to stop attempt=%s", action.name, extra=make_log_fields(action)
            )

    def _adopt_attempt(self, job: Job, attempt: Attempt) -> None:
        """After a restart, resume an attempt that holds devices, and repeat a stop that was in
        progress.
        """
        extra = make_job_log_fields(job.id, attempt.number)
        log.info(
            "adopt job=%s attempt=%d status=%s", job.id, attempt.number, attempt.status, extra=extra
        )
        try:
            self._backend.adopt(job, attempt)
        except Exception as error:  # a backend's fault ends the attempt, not the queue
            self._end_unlaunched(attempt, error)
            return
        if attempt.status is AttemptStatus.STOPPING:
            grace_s = MOVE_GRACE_S if attempt.moved_for and not job.cancelling else CANCEL_GRACE_S
            self._stop(Stop(job_id=job.id, number=attempt.number, grace_s=grace_s))

    def _end_unlaunched(self, attempt: Attempt, error: Exception) -> None:
        """Record that the launch of an attempt failed, which ends it; only the backend can report
        its devices as free.
        """
        extra = make_job_log_fields(attempt.job_id, attempt.number)
        log.error("backend failed on attempt=%s", attempt.name, exc_info=error, extra=extra)
        if attempt.status is AttemptStatus.ENDED:
            return
        reason = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        evidence = Evidence(launch_error=reason)
        self._apply_events(
            [
                Finished(
                    job_id=attempt.job_id,
                    number=attempt.number,
                    evidence=evidence,
                    at_s=self._clock(),
                )
            ]
        )
        job = self._state.jobs[attempt.job_id]
        self._adopt_attempt(job, job.attempts[attempt.number - 1])


def _check_same_decisions(
    scheduler: Scheduler, history: Sequence[tuple[Event, str | None]]
) -> None:
    """Repeat recorded decisions. Raises ServiceError where this version decides otherwise than was
    recorded.
    """
    for event, recorded_text in history:
        actions = scheduler.step(event)
        if recorded_text not in (None, format_decisions(actions)):
            raise ServiceError(
                _DIVERGED.format(
                    event=make_log_line(event), then=recorded_text, now=format_decisions(actions)
                )
            )


def describe_unreadable_devices(state: State) -> str | None:
    """Return a sentence on devices that the driver cannot read; None if it can read all."""
    places = describe_unreadable(state.nodes)
    return f"devices cannot be read, and nothing new starts there: {places}" if places else None


def _changes_nothing(state: State, event: NodesSeen) -> bool:
    """Return whether the reported nodes equal those of the state."""
    return (event.nodes, event.declared, event.policy) == (
        state.nodes,
        state.declared,
        state.policy,
    )
