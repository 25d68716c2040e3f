"""What was predicted of a job's attempts, what was measured, which term was wrong, and what that changed?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from orchestrator.memory.calibration.calibrate import CORRECTION_MAX, MARGIN, Calibration, calibration
from orchestrator.memory.calibration.correction import (
    corrected,
    corrected_allocated_bytes,
    corrected_bytes,
    is_known,
    observed_correction,
    predicted_peak_bytes,
)
from orchestrator.planning.frontier import Candidate, fits, needed_bytes
from orchestrator.planning.picture import Mark, Picture, Point
from orchestrator.planning.search import frontier
from orchestrator.planning.trust import kind
from orchestrator.scheduling.base.node_groups import Group, groups_of
from orchestrator.scheduling.failures.degrade import candidates_for_oom
from orchestrator.scheduling.failures.observation import ran_out, warnings
from orchestrator.scheduling.options.job_options import learned, measured_peaks
from orchestrator.scheduling.options.probe import measured_spec
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job_record import Job
from orchestrator.specs.observation import Observation
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import in_short
from orchestrator.specs.state import State
from orchestrator.specs.units import format_bytes, format_probability

ANY_DIFFERENCE = 1.005  # of activations: what is less is shown as x1.00


def explain_attempt(state: State, job: Job, attempt: Attempt) -> tuple[str, ...]:
    """Prediction, measurement, which term was wrong by more than the margin, and what followed, a sentence each."""
    seen = observation_of(state, job, attempt)
    said = [_predicted(state, attempt)]
    predicted = predicted_peak_bytes(attempt)
    if seen is not None:
        said.append(_measured(attempt, seen))
        said += _overhead(state, attempt, seen)
    if seen is not None and (seen.ran_out or _differs(attempt, seen)):
        said += [] if predicted is None else [_wrong_term(attempt, seen)]
        said.append(_learned(state, attempt, seen))
    if ran_out(attempt) and attempt.number < len(job.attempts):
        said.append(_next(state, job, attempt, job.attempts[attempt.number]))
    return (*said, *warnings(attempt))


def observation_of(state: State, job: Job, attempt: Attempt) -> Observation | None:
    """What the attempt's end said about its prediction, while it is remembered."""
    return next((seen for seen in state.observations if (seen.job, seen.number) == (job.key, attempt.number)), None)


def picture_of(state: State, job: Job) -> Picture | None:
    """The job's frontier on the devices of its last attempt, as it is judged by now; None where nothing is known of it.

    A plan that the job ran stands where it was measured, all others where they are predicted, corrected, with margin.
    """
    group = _group(state, job.last.device if job.last else None)
    if group is None or not (candidates := _frontier(state, job, group)):
        return None
    device = group.hardware.device
    calibrated, measured = learned(state, job, device.name), measured_peaks(job, device.name)
    if not is_known(candidates[0].estimate, calibrated.correction):
        return None
    tried: dict[object, list[str]] = {}
    for attempt in job.attempts:
        tried.setdefault(attempt.plan, []).append(str(attempt.number))
    points = []
    for candidate in candidates:
        peak_bytes, estimate = measured.get(candidate.plan), candidate.estimate
        around = estimate.device_bytes - estimate.allocated_bytes
        needed = needed_bytes(candidate, calibrated) if peak_bytes is None else peak_bytes + around
        points.append(
            Point(
                step_s=candidate.step_s,
                needed_bytes=needed,
                mark=_mark(job, candidate, calibrated, device.memory),
                label=",".join(tried.get(candidate.plan, ())),
            )
        )
    return Picture(device=device.name, capacity_bytes=device.memory, points=tuple(points))


def _mark(job: Job, candidate: Candidate, calibrated: Calibration, capacity_bytes: int) -> Mark:
    if candidate.plan in job.refuted:
        return Mark.REFUTED
    if job.last is not None and candidate.plan == job.last.plan:
        return Mark.CHOSEN
    return Mark.FITS if fits(candidate, capacity_bytes, calibrated) else Mark.TOO_BIG


