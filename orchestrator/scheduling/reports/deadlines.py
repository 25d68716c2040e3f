"""Which deadlines cannot be met, and what could be done instead?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf

from orchestrator.scheduling.options.job_options import steps_left
from orchestrator.scheduling.policies.registry import index_of
from orchestrator.scheduling.reports.forecast import Expected, foreseen
from orchestrator.scheduling.scheduling_pass.decide import array_limit_reason
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.scheduling_pass.preemption import preempt_for_deadline
from orchestrator.specs.clock import local_text
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

HELPED_MAX = 100  # jobs that would be late, the earliest deadlines first, for which a preemption is looked for
NAMED_MAX = 3  # of jobs that say no length, in one sentence


def late(state: State, ids: Iterable[str]) -> dict[str, str]:
    """The jobs not expected to meet their deadlines, each with a sentence that says what is possible.

    `cannot be done by Mon 08:00 UTC: earliest Mon 09:40 UTC with 4 GPUs; Mon 07:55 UTC if its priority is 6`. Nothing
    more is submitted, and nothing fails, in the forecast. A job is not late if a running one can make way for it. If
    jobs do not say how long they run, the forecast is uncertain, and the sentence says so.
    """
    wanted = [job for job_id in ids if (job := state.jobs.get(job_id)) and job.deadline_s is not None]
    told = foreseen(state) if wanted else {}
    missed = [job for job in wanted if not _is_met(job, told.get(job.id))]
    helped = _helped(index_of(state), told) if missed else set[str]()
    return {job.id: _in_words(state, job) for job in missed if job.id not in helped}


def _in_words(state: State, job: Job) -> str:
    """What is possible for a job that will be late: alone in its hurry, and before all others."""
    assert job.deadline_s is not None, job.id
    assert job.spec.deadline is not None, job.id
    zone = job.spec.deadline.zone

    def at(one: Expected) -> str:
        return f"{local_text(one.end_s, zone)} with {one.devices} GPU{'s' if one.devices > 1 else ''}"

    earliest = foreseen(state, {job.id}).get(job.id)
    unsaid = [one.id for one in state.jobs.values() if not one.status.ended and steps_left(one) is None]
    said = f"{'is not expected' if unsaid else 'cannot be done'} by {local_text(job.deadline_s, zone)}"
    if earliest is None:
        return f"{said}: the time of its start is unknown"
    first = max(one.spec.priority for one in state.jobs.values()) + 1
    raised = replace(job, spec=job.spec.model_copy(update={"priority": first}))
    before_all = foreseen(replace(state, jobs=state.jobs.with_job(raised)), {job.id}).get(job.id)
    said = f"{said}: earliest {at(earliest)}"
    if before_all is not None and before_all.end_s < earliest.end_s:
        said = f"{said}; {at(before_all)} if its priority is {first}"
    return f"{said}; {_supposed(unsaid)}" if unsaid else said


def _supposed(ids: list[str]) -> str:
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return f"a day is taken for what does not say `steps`: {', '.join(ids[:NAMED_MAX])}{more}"


def _helped(index: SchedulerIndex, told: Mapping[str, Expected]) -> set[str]:
    """Ids of jobs for which others are stopped that would else miss their deadlines: each time another one."""
    helped = set[str]()
    late = (one for one in index.policy.in_order() if one[1] < inf and not _is_met(one[0].job, told.get(one[0].job.id)))
    for waiting, by_s in islice(late, HELPED_MAX):
        may_start = array_limit_reason(index, waiting.job, Counter()) is None
        move = preempt_for_deadline(index, [(waiting, by_s)], index.state.at_s) if may_start else None
        if move is not None:
            helped.add(waiting.job.id)
            del index.elastic[move.job.id]
    return helped


def _is_met(job: Job, one: Expected | None) -> bool:
    return one is not None and one.end_s <= (inf if job.deadline_s is None else job.deadline_s)
