"""Submissions on their way into the journal: who waits, who commits for all, and which jobs come of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.backends.ports import EventLog, Submission
from orchestrator.scheduling.base.time_limits import apply_team_limit
from orchestrator.scheduling.queue.dependencies import resolve_dependencies
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.events import RequestKey, Submitted
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.sweep import SWEEP
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

GROUP = 64  # most events in one commit: submissions wait while they are decided
ANSWER_S = 60.0  # a submission's timeout: the commit of a group takes some milliseconds

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SubmissionRequest:
    """Jobs to submit together, for whose commit a thread waits, and what became of them."""

    jobs: Sequence[tuple[JobSpec, Fault | None]]
    key: RequestKey | None = None
    retry_of: str | None = None  # as Submitted has it
    continues_from: str | None = None
    continues_step: int = 0
    ids: list[str] = field(default_factory=list)
    error: BaseException | None = None
    is_answered: bool = False
    is_repeated: bool = False  # its key was committed before
    woken: threading.Event = field(
        default_factory=threading.Event
    )  # answered, or chosen to commit the next group


class SubmissionQueue:
    """Submissions that are not committed yet. The thread of one submitter commits those of all that
    wait (group commit).
    """

    def __init__(self, commit_waiting: Callable[[], None]) -> None:
        """Make the queue.

        `commit_waiting` commits the requests that `take_requests` returns, and wakes their threads
        by `answer_submitters`.
        """
        self._admit = commit_waiting
        self._lock = threading.Lock()
        self._requests: deque[SubmissionRequest] = deque()
        self._has_leader = False  # whether a submitter's thread commits them, or was chosen to

    def __len__(self) -> int:
        return len(self._requests)

    def commit(self, request: SubmissionRequest) -> list[str]:
        """Wait until the request is committed, by this or another thread; return its jobs' ids."""
        with self._lock:
            self._requests.append(request)
            leads = not self._has_leader
            self._has_leader = True
        if not leads and not request.woken.wait(ANSWER_S):
            self._withdraw_unanswered(request)
        if not request.is_answered:  # first in the queue: this thread commits for all that wait
            try:
                self._admit()
            finally:
                with self._lock:
                    self._has_leader = bool(self._requests)
                    if self._has_leader:
                        self._requests[0].woken.set()
        if request.error is not None:
            raise request.error
        if request.ids and not request.is_repeated:
            log.info(
                "submitted jobs=%d first=%s last=%s",
                len(request.ids),
                request.ids[0],
                request.ids[-1],
            )
        return request.ids

    def take_requests(self) -> list[SubmissionRequest]:
        """Remove the oldest requests, with about GROUP jobs in all, from the queue, and return
        them.
        """
        requests = list[SubmissionRequest]()
        jobs = 0
        with self._lock:
            while self._requests and jobs < GROUP:
                requests.append(self._requests.popleft())
                jobs += len(requests[-1].jobs)
        return requests

    def _withdraw_unanswered(self, request: SubmissionRequest) -> None:
        """Remove a request that timed out from the queue and raise ServiceError; do nothing if it
        was answered meanwhile.
        """
        with self._lock:
            if request.woken.is_set():
                return
            if request in self._requests:
                self._requests.remove(request)
                raise ServiceError(
                    f"nothing was submitted: the journal did not commit within {ANSWER_S:.0f} s; submit again"
                )
        raise ServiceError(
            f"the journal did not answer within {ANSWER_S:.0f} s: `orc queue` shows whether the job was submitted"
        )


def answer_submitters(requests: Iterable[SubmissionRequest], error: BaseException | None) -> None:
    """Wake the threads that wait for these requests; each raises `error`, if there is one."""
    for request in requests:
        request.error = request.error or error
        request.is_answered = True
        request.woken.set()


