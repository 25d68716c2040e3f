"""The controller loop: receive events, run the scheduler, commit to the journal, perform the actions."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import datetime

from orchestrator.backends.ports import Backend, Decided, EventLog, decisions
from orchestrator.scheduling.base.migration import MOVE_GRACE_S
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.transitions import CANCEL_GRACE_S
from orchestrator.service.server.health import Health
from orchestrator.service.server.log_lines import log_fields, log_line
from orchestrator.service.server.logs import about
from orchestrator.service.server.retry import Begin
from orchestrator.service.server.submissions import (
    GROUP,
    Request,
    SubmissionQueue,
    answer,
    new_jobs,
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
    find_closest_word,
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
    """Owner of the state. Only the thread in `run` calls the backend; other methods are thread-safe."""

    def __init__(
        self,
        journal: EventLog,
        backend: Backend,
        clock: Callable[[], float],
        scheduler: Callable[[State], Scheduler] = Scheduler,
        check_first: Callable[[State, JobSpec], None] = lambda _state, _spec: None,
    ) -> None:
        """Restore the state from the journal and adopt every attempt that holds devices.

        `scheduler` makes the Scheduler of a state: a benchmark gives one that takes the time. `check_first` raises
        SpecError for a job on which no decision can be made (`FirstDecisions`); it is asked outside of all locks.
        """
        self._check_first = check_first
        snapshot, tail = journal.load()
        deciding = scheduler(snapshot or State())
        self._read_only: str | None = None  # why nothing is decided
        try:
            _decide_again(deciding, tail)
        except ServiceError as error:
            if (unreadable := journal.unreadable()) is None:
                raise
            self._read_only = _READ_ONLY.format(unreadable=unreadable, error=error)
            tail = ()
            deciding = scheduler(snapshot or State(jobs=journal.live()))
        self.health = Health()
        self.health.watch(lambda: self._storage_problem, is_fatal=True)
        self.health.watch(lambda: self._read_only, is_fatal=True)
        self.health.watch(journal.unreadable)
        self.health.watch(self.standstill, is_fatal=True)
        self.health.watch(lambda: unreadable_problem(self._state))
        # kind, log line and monotonic start of a decision
        self._under_way: tuple[str, str, float] | None = None
        self._storage_problem: str | None = None
        # the journal may know what this process does not
        self._uncertain: UncertainError | None = None
        self._uncommitted: list[Event] = []  # of the backend, and not in the journal yet
        self._began_at_s = journal.began_at_s()
        self._journal = journal
        self._backend = backend
        self._clock = clock
        self._scheduler_of = scheduler
        self._scheduler = deciding
        self._state = state = deciding.state  # the newest that is committed
        self._version = 0
        self._tally = Tally()
        self._unsaved_events = len(tail)
        self._pending: deque[Launch | Stop] = deque()
        self._loop: int | None = None  # the thread of `run`
        self._submissions = SubmissionQueue(self._admit)
        self._changed = threading.Condition()
        log.info("restored jobs=%d events=%d", len(state.jobs), len(tail))
        for job in state.jobs.values() if self._read_only is None else ():
            for attempt in job.attempts:
                if not attempt.released and (not job.unreadable or job.cancelling):
                    self._adopt(job, attempt)

    @property
    def state(self) -> State:
        """The latest state, which is immutable, so that any thread may read it."""
        return self._state

    @property
    def version(self) -> int:
        """Number of changes of the state since the start; read it before the state."""
        return self._version

    def now_s(self) -> float:
        """Return the current time of the service's clock, in seconds since 1970."""
        return self._clock()

    def standstill(self, *, names_job: bool = False) -> str | None:
        """Return text on a decision that has not ended for STANDSTILL_S seconds; None otherwise. Takes no lock.

        Anonymous callers may read it, unless it names the job.
        """
        under_way = self._under_way
        if under_way is None or (taken_s := time.monotonic() - under_way[2]) < STANDSTILL_S:
            return None
        since = datetime.fromtimestamp(time.time() - taken_s).astimezone()
        what = under_way[1] if names_job else under_way[0]
        return (
            f"no decision has ended for {taken_s:.0f} s: {what}, since {since:%Y-%m-%d %H:%M:%S %Z}"
        )

    def wake_at_s(self) -> float | None:
        """Return when the loop next decides without an event; None: not before the next event."""
        with self._changed:
            return self._scheduler.wake_at_s()

    def confirm(self) -> None:
        """Return normally where this service owns its journal and decides; never waits.

        Raises ServiceError otherwise.
        """
        self._check_decides()
        self._journal.confirm(asks=False)

    def _check_decides(self) -> None:
        """Raise ReadOnlyError where the service decides nothing."""
        if self._read_only is not None:
            raise ReadOnlyError(self._read_only)

    def unreadable(self) -> str | None:
        """Return a sentence on which rows of the journal cannot be read; None where all can."""
        return self._journal.unreadable()

    def job(self, job_id: str) -> Job | None:
        """Return the job's current or final record; None for an unknown id."""
        return self._state.jobs.get(job_id) or self._journal.job(job_id)

    def ended(self, limit: int, before: str | None = None) -> list[Job]:
        """Return at most `limit` archived jobs, the most recently ended first; see `Journal.ended`."""
        return self._journal.ended(limit, before)

    def since_s(self, asked_s: float) -> float:
        """Return the start of a report: `asked_s`, but not before the journal's first event."""
        if self._began_at_s is None:
            self._began_at_s = self._journal.began_at_s()
        return asked_s if self._began_at_s is None else max(asked_s, self._began_at_s)

    def figures(self) -> Figures:
        """Return the data of `/metrics`, all of one time. Raises ServiceError if the journal cannot be read."""
        with self._changed:
            totals = self._journal.totals()
            ends_s = self._scheduler.expected_ends_s()
            at_s = self._clock()
            tally = deepcopy(self._tally)
            return Figures(at_s=at_s, state=self._state, totals=totals, ends_s=ends_s, tally=tally)

    def submit(
        self, spec: JobSpec, fault: Fault | None = None, key: RequestKey | None = None
    ) -> str:
        """Submit a job; return its id once it is in the journal. Raises ServiceError if it cannot be stored."""
        return self.submit_all([(spec, fault)], key)[0]

    def submit_all(
        self, jobs: Sequence[tuple[JobSpec, Fault | None]], key: RequestKey | None = None
    ) -> list[str]:
        """Submit jobs atomically; return their ids once they are in the journal. Raises ServiceError if they are not.

        Submitted again under the same idempotency key, they are the same jobs. Raises SpecError if a job depends on an
        unknown job, or on one whose end excludes it, or missed its deadline, or if something else was submitted under
        the key.

        Group commit: submissions that arrive during a transaction share the next one.
        """
        return self._commit(Request(jobs, key))

    def submit_retry(
        self, job: Job, spec: JobSpec, begin: Begin, key: RequestKey | None = None
    ) -> str:
        """Submit an ended job again, as `submit` does, starting as `begin` says."""
        request = Request([(spec, None)], key, job.id, begin.continues_from, begin.step)
        return self._commit(request)[0]

    def _commit(self, request: Request) -> list[str]:
        """Return the ids of the request's jobs once they are in the journal."""
        self._check_decides()
        for spec, _ in request.jobs:
            self._check_first(self._state, spec)
        return self._submissions.commit(request)

    def cancel(self, job_ids: Sequence[str], *, whole_arrays: bool = False) -> list[str]:
        """Request cancellation of the live jobs among these, or of the live members of their arrays; return their ids.

        On an error none is cancelled. Raises ServiceError for an unknown job, a job of no array, and where all have
        ended.
        """
        with self._changed:
            live_ids = [
                job_id
                for job_id in job_ids
                if (job := self.job(job_id)) is None or not job.status.ended
            ]
            named_ids = job_ids if whole_arrays or not live_ids else live_ids
            ids = [
                live_id
                for job_id in named_ids
                for live_id in self._to_cancel(job_id, whole_array=whole_arrays)
            ]
            at_s = self._clock()
            self._apply(
                [CancelRequested(job_id=job_id, at_s=at_s) for job_id in dict.fromkeys(ids)]
            )
            return [*dict.fromkeys(ids)]

    def retry(self, job_id: str, spec: JobSpec) -> None:
        """Let a job with an open question continue with this spec. Raises ServiceError for a job without one."""
        with self._changed:
            job = self._state.jobs.get(job_id)
            if job is None or not job.asks:
                raise ServiceError(
                    f"job {job_id} asks nothing: `orc show {job_id}` tells how it stands"
                )
            self._apply([RetryRequested(job_id=job_id, spec=spec, at_s=self._clock())])

    def change(self, job_ids: Sequence[str], change: Change) -> list[str]:
        """Hold, release or update these jobs; return the ids of the jobs that changed.

        On an error none is changed. Raises ServiceError for an unknown job and an ended one, and what `change` raises.
        """
        with self._changed:
            live_ids = [
                live
                for job_id in dict.fromkeys(job_ids)
                for live in self._to_cancel(job_id, whole_array=False)
            ]
            at_s = self._clock()
            events = [
                event
                for job_id in live_ids
                if (event := change(self._state.jobs[job_id], at_s)) is not None
            ]
            if events:
                self._apply(events)
            return [event.job_id for event in events]

    def stop_early(self, job_id: str, reason: str) -> None:
        """Request the cancellation of a job for a reason of the service's own; ended jobs are ignored."""
        with self._changed:
            self._apply([CancelRequested(job_id=job_id, reason=reason, at_s=self._clock())])

    def _to_cancel(self, job_id: str, *, whole_array: bool) -> list[str]:
        job = self.job(job_id)
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

    def drain(self, node: str, *, undo: bool) -> None:
        """Drain a node, or undo it. Raises ServiceError if there is no such node."""
        with self._changed:
            state = self._state
            names = {spec.name for spec in (*state.nodes, *state.declared)} | {*state.drained}
            if node not in names:
                near = find_closest_word(node, names)
                hint = f"did you mean {near!r}?" if near else "`orc drain` lists them"
                raise UnknownError(f"there is no node {node!r}: {hint}")
            is_suspended = any(entry.node == node for entry in state.suspensions)
            if undo == (node in state.drained) or (undo and is_suspended):
                self._apply([DrainRequested(node=node, undo=undo, at_s=self._clock())])

    def observe(self, observations: Sequence[Observation]) -> int:
        """Store observations that were measured elsewhere; return how many were new."""
        with self._changed:
            earlier = set(self._state.observations)
            self._apply([Observed(observations=tuple(observations), at_s=self._clock())])
            return len(set(self._state.observations) - earlier)

    def wait_for_change(self, version: int, timeout_s: float) -> int:
        """Wait until the state's version differs from `version`, at most `timeout_s`; return it (0: no change yet)."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout_s)
            return self._version

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set. Raises ServiceError if the journal is lost, since no action may go unrecorded."""
        self._loop = threading.get_ident()
        while not stop.is_set():
            try:
                self.turn(POLL_S)
            except StorageError:  # a full disk: what runs goes on, and what it tells waits
                stop.wait(STORAGE_S)
        with self._changed:
            # a snapshot: another version may decide differently, and then has no events to fold
            self._save()

    def turn(self, wait_s: float) -> None:
        """Run one loop iteration: perform pending actions, wait up to `wait_s` for events, decide, perform again."""
        if self._uncertain is not None:
            raise self._uncertain
        self._journal.confirm()
        if self._read_only is not None:
            time.sleep(min(wait_s, POLL_S))
            return
        if self._storage_problem is not None:
            self._prove_storage()
        self._perform()
        wake_s = self.wake_at_s()
        if wake_s is not None:
            wait_s = min(wait_s, max(0.0, wake_s - self._clock()))
        self._uncommitted = self._uncommitted or list(self._listen(wait_s))
        while self._uncommitted:
            self._apply(self._uncommitted[:GROUP])
            del self._uncommitted[:GROUP]
        wake_s = self.wake_at_s()
        now_s = self._clock()
        if wake_s is not None and wake_s <= now_s:
            self._apply([TimerFired(at_s=now_s)])
        self._perform()

    def _prove_storage(self) -> None:
        """Write something. Raises StorageError while the journal cannot be written."""
        with self._changed:
            self._unsaved_events += 1
            self._save()
            if self._storage_problem is not None:
                raise StorageError(self._storage_problem)

    def _note_storage(self, problem: str | None) -> None:
        """Note, and log once, whether the journal can be written."""
        if (problem is None) != (self._storage_problem is None):
            log.error("%s", problem) if problem is not None else log.info(
                "the journal is written again"
            )
        self._storage_problem = problem

    def _listen(self, wait_s: float) -> Sequence[Event]:
        try:
            events = map(self._as_kept, self._backend.events(wait_s))
            return [event for event in events if event is not None]
        except Exception:  # a backend's fault: the queue goes on
            log.exception("backend failed to return events")
            time.sleep(DEAF_S)
            return ()

    def _as_kept(self, event: Event) -> Event | None:
        """Return an event of the world as the journal will have it; None where it cannot be kept and ends nothing."""
        try:
            return self._journal.as_kept(event)
        except Exception as error:  # the edge of an event: others are heard
            log.error("%s is left out: %s", log_line(event), error)
            if not isinstance(event, Finished):
                return None
            return replace(
                event,
                evidence=Evidence(
                    collect_error=f"it cannot be kept: {error}"[:ERROR_CHARACTERS_MAX]
                ),
            )

    def _admit(self) -> None:
        """Commit waiting submissions, oldest first, in one transaction of about GROUP jobs."""
        error: BaseException | None = None
        with self._changed:
            requests = self._submissions.take()
            try:
                self._apply(new_jobs(requests, self._state, self._journal, self._clock(), self.job))
            except (
                BaseException
            ) as failure:  # re-raised in the thread of every submitter of this group
                error = failure
        answer(requests, error)

    def _apply(self, events: Sequence[Event]) -> None:
        """Decide each event and commit all together; only then is the state visible and are actions performed."""
        self._check_decides()
        with self._changed:
            if self._uncertain is not None:
                raise self._uncertain
            try:
                decisions_made, decisions_s = self._decide(events)
                if not decisions_made:
                    return
                commit = f"commit of {len(decisions_made)} events"
                self._under_way = commit, commit, time.monotonic()
                self._journal.append(decisions_made)
                self._note_storage(None)
            except BaseException as error:  # noted, and raised again below
                if isinstance(error, StorageError):
                    self._note_storage(str(error))
                if isinstance(error, UncertainError):
                    self._uncertain = error
                self._scheduler = self._scheduler_of(self._state)  # nothing of this has happened
                raise
            finally:
                self._under_way = None
            self._state = state = self._scheduler.state
            self._version += 1
            for (event, actions), decision_s in zip(decisions_made, decisions_s, strict=True):
                self._tally.add(event, actions, decision_s, state.policy)
                if log.isEnabledFor(logging.INFO):
                    log.info("event %s", log_line(event), extra=log_fields(event))
                self._pending.extend(
                    action for action in actions if isinstance(action, Launch | Stop)
                )
            self._changed.notify_all()
            if threading.get_ident() != self._loop:
                self._backend.wake()  # there may be a launch, or an earlier timer
            self._unsaved_events += len(decisions_made)
            # a snapshot writes one row per changed job, so at most one per event
            if self._unsaved_events >= max(SNAPSHOT_EVENTS, len(state.jobs)):
                self._save()

    def _decide(self, events: Sequence[Event]) -> tuple[list[Decided], list[float]]:
        """Step the scheduler by each event that changes something; return the decisions, and the seconds of each."""
        decisions_made = list[Decided]()
        decisions_s = list[float]()
        for event in events:
            if isinstance(event, NodesSeen) and _is_unchanged(self._scheduler.state, event):
                continue
            began_s = time.perf_counter()
            self._under_way = event.type, log_line(event), time.monotonic()
            decisions_made.append((event, self._scheduler.step(event)))
            decisions_s.append(time.perf_counter() - began_s)
        return decisions_made, decisions_s

    def _save(self) -> None:
        """Write a snapshot. Where that fails, the journal still has all events."""
        if not self._unsaved_events:
            return
        try:
            self._journal.snapshot(self._state)
        except StorageError as error:
            self._note_storage(str(error))
        except UncertainError as error:
            # what was appended is kept: whoever waits for that has an answer
            self._uncertain = error
        else:
            self._unsaved_events = 0
            self._note_storage(None)

    def _perform(self) -> None:
        while self._pending:
            self._journal.confirm()
            action = self._pending.popleft()
            log.info("action %s", log_line(action), extra=log_fields(action))
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
                "backend failed to stop attempt=%s", action.name, extra=log_fields(action)
            )

    def _adopt(self, job: Job, attempt: Attempt) -> None:
        """After a restart: watch the attempts that hold devices, and repeat stops that were in progress."""
        extra = about(job.id, attempt.number)
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
        """A failed launch ends the attempt, but only the backend can report that its devices are free."""
        extra = about(attempt.job_id, attempt.number)
        log.error("backend failed on attempt=%s", attempt.name, exc_info=error, extra=extra)
        if attempt.status is AttemptStatus.ENDED:
            return
        reason = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        evidence = Evidence(launch_error=reason)
        self._apply(
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
        self._adopt(job, job.attempts[attempt.number - 1])


def _decide_again(scheduler: Scheduler, tail: Sequence[tuple[Event, str | None]]) -> None:
    """Decide recorded events anew. Raises ServiceError where a decision is another one than was recorded."""
    for event, recorded_text in tail:
        actions = scheduler.step(event)
        if recorded_text not in (None, decisions(actions)):
            raise ServiceError(
                _DIVERGED.format(event=log_line(event), then=recorded_text, now=decisions(actions))
            )


def unreadable_problem(state: State) -> str | None:
    """Return text on devices that the driver cannot read; None where it can read all."""
    places = describe_unreadable(state.nodes)
    return f"devices cannot be read, and nothing new starts there: {places}" if places else None


def _is_unchanged(state: State, event: NodesSeen) -> bool:
    return (event.nodes, event.declared, event.policy) == (
        state.nodes,
        state.declared,
        state.policy,
    )
