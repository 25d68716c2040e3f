"""Jobs that will miss their deadlines, with what could help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf

from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.reports.forecast import JobForecast, make_quick_forecast
from orchestrator.scheduling.scheduling_pass.decide import find_array_wait
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.scheduling_pass.preemption import find_jobs_to_stop_for_deadline
from orchestrator.specs.clock import format_local_time
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

# jobs that would be late, the earliest deadlines first, for which a preemption is looked for
HELPED_MAX = 100
MARGIN = 2.0  # of a length, before the deadline of a job that nothing says the start of


def describe_late_jobs(state: State, job_ids: Iterable[str]) -> dict[str, str]:
    """Return {job id: sentence} of the jobs that are not expected to meet their deadlines.

    The sentence says what is possible instead: `cannot be done by Mon 08:00 UTC: earliest Mon 09:40
    UTC with 4 GPUs; Mon 07:55 UTC if its priority is 6`. The forecast assumes that nothing more is
    submitted and nothing fails. A job is not late if a running one can make way for it, nor if
    nothing tells when it ends. Where nothing tells when it starts, as beside a drained or a lost
    node, it is late once less than MARGIN of its duration is left.
    """
    wanted = [
        job for job_id in job_ids if (job := state.jobs.get(job_id)) and job.deadline_s is not None
    ]
    forecasts = make_quick_forecast(state) if wanted else {}
    missed = [job for job in wanted if not _is_deadline_met(job, forecasts.get(job.id))]
    index = make_index(state)
    missed = [job for job in missed if job.id in forecasts or _is_near_deadline(index, job)]
    helped = _find_ids_of_jobs_helped_by_stops(index, forecasts) if missed else set[str]()
    return {job.id: _describe_remedies(state, job) for job in missed if job.id not in helped}


def _describe_remedies(state: State, job: Job) -> str:
    """Return text on when a late job could end with its fastest option, and when with the highest
    priority.
    """
    assert job.deadline_s is not None, job.id
    assert job.spec.deadline is not None, job.id
    zone = job.spec.deadline.zone

    def describe(expected: JobForecast) -> str:
        end = format_local_time(expected.end_s, zone)
        return f"{end} with {expected.devices} GPU{'s' if expected.devices > 1 else ''}"

    earliest = make_quick_forecast(state, {job.id}).get(job.id)
    due = format_local_time(job.deadline_s, zone)
    if earliest is None:
        return f"is not expected by {due}: the time of its start is not known"
    first = max(entry.spec.priority for entry in state.jobs.values()) + 1
    raised = replace(job, spec=job.spec.model_copy(update={"priority": first}))
    before_all = make_quick_forecast(
        replace(state, jobs=state.jobs.replace_job(raised)), {job.id}
    ).get(job.id)
    sentence = f"cannot be done by {due}: earliest {describe(earliest)}"
    if before_all is not None and before_all.end_s < earliest.end_s:
        sentence = f"{sentence}; {describe(before_all)} if its priority is {first}"
    return sentence


def _find_ids_of_jobs_helped_by_stops(
    index: SchedulerIndex, forecast_by_job_id: Mapping[str, JobForecast]
) -> set[str]:
    """Return the ids of late jobs that stopping running jobs would help; no running job counts for
    two of them.
    """
    helped = set[str]()
    late = (
        turn
        for turn in index.policy.iterate_in_order()
        if turn[1] < inf
        and not _is_deadline_met(turn[0].job, forecast_by_job_id.get(turn[0].job.id))
    )
    for waiting, by_s in islice(late, HELPED_MAX):
        may_start = find_array_wait(index, waiting.job, Counter()) is None
        moves = (
            find_jobs_to_stop_for_deadline(index, [(waiting, by_s)], index.state.at_s)
            if may_start
            else ()
        )
        if moves:
            helped.add(waiting.job.id)
        for move in moves:
            del index.stoppable[move.job.id]
    return helped


def _is_near_deadline(index: SchedulerIndex, job: Job) -> bool:
    """Return whether less than MARGIN times the job's duration is left before its deadline.

    Where its duration is unknown, the deadline itself must have come.
    """
    assert job.deadline_s is not None, job.id
    length_s = index.options.find_remaining_work(job).duration_s
    return job.deadline_s - MARGIN * length_s <= index.state.at_s


def _is_deadline_met(job: Job, forecast: JobForecast | None) -> bool:
    """Return whether the job is expected to end by its deadline, or at an unknown time; False
    without a forecast.
    """
    due_s = inf if job.deadline_s is None else job.deadline_s
    return forecast is not None and (forecast.end_s <= due_s or not forecast.knows_end)