def _predicted(state: State, attempt: Attempt) -> str:
    predicted = predicted_peak_bytes(attempt)
    if predicted is None:
        return "predicted: nothing; its own micro-batch was taken to fill a device"
    said = f"predicted: {format_bytes(predicted)} allocated at {corrected(attempt.estimate, attempt.correction).moment}"
    if attempt.needed_bytes is None:
        return f"{said}; it was judged by the peak measured before"
    around = _around_bytes(attempt)
    said += f" + {format_bytes(around)} around it" if around else ""
    said += f", {format_bytes(attempt.needed_bytes)} with margin"
    if (group := _group(state, attempt.device)) is not None:
        said += f", of {format_bytes(group.hardware.device.memory)}"
    if attempt.fit_probability is not None:
        said += f": fits with {format_probability(attempt.fit_probability)}"
    return said


def _around_bytes(attempt: Attempt) -> int:
    """What a device was expected to hold beside what is allocated."""
    estimate, factor = attempt.estimate, attempt.correction
    return corrected_bytes(estimate, factor) - corrected_allocated_bytes(estimate, factor)


def _measured(attempt: Attempt, seen: Observation) -> str:
    total = format_bytes(seen.measured_bytes)
    if seen.ran_out:
        used = attempt.peak_bytes or 0
        refused = f"{format_bytes(used)} and {format_bytes(seen.measured_bytes - used)} more that it was refused, "
        total = f"{refused if 0 < used < seen.measured_bytes else ''}{total} at the least"
    predicted = predicted_peak_bytes(attempt)
    times = "" if predicted is None else f", {seen.measured_bytes / max(1, predicted):.2f} x the prediction"
    held = attempt.reserved_bytes
    reserved = "" if held is None else f"; PyTorch held up to {format_bytes(held)}, {_predicted_reserved(attempt)}"
    return f"measured: {total}{times}{reserved}"


def _predicted_reserved(attempt: Attempt) -> str:
    if predicted_peak_bytes(attempt) is None:
        return "which no plan predicted"
    reserved_bytes = corrected(attempt.estimate, attempt.correction).reserved_bytes
    return f"{format_bytes(reserved_bytes)} predicted as the least that it needs"


def _overhead(state: State, attempt: Attempt, seen: Observation) -> list[str]:
    """What its devices held beside the allocator, and what that changed for other jobs there."""
    if seen.overhead_bytes is None:
        return []
    predicted_bytes = attempt.estimate.device_bytes - attempt.estimate.reserved_bytes
    told, predicted = format_bytes(seen.overhead_bytes), format_bytes(predicted_bytes)
    was, now = (one.overhead.bytes_of(seen.plan) for one in _before_and_after(state, seen))
    changed = "" if was == now else f"; learned: {format_bytes(was)} -> {format_bytes(now)} on {seen.device}"
    return [f"measured: {told} of context and communicators, {predicted} predicted{changed}"]


def _before_and_after(state: State, seen: Observation) -> Iterator[Calibration]:
    """What was known without it, and with it."""
    end = state.observations.index(seen)
    for known in (state.observations[:end], state.observations[: end + 1]):
        yield calibration(known, device=seen.device, family=seen.family, job=seen.job)


def _differs(attempt: Attempt, seen: Observation) -> bool:
    """Whether more was needed than predicted, by as much as can be seen of it."""
    predicted = predicted_peak_bytes(attempt)
    factor = observed_correction(seen.moments, seen.measured_bytes)
    return predicted is not None and (
        seen.measured_bytes > ANY_DIFFERENCE * predicted or factor >= ANY_DIFFERENCE * attempt.correction
    )


def _wrong_term(attempt: Attempt, seen: Observation) -> str:
    """The moment that explains the measurement with the least change of its activations, if it needs one."""
    moments = [moment for moment in seen.moments if moment.activation_bytes > 0]
    if not moments:
        return "wrong: the estimate has no activations that could have been larger; its other terms are counted"
    needed = {moment: (seen.measured_bytes - moment.counted_bytes) / moment.activation_bytes for moment in moments}
    moment = min(moments, key=lambda one: needed[one])
    times = needed[moment] / attempt.correction
    if times < ANY_DIFFERENCE:
        return "wrong: no term; it ran out within what was predicted"
    predicted = format_bytes(attempt.correction * moment.activation_bytes)
    true = format_bytes(seen.measured_bytes - moment.counted_bytes)
    least = " at the least" if seen.ran_out else ""
    beside = f"; the other {format_bytes(moment.counted_bytes)} are counted" if moment.counted_bytes else ""
    far = f"; more than x{CORRECTION_MAX:.0f} is an outlier to other jobs" if needed[moment] > CORRECTION_MAX else ""
    term = f"activations at {moment.name}, {predicted} predicted, {true} needed{least} (x{times:.2f}){beside}{far}"
    is_expected = not seen.ran_out and seen.measured_bytes + _around_bytes(attempt) <= (attempt.needed_bytes or 0)
    return f"within the margin: {term}" if is_expected else f"wrong: {term}"