def make_submission_events(
    requests: Sequence[SubmissionRequest],
    state: State,
    journal: EventLog,
    at_s: float,
    find_job: Callable[[str], Job | None],
) -> list[Submitted]:
    """Return the submission events of the new jobs in these requests.

    A request whose key was used before, or in this group, adds no jobs. A refused request gets its
    SpecError, and the others continue.
    """
    keys = [request.key.name for request in requests if request.key is not None]
    submissions = dict(journal.find_submissions(keys)) if keys else {}
    events = list[Submitted]()
    for request in requests:
        try:
            earlier = submissions.get(request.key.name) if request.key is not None else None
            if earlier is not None:
                _reuse_ids(request, earlier)
                continue
            if request.retry_of is not None:
                _check_not_retried(request.retry_of, state, events)
            jobs = make_submission_events_of_request(
                request, state, state.submitted + len(events), at_s, find_job
            )
            for event in jobs:
                if journal.round_trip_event(event) != event:
                    hint = "report this: it is a fault of the service"
                    raise SpecError(
                        "the journal would not give back the same job",
                        source=event.spec.name,
                        hint=hint,
                    )
        except SpecError as refusal:
            request.error = refusal
            continue
        events += jobs
        request.ids = [event.job_id for event in jobs]
        if request.key is not None:
            submissions[request.key.name] = Submission(
                digest=request.key.digest, ids=tuple(request.ids)
            )
    # one pass decides on all of a group
    return [*(replace(event, more=True) for event in events[:-1]), *events[-1:]]


def _check_not_retried(job_id: str, state: State, events: Iterable[Submitted]) -> None:
    """Raise SpecError where a live job, or one of these submissions, is a retry of the job with
    this id.
    """
    live_ids = {job.retry_of: job.id for job in state.live_jobs}
    live_ids |= {event.retry_of: event.job_id for event in events}
    if (live_id := live_ids.get(job_id)) is not None:
        hint = f"`orc show {live_id}` tells how it stands, `orc cancel {live_id}` ends it"
        raise SpecError(
            "a live job retries it already", source=f"the retry of {job_id}", got=live_id, hint=hint
        )


def make_submission_events_of_request(
    request: SubmissionRequest,
    state: State,
    submitted_count: int,
    at_s: float,
    find_job: Callable[[str], Job | None],
) -> list[Submitted]:
    """Return the submission events of the request's jobs, with new ids. Raises SpecError if one
    depends on an unknown job.

    `submitted_count` is the number of jobs that were ever submitted.
    """
    events = list[Submitted]()
    together: dict[str, list[str]] = {}  # ids by name
    array: str | None = None
    for order, (draft, fault) in enumerate(request.jobs, start=submitted_count + 1):
        if draft.deadline is not None and draft.deadline.compute_due_s(at_s) <= at_s:
            raise SpecError(
                "the deadline is over", source=draft.name, path="deadline", got=str(draft.deadline)
            )
        limited = apply_team_limit(draft, state.policy.find_team(draft.user or ""))
        spec, satisfied = (
            resolve_dependencies(limited, together, find_job) if draft.depends_on else (limited, ())
        )
        job_id = f"{spec.name}-{order}"
        together.setdefault(spec.name, []).append(job_id)
        if spec.trial is not None:
            array = spec.trial.of or f"{SWEEP}{job_id}"
        elif spec.member is None:
            array = None
        elif spec.member.number == 0 or array is None:
            array = job_id
        event = Submitted(
            job_id=job_id,
            order=order,
            spec=spec,
            at_s=at_s,
            fault=fault,
            array=array,
            satisfied=satisfied,
            request=request.key,
            retry_of=request.retry_of,
            continues_from=request.continues_from,
            continues_step=request.continues_step,
        )
        events.append(event)
    return events


def _reuse_ids(request: SubmissionRequest, earlier_submission: Submission) -> None:
    """Give a repeated request the ids that its jobs got before. Raises SpecError if the key was
    used for another request.
    """
    assert request.key is not None
    if request.key.digest != earlier_submission.digest:
        hint = "a key names one submission: send another one under a key of its own"
        raise SpecError(
            "another submission came under this key", source="Idempotency-Key", hint=hint
        )
    request.ids = [*earlier_submission.ids]
    request.is_repeated = True
