"""Faster plans for a job that recovered from a failure, judged by its running attempt's measurements."""

from __future__ import annotations

from operator import itemgetter

from orchestrator.memory.calibration.calibrate import (
    Calibration,
    get_step_kind,
    get_step_time_correction,
)
from orchestrator.planning.frontier import estimate_candidate_fit_probability
from orchestrator.scheduling.base.migration import MOVE_GRACE_S, can_move, is_elastic
from orchestrator.scheduling.base.node_groups import NodeGroup
from orchestrator.scheduling.base.shape import find_gang_shape
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.scheduling.options.job_options import (
    SizeOption,
    collect_measured_peak_bytes_by_plan,
    collect_measured_step_s_by_plan,
    count_steps_left,
    estimate_needed_free_bytes,
    find_untried_candidates,
)
from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job_record import Job
from orchestrator.specs.profile import UNTIMED

CLIMB_PROBABILITY = 0.95  # with which the faster plan fits
CLIMB_LAUNCHES = 3  # that the gain has to exceed, beside the checkpoint
# Times as fast as the running plan, at least, where the plan shares or places state in another way:
# the ratio of two
# such predictions is off by up to 19 %, over 2,979 pairs of published trainings. Among plans that
# differ in batches and
# checkpointing alone the one that is predicted to be faster is.
CLIMB_SPEED_UP = 1.13


def may_move_to_faster_plan(job: Job) -> bool:
    """Return whether a job that recovered from an out-of-memory failure may restart with a faster
    plan.

    Its running attempt must be measured and movable without loss, and the job was not moved so
    before. A script of unknown memory never may: only the order of its plans' speeds is known, not
    the gain.
    """
    attempt = job.last
    if attempt is None or attempt.pace is None or not attempt.pace.peak_bytes or attempt.probe:
        return False
    recovered = any(ran_out_of_memory(earlier) and not earlier.probe for earlier in job.attempts)
    climbed = any(earlier.climbs_to is not None for earlier in job.attempts)
    is_timed = attempt.estimate.source not in UNTIMED
    is_running = attempt.status is AttemptStatus.RUNNING and can_move(job)
    return recovered and is_timed and is_running and not climbed and is_elastic(job)


def find_faster_option(
    job: Job, group: NodeGroup, calibration: Calibration, launch_cost_s: float
) -> SizeOption | None:
    """Return the fastest plan on the same number of devices that is worth a restart; None without
    one.

    It must fit with probability CLIMB_PROBABILITY and save more time than its launch costs.
    `calibration` includes the running attempt's measurements. Plans that ran out of memory are
    excluded, and so are plans that alter the training more.
    """
    attempt = job.last
    assert attempt is not None, job.id
    assert attempt.pace is not None, job.id
    left = count_steps_left(job, attempt)
    device = group.hardware.device
    pace = attempt.pace
    if left is None or attempt.step_s <= 0:
        return None
    try:
        candidates = list(find_untried_candidates(job, group, calibration))
    except SpecError:  # the job cannot be planned on these devices any more
        return None
    running = next((candidate for candidate in candidates if candidate.plan == attempt.plan), None)
    if running is None:
        return None
    steps = left - pace.steps_done
    factors = {get_step_kind(attempt.plan): pace.step_s / attempt.step_s}, calibration.step_factors
    steps_s = collect_measured_step_s_by_plan(job, device.name)
    peaks = collect_measured_peak_bytes_by_plan(job, device.name)
    timed = [
        (
            steps_s.get(candidate.plan)
            or candidate.step_s * get_step_time_correction(candidate.plan, *factors),
            candidate,
        )
        for candidate in candidates
        if candidate.plan.world_size == attempt.plan.world_size
        and candidate.degradation <= running.degradation
    ]
    for step_s, candidate in sorted(timed, key=itemgetter(0)):
        if steps * (pace.step_s - step_s) <= CLIMB_LAUNCHES * launch_cost_s + MOVE_GRACE_S:
            return None
        if step_s * CLIMB_SPEED_UP > pace.step_s and get_step_kind(candidate.plan) != get_step_kind(
            attempt.plan
        ):
            continue
        shape = find_gang_shape(
            candidate.plan,
            devices_per_node=group.hardware.devices_per_node,
            node_count=group.hardware.nodes,
        )
        least_bytes = estimate_needed_free_bytes(candidate, calibration, peaks)
        fits = (
            candidate.plan in peaks
            or estimate_candidate_fit_probability(candidate, device.memory, calibration)
            >= CLIMB_PROBABILITY
        )
        if shape is not None and fits and candidate.fits_host and least_bytes <= device.memory:
            seconds = launch_cost_s + steps * step_s
            return SizeOption(candidate, shape, least_bytes, seconds, open_s=seconds)
    return None
