"""The queue page: running, waiting and ended jobs, filtered and paged before views are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.scheduling.base.held_devices import holders
from orchestrator.scheduling.base.pending import Pending, pending
from orchestrator.service.server.forecasts import Expectations
from orchestrator.service.views.records import JobView, in_order
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.state import State

ROWS = 50  # on a page
STATUSES = tuple(status.value for status in JobStatus)
Views = Callable[[str], JobView]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Criteria of the queue's filter; "" admits all."""

    status: str = ""
    user: str = ""
    team: str = ""
    why: str = ""  # a word of Pending
    name: str = ""  # a part of the id

    @property
    def is_any(self) -> bool:
        """Return whether every job is admitted."""
        return self == Filter()

    def admits(self, job: Job, state: State) -> bool:
        """Return whether the job meets the criteria."""
        policy = state.policy
        return (
            (not self.status or job.status.value == self.status)
            and (not self.user or job.user == self.user)
            and (not self.team or (policy.is_shared and policy.team_of(job.user).name == self.team))
            and (not self.name or self.name in job.id)
            and (not self.why or (job.status is JobStatus.QUEUED and pending(job, state.at_s).value == self.why))
        )


def queue_data(
    state: State, archived: Sequence[Job], view: Views, expected: Expectations, criteria: Filter, number: int
) -> Mapping[str, Any]:
    """Return the data of the queue page: a page of ROWS live jobs, and the jobs that ended last."""
    live = in_order(job for job in state.jobs.values() if not job.status.ended)
    waiting = [job for job in live if job.status is JobStatus.QUEUED]
    matches = [job for job in live if criteria.admits(job, state)]
    just_ended = [job for job in state.jobs.values() if job.status.ended and job.id not in {job.id for job in archived}]
    ended = [job for job in (*reversed(just_ended), *archived) if criteria.admits(job, state)]
    pages = max(1, -(-len(matches) // ROWS))
    number = min(max(1, number), pages)
    shown = matches[(number - 1) * ROWS : number * ROWS]

    return {
        "running": job_rows([job for job in shown if job.status is JobStatus.RUNNING], state, view, expected, waiting),
        "waiting": job_rows([job for job in shown if job.status is JobStatus.QUEUED], state, view, expected, waiting),
        "ended": job_rows(ended[:ROWS], state, view, expected, waiting) if number == pages else [],
        "counts": {
            "running": len(live) - len(waiting),
            "waiting": len(waiting),
            "busy": len(holders(state)),
            "devices": sum(node.devices for node in state.nodes),
        },
        "matches": len(matches),
        "number": number,
        "pages": pages,
        "criteria": criteria,
        "statuses": STATUSES,
        "reasons": [word.value for word in Pending],
        "users": sorted({job.user for job in (*live, *archived) if job.user}),
        "teams": [team.name for team in state.policy.teams] if state.policy.is_shared else [],
        "is_shared": state.policy.is_shared,
    }


def job_rows(
    jobs: Sequence[Job], state: State, view: Views, expected: Expectations, waiting: Sequence[Job]
) -> list[Mapping[str, Any]]:
    """Return a row for each job; its position is that among the `waiting` ones."""
    positions = {job.id: position for position, job in enumerate(waiting, 1)}
    devices: dict[str, dict[str, list[str]]] = {}
    for (node, index), job_id in sorted(holders(state).items()):
        devices.setdefault(job_id, {}).setdefault(node, []).append(str(index))
    return [
        {
            "job": view(job.id),
            "position": positions.get(job.id),
            "pending": pending(job, state.at_s).value if job.status is JobStatus.QUEUED else "",
            "devices": ", ".join(f"{node}[{','.join(of_node)}]" for node, of_node in devices.get(job.id, {}).items()),
            "expected": expected.get(job.id),
            "ended_at_s": job.last.ended_at_s if job.last else None,
        }
        for job in jobs
    ]
