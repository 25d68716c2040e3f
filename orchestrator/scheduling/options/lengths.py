"""Predicted durations of jobs, learned from earlier attempts where neither the job nor its
measurements tell them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import NormalDist, median
from typing import NamedTuple

from orchestrator.scheduling.base.time_limits import (
    compute_time_limit_left_s,
    compute_total_run_time_s,
)
from orchestrator.specs.attempt import Attempt, Failure, FailureKind
from orchestrator.specs.job_record import Job
from orchestrator.specs.profile import WITHOUT_SECONDS
from orchestrator.specs.state import RunLength

# What is planned for a job of which nothing is known: a day on its slowest plan, so that it stands
# behind what is known to be shorter, and its devices are promised to nobody too soon. No surface
# tells it.
UNKNOWN_LENGTH_S = 86_400.0
# With nothing learned, a job starts before a maintenance that is further away.
UNKNOWN_OPEN_S = 7200.0
# What a probe takes, until one has ended here: imports, data and two steps. An assumption.
PROBE_S = 300.0
# Deviation of the logarithm of lengths, and of step times of other scripts, and how many outcomes
# that is worth. An assumption: two thirds of all lie within a factor of 4.5, wide at first.
SUPPOSED_SPREAD = 1.5
SUPPOSED_OUTCOMES = 4
LATE_SHARE = 0.9  # of all, that have ended by then
LATE_DEVIATIONS = NormalDist().inv_cdf(LATE_SHARE)
RUNS_MAX = 200  # newest, that are kept


class PredictedDuration(NamedTuple):
    """The predicted seconds of a job, and for how many seconds its nodes must stay open to
    attempts.
    """

    seconds: float
    open_s: float
    is_known: bool = True  # told, measured, or learned from what ended here
    spread: float = 0.0  # deviation of its logarithm, where it is learned from other jobs


class DurationHistory:
    """Predicts durations of jobs from the durations and step times of ended attempts of other jobs."""

    def __init__(self, run_lengths: Sequence[RunLength] = ()) -> None:
        self._probes_s = [
            run.seconds for run in run_lengths if run.probe and run.seconds is not None
        ]
        self._jobs_s = [
            run.seconds for run in run_lengths if not run.probe and run.seconds is not None
        ]
        # the newest of each script on each kind of device
        self._ratios = {
            (run.family, run.device): run.step_ratio
            for run in run_lengths
            if run.step_ratio is not None
        }

    def estimate_probe_s(self) -> float:
        """Return how many seconds a probe (a short measuring attempt) is expected to take, launch
        included.

        It is the median of earlier probes; PROBE_S without any.
        """
        return median(self._probes_s) if self._probes_s else PROBE_S

    def predict_duration(
        self, job: Job, device_kind: str, relative_step_time: float, unscaled_s: float | None
    ) -> PredictedDuration:
        """Return the predicted duration of a job for which neither its file nor a measurement gives
        seconds.

        `unscaled_s` are the predicted seconds of its remaining steps, up to an unknown factor of
        speed; None where the number of steps is unknown. `relative_step_time` is the step time of
        its plan over that of its slowest plan. The factor is that of this script's last run, else
        that of all scripts. Without any, the durations of all jobs count.
        """
        limit_s = compute_time_limit_left_s(job)
        ratio = self._ratios.get((job.spec.family_name, device_kind))
        if unscaled_s is not None and ratio is not None:
            seconds = min(limit_s, unscaled_s * ratio)
            return PredictedDuration(seconds, seconds)
        if unscaled_s is not None and self._ratios:
            spread = unscaled_s
            values = [*self._ratios.values()]
        else:
            spread = relative_step_time
            values = self._jobs_s
        if not values:
            seconds = min(UNKNOWN_LENGTH_S, limit_s)
            return PredictedDuration(
                seconds * relative_step_time, min(UNKNOWN_OPEN_S, limit_s), is_known=False
            )
        centre_s, deviation = _fit_median_and_log_deviation(values)
        late_s = centre_s * exp(LATE_DEVIATIONS * deviation)
        return PredictedDuration(
            min(limit_s, centre_s * spread),
            min(limit_s, late_s * (1.0 if unscaled_s is None else spread)),
            spread=deviation,
        )


def _fit_median_and_log_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return (median, standard deviation of the logarithm) of some durations.

    SUPPOSED_OUTCOMES values with a deviation of SUPPOSED_SPREAD count as well (Gelman et al. 2013,
    Bayesian Data Analysis, section 2.6).
    """
    centre = log(median(values))
    squares = sum((log(value) - centre) ** 2 for value in values)
    prior = SUPPOSED_OUTCOMES * SUPPOSED_SPREAD**2
    return exp(centre), sqrt((prior + squares) / (SUPPOSED_OUTCOMES + len(values)))


def add_run_length(
    run_lengths: tuple[RunLength, ...], job: Job, attempt: Attempt, failure: Failure | None
) -> tuple[RunLength, ...]:
    """Return the stored durations with that of an ended attempt added; unchanged where it teaches
    nothing.

    A probe's duration counts from its launch. A training's is added once it has succeeded: that of
    all its attempts.
    """
    assert attempt.ended_at_s is not None, attempt.name
    seconds = None
    step_s = attempt.measured_step_s
    if attempt.probe and failure is not None and failure.kind is FailureKind.PROBED:
        seconds = attempt.ended_at_s - attempt.launched_at_s
    elif failure is None:
        seconds = compute_total_run_time_s(job, attempt.ended_at_s)
    is_ratio = step_s and attempt.step_s > 0 and attempt.estimate.source in WITHOUT_SECONDS
    ratio = step_s / attempt.step_s if step_s and is_ratio else None
    if not seconds and ratio is None:
        return run_lengths
    run = RunLength(
        family=job.spec.family_name,
        device=attempt.device,
        probe=attempt.probe,
        seconds=seconds or None,
        step_ratio=ratio,
    )
    return (*run_lengths, run)[-RUNS_MAX:]