def _learned(state: State, attempt: Attempt, seen: Observation) -> str:
    was, now = _before_and_after(state, seen)
    engine = attempt.plan.engine
    said = f"learned: activations of {seen.family} on {seen.device} x{was.correction:.2f} -> x{now.correction:.2f}"
    if seen.ran_out and now.belief is not None:
        seen_of_pass = (
            "" if seen.pass_done is None else f" with {100 * seen.pass_done:.0f} % of the {seen.phase} pass done"
        )
        said += f": at least x{now.belief.least:.2f}{seen_of_pass}, below x{now.belief.quantile(0.9):.2f} with 90 %"
    margins = [_percent(known.errors_of(engine, attempt.estimate.source).margin) for known in (was, now)]
    if margins[0] != margins[1]:
        said += f", margin of {engine} {' -> '.join(margins)}"
    if seen.ran_out:
        said += f"; this plan never fits less than {format_bytes(seen.measured_bytes)} again"
    if any(one.plan == attempt.plan for one in now.proven):
        said += "; this plan ended a training: it is judged by its own peak"
    return said


def _next(state: State, job: Job, failed: Attempt, following: Attempt) -> str:
    changed = ", ".join(str(change) for change in following.change)
    said = f"next: attempt {following.number}, {in_short(following.plan)} ({changed})"
    faster: Counter[str] = Counter()
    candidates = _frontier(state, job, _group(state, following.device))
    here = [attempt for attempt in job.attempts[: failed.number] if attempt.device == following.device]
    answers = {replace(one.plan, phase_batch_sizes=()) for one in candidates_for_oom(job.spec, here, candidates)}
    for candidate in candidates:
        if candidate.plan == following.plan:
            break
        is_answer = candidate.plan in answers
        faster[_why_not(job, candidate, failed, following, _memory_of(state, following), is_answer=is_answer)] += 1
    else:
        return said
    stays = kind(following.plan) == kind(failed.plan)
    if not faster:
        return f"{said}: the fastest of all"
    chosen = "engine and mechanics stay" if stays else "the most trusted left near the fastest"
    return f"{said}: {chosen}; {', '.join(f'{count} faster {why}' for why, count in faster.items())}"


def _memory_of(state: State, attempt: Attempt) -> int:
    group = _group(state, attempt.device)
    return 0 if group is None else group.hardware.device.memory


def _why_not(
    job: Job, candidate: Candidate, failed: Attempt, following: Attempt, memory_bytes: int, *, is_answer: bool
) -> str:
    correction = following.correction
    if any(ran_out(attempt) and attempt.plan == candidate.plan for attempt in job.attempts[: failed.number]):
        return "ran out of memory"
    if not is_answer:
        return "no lighter in the optimizer step, where it ran out"
    if corrected_bytes(candidate.estimate, correction) >= corrected_bytes(failed.estimate, correction):
        return "no lighter than what ran out"
    if corrected_bytes(candidate.estimate, correction) * MARGIN <= memory_bytes:
        if kind(candidate.plan) != kind(following.plan):
            return "of another engine or mechanics, or too likely to run out of memory again"
        return "too likely to run out of memory again for their speed, or as fast within the error"
    return "too big with what was learned"


def _group(state: State, device: str | None) -> Group | None:
    """The live, else the declared, nodes with that kind of device; the fastest kind where none is named."""
    groups = (*groups_of(state.nodes), *groups_of(state.declared))
    return next((group for group in groups if device in (None, group.hardware.device.name)), None)


def _frontier(state: State, job: Job, group: Group | None) -> tuple[Candidate, ...]:
    if group is None:
        return ()
    try:
        calibrated = learned(state, job, group.hardware.device.name)
        spec = measured_spec(job.spec, calibrated)
        return frontier(spec, group.hardware, calibrated.correction, calibrated.overhead).candidates
    except SpecError:  # of this many devices, none can share the global batch
        return ()


def _percent(margin: float) -> str:
    return f"{100 * (margin - 1):.1f} %"
