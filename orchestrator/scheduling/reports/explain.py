"""Explanations of a job's attempts: prediction, measurement, the wrong term, and what followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from orchestrator.memory.calibration.calibrate import (
    CORRECTION_MAX,
    MARGIN,
    Calibration,
    calibrate,
)
from orchestrator.memory.calibration.correction import (
    compute_activation_factor_of_peak,
    correct_allocated_bytes,
    correct_device_bytes,
    correct_estimate,
    get_predicted_peak_bytes,
    rests_on_facts,
)
from orchestrator.planning.frontier import Candidate, estimate_needed_device_bytes, fits_device
from orchestrator.planning.picture import Mark, Picture, Point
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.trust import make_plan_kind
from orchestrator.scheduling.base.node_groups import NodeGroup, find_device_spec, find_node_group
from orchestrator.scheduling.failures.degrade import select_candidates_after_oom
from orchestrator.scheduling.failures.observation import list_record_warnings, ran_out_of_memory
from orchestrator.scheduling.options.job_options import (
    collect_measured_peak_bytes_by_plan,
    make_calibration_for_job,
)
from orchestrator.scheduling.options.probe import set_measured_memory
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.errors import SpecError
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job_record import Job
from orchestrator.specs.observation import Observation
from orchestrator.specs.profile import Source
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import format_plan
from orchestrator.specs.state import State
from orchestrator.specs.units import format_bytes, format_probability

ANY_DIFFERENCE = 1.005  # of activations: what is less is shown as x1.00


def explain_attempt(state: State, job: Job, attempt: Attempt) -> tuple[str, ...]:
    """Return sentences on one attempt: what was predicted, measured, wrong and learned, and what
    follows.

    A term of the prediction is named where the prediction was wrong by more than the margin.
    """
    observation = find_observation(state, job, attempt)
    sentences = [_describe_prediction(state, attempt)]
    predicted = get_predicted_peak_bytes(attempt)
    if observation is not None:
        sentences.append(_describe_measurement(attempt, observation))
        sentences += _describe_overhead(state, attempt, observation)
    if observation is not None and (
        observation.ran_out or _was_underestimated(attempt, observation)
    ):
        if predicted is not None:
            sentences.append(_describe_wrong_term(attempt, observation))
        sentences.append(_describe_what_was_learned(state, attempt, observation))
    if ran_out_of_memory(attempt) and attempt.number < len(job.attempts):
        sentences.append(_describe_next_attempt(state, job, attempt, job.attempts[attempt.number]))
    if attempt.failure is not None:
        sentences.append(f"ended by {attempt.failure.kind.value}: {attempt.failure.reason}")
    return (*sentences, *list_record_warnings(attempt))


def find_observation(state: State, job: Job, attempt: Attempt) -> Observation | None:
    """Return the stored observation (prediction beside measurement) of the attempt; None without
    one.
    """
    return next(
        (
            observation
            for observation in state.observations
            if (observation.job, observation.number) == (job.key, attempt.number)
        ),
        None,
    )


def make_plan_chart(state: State, job: Job) -> Picture | None:
    """Return a chart of the job's possible plans (memory against step time), as judged today; None
    without plans.

    The plans are those on the kind of device of its last attempt. Plans that the job ran are drawn
    at their measurement, all others at their corrected prediction with margin.
    """
    group = find_node_group(state, job.last.device if job.last else None)
    if group is None or not (candidates := _list_job_plans(state, job, group)):
        return None
    device = group.hardware.device
    calibrated = make_calibration_for_job(state, job, device.name)
    measured = collect_measured_peak_bytes_by_plan(job, device.name)
    if not rests_on_facts(candidates[0].estimate, calibrated.correction):
        return None
    tried = group_values((attempt.plan, str(attempt.number)) for attempt in job.attempts)
    points = []
    for candidate in candidates:
        peak_bytes = measured.get(candidate.plan)
        estimate = candidate.estimate
        around = estimate.device_bytes - estimate.allocated_bytes
        needed = (
            estimate_needed_device_bytes(candidate, calibrated)
            if peak_bytes is None
            else peak_bytes + around
        )
        points.append(
            Point(
                step_s=candidate.step_s,
                needed_bytes=needed,
                mark=_choose_mark(job, candidate, calibrated, device.memory),
                label=",".join(tried.get(candidate.plan, ())),
            )
        )
    return Picture(device=device.name, capacity_bytes=device.memory, points=tuple(points))


def _choose_mark(
    job: Job, candidate: Candidate, calibration: Calibration, device_bytes: int
) -> Mark:
    """Return the mark of a plan in the chart: refuted, chosen, fits, or too big."""
    if candidate.plan in job.refuted:
        return Mark.REFUTED
    if job.last is not None and candidate.plan == job.last.plan:
        return Mark.CHOSEN
    return Mark.FITS if fits_device(candidate, device_bytes, calibration) else Mark.TOO_BIG


def _describe_prediction(state: State, attempt: Attempt) -> str:
    predicted = get_predicted_peak_bytes(attempt)
    if predicted is None:
        return "predicted: nothing; its own micro-batch was taken to fill a device"
    text = (
        f"predicted: {format_bytes(predicted)} allocated at "
        f"{correct_estimate(attempt.estimate, attempt.correction).moment}"
    )
    if attempt.needed_bytes is None:
        return f"{text}; it was judged by the peak measured before"
    around = _get_predicted_bytes_outside_tensors(attempt)
    if around:
        text += f" + {format_bytes(around)} around it"
    text += f", {format_bytes(attempt.needed_bytes)} with margin"
    if (device := find_device_spec(state, attempt.device)) is not None:
        text += f", of {format_bytes(device.memory)}"
    if attempt.fit_probability is not None:
        text += f": fits with {format_probability(attempt.fit_probability)}"
    elif attempt.estimate.source in (Source.DECLARED, Source.DECLARED_MEMORY):
        text += ": by its profile, which nobody had measured"
    return text


def _get_predicted_bytes_outside_tensors(attempt: Attempt) -> int:
    """Return the bytes of a device that are predicted for other things than allocated tensors."""
    estimate = attempt.estimate
    factor = attempt.correction
    return correct_device_bytes(estimate, factor) - correct_allocated_bytes(estimate, factor)


def _describe_measurement(attempt: Attempt, observation: Observation) -> str:
    total = format_bytes(observation.measured_bytes)
    if observation.ran_out:
        used = attempt.peak_bytes or 0
        more = format_bytes(observation.measured_bytes - used)
        refused = f"{format_bytes(used)} and {more} more that it was refused, "
        total = f"{refused if 0 < used < observation.measured_bytes else ''}{total} at the least"
    predicted = get_predicted_peak_bytes(attempt)
    times = (
        ""
        if predicted is None
        else f", {observation.measured_bytes / max(1, predicted):.2f} x the prediction"
    )
    reserved_bytes = attempt.reserved_bytes
    reserved = (
        ""
        if reserved_bytes is None
        else f"; PyTorch held up to {format_bytes(reserved_bytes)}, {_describe_reserved(attempt)}"
    )
    return f"measured: {total}{times}{reserved}"


def _describe_reserved(attempt: Attempt) -> str:
    if get_predicted_peak_bytes(attempt) is None:
        return "which no plan predicted"
    reserved_bytes = correct_estimate(attempt.estimate, attempt.correction).reserved_bytes
    return f"{format_bytes(reserved_bytes)} predicted as the least that it needs"


def _describe_overhead(state: State, attempt: Attempt, observation: Observation) -> list[str]:
    """Return a list with a sentence on device memory outside PyTorch's allocator, and on what was
    learned of it.

    It is [] where that memory was not measured.
    """
    if observation.overhead_bytes is None:
        return []
    predicted_bytes = attempt.estimate.device_bytes - attempt.estimate.reserved_bytes
    measured = format_bytes(observation.overhead_bytes)
    predicted = format_bytes(predicted_bytes)
    was, now = (
        calibrated.overhead.compute_bytes(observation.plan)
        for calibrated in _iterate_calibrations_before_and_after(state, observation)
    )
    changed = (
        ""
        if was == now
        else f"; learned: {format_bytes(was)} -> {format_bytes(now)} on {observation.device}"
    )
    return [f"measured: {measured} of context and communicators, {predicted} predicted{changed}"]


def _iterate_calibrations_before_and_after(
    state: State, observation: Observation
) -> Iterator[Calibration]:
    """Yield the calibration as it was without the observation, then the one with it."""
    end = state.observations.index(observation)
    for observations in (state.observations[:end], state.observations[: end + 1]):
        yield calibrate(
            observations,
            device=observation.device,
            family=observation.family,
            job_key=observation.job,
        )


def _was_underestimated(attempt: Attempt, observation: Observation) -> bool:
    """Return whether the attempt needed clearly more memory than predicted."""
    predicted = get_predicted_peak_bytes(attempt)
    factor = compute_activation_factor_of_peak(observation.moments, observation.measured_bytes)
    return predicted is not None and (
        observation.measured_bytes > ANY_DIFFERENCE * predicted
        or factor >= ANY_DIFFERENCE * attempt.correction
    )


def _describe_wrong_term(attempt: Attempt, observation: Observation) -> str:
    """Return a sentence on the part of the memory estimate that was wrong.

    It names the moment of a step whose activations explain the measurement with the least change.
    """
    moments = [moment for moment in observation.moments if moment.activation_bytes > 0]
    if not moments:
        return "wrong: the estimate has no activations that could have been larger; its other terms are counted"
    needed = {
        moment: (observation.measured_bytes - moment.counted_bytes) / moment.activation_bytes
        for moment in moments
    }
    moment = min(moments, key=needed.__getitem__)
    times = needed[moment] / attempt.correction
    if times < ANY_DIFFERENCE:
        return "wrong: no term; it ran out within what was predicted"
    predicted = format_bytes(attempt.correction * moment.activation_bytes)
    true = format_bytes(observation.measured_bytes - moment.counted_bytes)
    least = " at the least" if observation.ran_out else ""
    beside = (
        f"; the other {format_bytes(moment.counted_bytes)} are counted"
        if moment.counted_bytes
        else ""
    )
    far = (
        f"; more than x{CORRECTION_MAX:.0f} is an outlier to other jobs"
        if needed[moment] > CORRECTION_MAX
        else ""
    )
    term = f"activations at {moment.name}, {predicted} predicted, {true} needed{least} (x{times:.2f}){beside}{far}"
    is_expected = (
        not observation.ran_out
        and observation.measured_bytes + _get_predicted_bytes_outside_tensors(attempt)
        <= (attempt.needed_bytes or 0)
    )
    return f"within the margin: {term}" if is_expected else f"wrong: {term}"


def _describe_what_was_learned(state: State, attempt: Attempt, observation: Observation) -> str:
    was, now = _iterate_calibrations_before_and_after(state, observation)
    engine = attempt.plan.engine
    where = f"{observation.family} on {observation.device}"
    text = f"learned: activations of {where} x{was.correction:.2f} -> x{now.correction:.2f}"
    if observation.ran_out and now.belief is not None:
        seen_of_pass = (
            ""
            if observation.pass_done is None
            else f" with {100 * observation.pass_done:.0f} % of the {observation.phase} pass done"
        )
        text += (
            f": at least x{now.belief.least:.2f}{seen_of_pass}, "
            f"below x{now.belief.compute_quantile(0.9):.2f} with 90 %"
        )
    margins = [
        _format_percent(calibrated.get_engine_errors(engine, attempt.estimate.source).margin)
        for calibrated in (was, now)
    ]
    if margins[0] != margins[1]:
        text += f", margin of {engine} {' -> '.join(margins)}"
    if observation.ran_out:
        text += (
            f"; with {format_bytes(observation.measured_bytes)} or less this plan never runs again"
        )
    if any(proof.plan == attempt.plan for proof in now.proven):
        text += "; this plan ended a training: it is judged by its own peak"
    return text


def _describe_next_attempt(
    state: State, job: Job, failed_attempt: Attempt, next_attempt: Attempt
) -> str:
    """Return a sentence on the attempt after a failure: its plan, and why no faster plan was
    chosen.
    """
    changed = ", ".join(str(change) for change in next_attempt.change)
    text = f"next: attempt {next_attempt.number}, {format_plan(next_attempt.plan)} ({changed})"
    faster: Counter[str] = Counter()
    candidates = _list_job_plans(state, job, find_node_group(state, next_attempt.device))
    here = [
        attempt
        for attempt in job.attempts[: failed_attempt.number]
        if attempt.device == next_attempt.device
    ]
    answers = {
        replace(candidate.plan, phase_batch_sizes=())
        for candidate in select_candidates_after_oom(job.spec, here, candidates)
    }
    for candidate in candidates:
        if candidate.plan == next_attempt.plan:
            break
        is_answer = candidate.plan in answers
        faster[
            _describe_why_not_chosen(
                job,
                candidate,
                failed_attempt,
                next_attempt,
                _find_device_bytes(state, next_attempt),
                needs_less_memory=is_answer,
            )
        ] += 1
    else:
        return text
    stays = make_plan_kind(next_attempt.plan) == make_plan_kind(failed_attempt.plan)
    if not faster:
        return f"{text}: the fastest of all"
    chosen = "engine and mechanics stay" if stays else "the most trusted left near the fastest"
    return (
        f"{text}: {chosen}; {', '.join(f'{count} faster {why}' for why, count in faster.items())}"
    )


def _find_device_bytes(state: State, attempt: Attempt) -> int:
    """Return the memory of one device of the attempt in bytes; 0 where the cluster lacks that kind."""
    device = find_device_spec(state, attempt.device)
    return 0 if device is None else device.memory


def _describe_why_not_chosen(
    job: Job,
    candidate: Candidate,
    failed_attempt: Attempt,
    next_attempt: Attempt,
    device_bytes: int,
    *,
    needs_less_memory: bool,
) -> str:
    """Return a phrase that says why this faster plan was not chosen for the next attempt.

    `needs_less_memory` is whether it needs less in the phase that ran out of memory.
    """
    correction = next_attempt.correction
    if any(
        ran_out_of_memory(attempt) and attempt.plan == candidate.plan
        for attempt in job.attempts[: failed_attempt.number]
    ):
        return "ran out of memory"
    if not needs_less_memory:
        return "no lighter in the optimizer step, where it ran out"
    if correct_device_bytes(candidate.estimate, correction) >= correct_device_bytes(
        failed_attempt.estimate, correction
    ):
        return "no lighter than what ran out"
    if correct_device_bytes(candidate.estimate, correction) * MARGIN <= device_bytes:
        if make_plan_kind(candidate.plan) != make_plan_kind(next_attempt.plan):
            return "of another engine or mechanics, or too likely to run out of memory again"
        return "too likely to run out of memory again for their speed, or as fast within the error"
    return "too big with what was learned"


def _list_job_plans(state: State, job: Job, node_group: NodeGroup | None) -> tuple[Candidate, ...]:
    """Return the job's plans on these nodes that no other plan beats; () without nodes or a
    possible plan.
    """
    if node_group is None:
        return ()
    try:
        calibrated = make_calibration_for_job(state, job, node_group.hardware.device.name)
        request = read_plan_request(set_measured_memory(job.spec, calibrated))
        return find_frontier(request, node_group.hardware, calibrated).candidates
    except SpecError:  # of this many devices, none can share the global batch
        return ()


def _format_percent(factor: float) -> str:
    return f"{100 * (factor - 1):.1f} %"
