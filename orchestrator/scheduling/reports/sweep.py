"""Reports of sweeps (hyperparameter searches): progress, cost and best trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.reports.cost import list_hourly_price_by_device, sum_job_cost
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.sweep import STOPPED_EARLY, Value
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.settings import format_plan
from orchestrator.specs.state import State


@frozen
class TrialReport:
    """A trial of a sweep: its job, its hyperparameters, and the last value of its metric."""

    number: int
    job: str
    parameters: Mapping[str, Value]
    text: str  # its parameters as text
    status: str  # of the job, or "stopped early"
    reason: str
    plan: str  # of its last attempt; "" before the first
    value: float | None  # last value of its metric


@frozen
class SweepReport:
    """The progress of a sweep, with all of its trials."""

    id: str
    name: str
    user: str
    method: str
    metric: str
    goal: str
    submitted_at_s: float
    ended: str  # why it ended; "" while it runs
    state: str  # its progress as text
    max_trials: int
    live: int  # number of unfinished trials
    best: int | None  # number of the best trial that has succeeded
    best_text: str  # that trial as text; "" before there is one
    device_s: float  # device-seconds of its trials
    money: float | None  # for these, where the cluster file has prices
    cost_text: str
    trials: tuple[TrialReport, ...]


def was_stopped_early(job: Job) -> bool:
    """Return whether the job is a trial that was stopped because others were better."""
    return job.status is JobStatus.CANCELLED and bool(job.cancel_reason)


def make_sweep_report(
    sweep_id: str,
    end_reason: str,
    jobs: Sequence[Job],
    metric_by_trial_number: Mapping[int, float | None],
    state: State,
    now_s: float,
) -> SweepReport:
    """Return the report of a sweep from its jobs; there must be at least one.

    `end_reason` says why the sweep ended; "" while it goes on. `metric_by_trial_number` has None
    for a trial without a value.
    """
    first = jobs[0].spec.trial
    assert first is not None, jobs[0].id
    sweep = first.sweep
    trials = tuple(_make_trial_report(job, metric_by_trial_number) for job in jobs)
    sign = 1 if sweep.metric.goal == "minimize" else -1
    done = [
        (sign * trial.value, trial)
        for trial in trials
        if trial.status == JobStatus.SUCCEEDED and trial.value is not None
    ]
    best = min(done, key=lambda pair: pair[0])[1] if done else None
    live = sum(not job.status.ended for job in jobs)
    cost = sum_job_cost(jobs, list_hourly_price_by_device(state), now_s)
    return SweepReport(
        id=sweep_id,
        name=jobs[0].spec.family_name,
        user=jobs[0].user,
        method=sweep.method,
        metric=sweep.metric.name,
        goal=sweep.metric.goal,
        submitted_at_s=jobs[0].submitted_at_s,
        ended=end_reason,
        state=_describe_progress(trials, live, sweep.trials, end_reason),
        max_trials=sweep.trials,
        live=live,
        best=None if best is None else best.number,
        best_text=""
        if best is None
        else f"{sweep.metric.name} {best.value:.6g} by {best.job}: {best.text}",
        device_s=cost.device_s,
        money=cost.money,
        cost_text=cost.text,
        trials=trials,
    )


def _make_trial_report(job: Job, metric_by_trial_number: Mapping[int, float | None]) -> TrialReport:
    trial = job.spec.trial
    assert trial is not None, job.id
    return TrialReport(
        number=trial.number,
        job=job.id,
        parameters=dict(trial.parameters),
        text=", ".join(
            f"{name} {_format_parameter_value(value)}" for name, value in trial.parameters
        ),
        status=STOPPED_EARLY if was_stopped_early(job) else job.status.value,
        reason=describe_status(job),
        plan="" if job.last is None else format_plan(job.last.plan),
        value=metric_by_trial_number.get(trial.number),
    )


def _format_parameter_value(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _describe_progress(
    trials: Sequence[TrialReport], live_count: int, trials_max: int, end_reason: str
) -> str:
    """Return a sweep's progress as text, such as `finished: 8 of 8 trials ended, 2 stopped early`."""
    stopped = sum(trial.status == STOPPED_EARLY for trial in trials)
    failed = sum(trial.status in (JobStatus.FAILED, JobStatus.REFUSED) for trial in trials)
    text = f"{len(trials) - live_count} of {trials_max} trials ended"
    if stopped:
        text += f", {stopped} stopped early"
    if failed:
        text += f", {failed} failed"
    return f"{end_reason}: {text}" if end_reason else text
