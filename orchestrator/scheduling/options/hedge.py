"""The choice of a plan after an out-of-memory failure: the one with the earliest expected end of the job."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.specs.job_record import Job

GIVEN_UP = 2.0  # times the longest: what it counts where the safest plan runs out of memory, too


def estimate_failure_cost_s(
    job: Job, launch_cost_s: float, plan_durations_s: Sequence[float]
) -> float:
    """Return how many seconds one more out-of-memory failure is expected to cost the job.

    They are one launch, and the risk that the job runs out of retries. `plan_durations_s` are the
    durations of its possible plans.
    """
    left = job.spec.retries.oom - sum(
        ran_out_of_memory(attempt) and not attempt.probe for attempt in job.attempts
    )
    return launch_cost_s + min(plan_durations_s) / max(1, left + 1)


def pick_first_plan_to_try(
    durations_and_probabilities: Sequence[tuple[float, float]], failure_cost_s: float
) -> int:
    """Return the index of the plan to try first, so that the expected end of the job is earliest.

    `durations_and_probabilities` has (seconds to the end, probability that the plan fits) of each
    plan. Where a plan runs out of memory, so does each plan that is less likely to fit. So plans
    are tried from less to more likely, and the expected end follows from the last one backwards
    (Bellman 1957, Dynamic Programming, chapter 3).
    """
    plans = durations_and_probabilities
    order = sorted(range(len(plans)), key=lambda place: (plans[place][1], -plans[place][0]))
    worst_s = GIVEN_UP * max(seconds for seconds, _ in plans)

    def expected_duration_s(
        index: int, excluded_probability: float, after_failure_s: float
    ) -> float:
        seconds, probability = plans[index]
        fits = 0.0
        if excluded_probability < 1:
            fits = (probability - excluded_probability) / (1 - excluded_probability)
        return fits * seconds + (1 - fits) * (failure_cost_s + after_failure_s)

    after_s = dict.fromkeys(
        order, worst_s
    )  # each place -> what is expected once that plan has run out of memory
    for index in reversed(range(len(order))):
        here = order[index]
        share = plans[order[index]][1]
        later = [place for place in order[index + 1 :] if plans[place][1] > share]
        after_s[here] = min(
            (expected_duration_s(place, share, after_s[place]) for place in later), default=worst_s
        )
    return min(
        order, key=lambda place: (expected_duration_s(place, 0.0, after_s[place]), -plans[place][1])
    )
