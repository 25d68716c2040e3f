"""The queue page: running, waiting and ended jobs, filtered and paged before views are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from orchestrator.scheduling.base.held_devices import map_held_device_to_job_id
from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.service.pages.template_data import TemplateData
from orchestrator.service.server.forecasts import Expectations
from orchestrator.service.views.records import JobView, sort_jobs_for_display
from orchestrator.specs.frozen import frozen
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.pending import Pending
from orchestrator.specs.state import State

ROWS = 50  # on a page; an array, a sweep or a comparison is one
MEMBERS_MAX = 10  # jobs under one row
STATUSES = tuple(status.value for status in JobStatus)
Views = Callable[[Job], JobView]


@frozen
class Filter:
    """The criteria by which the queue page selects jobs; "" in a criterion matches every job."""

    status: str = ""
    user: str = ""
    team: str = ""
    why: str = ""  # a word of Pending
    name: str = ""  # a part of the id
    array: str = ""  # id of an array, a sweep or a comparison: its members have rows of their own

    @property
    def is_any(self) -> bool:
        """Whether the filter matches every job."""
        return self == Filter()

    def matches(self, job: Job, state: State) -> bool:
        """Return whether the job matches the criteria."""
        policy = state.policy
        return (
            (not self.status or job.status.value == self.status)
            and (not self.user or job.user == self.user)
            and (
                not self.team or (policy.has_teams and policy.find_team(job.user).name == self.team)
            )
            and (not self.name or self.name in job.id)
            and (not self.array or job.array == self.array)
            and (
                not self.why
                or (
                    job.status is JobStatus.QUEUED
                    and get_pending_code(job, state.at_s).value == self.why
                )
            )
        )


def make_queue_data(
    state: State,
    archived: Sequence[Job],
    views: Views,
    forecast_by_job_id: Expectations,
    criteria: Filter,
    page_number: int,
) -> TemplateData:
    """Return the template data of the queue's page with this number.

    It has ROWS rows of live jobs; the last page also has the jobs that ended.
    """
    live = sort_jobs_for_display(state.live_jobs)
    waiting = [job for job in live if job.status is JobStatus.QUEUED]
    archived_ids = {job.id for job in archived}
    just_ended = [
        job for job in state.jobs.values() if job.status.ended and job.id not in archived_ids
    ]
    matches = [
        job for job in (*live, *reversed(just_ended), *archived) if criteria.matches(job, state)
    ]
    groups = [[job] for job in matches] if criteria.array else group_jobs(matches)
    live_groups = [group for group in groups if not group[0].status.ended]
    pages = max(1, -(-len(live_groups) // ROWS))
    page_number = min(max(1, page_number), pages)
    shown = live_groups[(page_number - 1) * ROWS : page_number * ROWS]
    rows = Rows(state, views, forecast_by_job_id, waiting)
    return {
        "running": rows.make_rows([group for group in shown if has_running_job(group)]),
        "waiting": rows.make_rows([group for group in shown if not has_running_job(group)]),
        "ended": rows.make_rows([group for group in groups if group[0].status.ended][:ROWS])
        if page_number == pages
        else [],
        "counts": {
            "running": len(live) - len(waiting),
            "waiting": len(waiting),
            "busy": len(map_held_device_to_job_id(state)),
            "devices": sum(node.devices for node in state.nodes),
        },
        "matches": sum(not job.status.ended for job in matches),
        "number": page_number,
        "pages": pages,
        "criteria": criteria,
        "statuses": STATUSES,
        "reasons": [word.value for word in Pending],
        "users": sorted({job.user for job in (*live, *archived) if job.user}),
        "teams": [team.name for team in state.policy.teams] if state.policy.has_teams else [],
        "is_shared": state.policy.has_teams,
    }


def group_jobs(
    jobs: Iterable[Job], group_key: Callable[[Job], object] = lambda _: None
) -> list[list[Job]]:
    """Return the jobs in groups, in the order of their first jobs. Members of one array with equal
    `group_key` are together.
    """
    groups = group_values(
        ((job.array, group_key(job)) if job.array else job.id, job) for job in jobs
    )
    return [*groups.values()]


def has_running_job(group: Sequence[Job]) -> bool:
    """Return whether any job of the group runs."""
    return any(job.status is JobStatus.RUNNING for job in group)


class Rows:
    """Makes the rows of the queue page's table for the jobs of one state."""

    def __init__(
        self, state: State, view: Views, expected: Expectations, waiting_jobs: Sequence[Job]
    ) -> None:
        """Prepare the rows; `waiting_jobs` are all queued jobs in the order of the queue."""
        self._state = state
        self._view = view
        self._expected = expected
        self._positions = {job.id: position for position, job in enumerate(waiting_jobs, 1)}
        self._devices: dict[str, dict[str, list[str]]] = {}
        for (node, index), job_id in sorted(map_held_device_to_job_id(state).items()):
            self._devices.setdefault(job_id, {}).setdefault(node, []).append(str(index))

    def make_rows(self, groups: Iterable[Sequence[Job]]) -> list[TemplateData]:
        """Return one row per group of jobs: a single job, or an array with at most MEMBERS_MAX rows
        of its members.
        """
        return [
            self._make_job_row(group[0]) if len(group) == 1 else self._make_array_row(group)
            for group in groups
        ]

    def _make_job_row(self, job: Job) -> TemplateData:
        state = self._state
        devices = self._devices.get(job.id, {}).items()
        return {
            **self._view(job),
            "members": (),
            "position": self._positions.get(job.id),
            "pending": get_pending_code(job, state.at_s).value
            if job.status is JobStatus.QUEUED
            else "",
            "devices": ", ".join(f"{node}[{','.join(indices)}]" for node, indices in devices),
            "expected": self._expected.get(job.id),
        }

    def _make_array_row(self, group: Sequence[Job]) -> TemplateData:
        first = group[0]
        member = first.spec.member
        trial = first.spec.trial
        kind = "sweep" if trial else "comparison" if first.spec.is_compared else "array"
        counts = Counter(job.status for job in group)
        return {
            "id": first.array,
            "kind": kind,
            "counts": [(status.value, counts[status]) for status in JobStatus if counts[status]],
            "ended": sum(job.status.ended for job in group),
            "jobs": max(len(group), trial.sweep.trials if trial else member.of if member else 0),
            "members": [self._make_job_row(job) for job in group[:MEMBERS_MAX]],
            "more": len(group) - MEMBERS_MAX,
        }
