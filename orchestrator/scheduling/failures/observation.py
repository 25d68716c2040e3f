"""Observations: the predicted and measured memory and speed of an attempt, from which calibration
learns.
"""

from __future__ import annotations

from orchestrator.memory.calibration.correction import (
    correct_allocated_bytes,
    select_worst_moments,
)
from orchestrator.scheduling.failures.done_steps import made_no_optimizer_step
from orchestrator.scheduling.failures.meeting import describe_unplanned_group_size
from orchestrator.scheduling.failures.out_of_memory import (
    compute_oom_needed_bytes,
    describe_caught_errors,
    list_best_oom_reports,
)
from orchestrator.scheduling.failures.phases import OUTSIDE_TRAINING
from orchestrator.specs.attempt import Attempt, FailureKind, OomReport
from orchestrator.specs.job_record import Job
from orchestrator.specs.observation import Observation
from orchestrator.specs.profile import UNTIMED
from orchestrator.specs.replace import replace


def make_observation(job: Job, attempt: Attempt, device_bytes: int | None) -> Observation | None:
    """Return an ended attempt's predicted and measured memory and speed; None where its memory was
    not measured.

    `device_bytes` is the memory of its kind of device, None where unknown.
    """
    assert attempt.ended_at_s is not None, attempt.name
    measured = find_needed_peak_bytes(attempt, device_bytes)
    if measured is None or (
        survived_oom(attempt)
        and not (ran_out_of_memory(attempt) or _succeeded_beyond_memory(job, attempt))
    ):
        return None
    burst = _find_largest_oom_report(attempt)
    return replace(
        _make_observation_from(job, attempt, measured, attempt.measured_step_s, attempt.ended_at_s),
        torch_version=attempt.torch_version,
        ran_out=ran_out_of_memory(attempt) or _succeeded_beyond_memory(job, attempt),
        probe=attempt.probe,
        forward_bytes=attempt.forward_bytes,
        phase="" if burst is None else burst.phase,
        pass_done=None if burst is None else burst.pass_done,
        steps_done=0 if burst is None else burst.steps_done,
        steps_left=None if burst is None else _find_steps_left_after_oom(job, burst),
        finished=_shows_peak_of_whole_training(job, attempt),
        overhead_bytes=_find_measured_overhead_bytes(attempt),
    )


def make_running_observation(job: Job, attempt: Attempt) -> Observation | None:
    """Return a running attempt's predicted and measured memory and speed so far; None until it has
    reported its peak.
    """
    pace = attempt.pace
    if pace is None or not pace.peak_bytes:
        return None
    return _make_observation_from(job, attempt, pace.peak_bytes, pace.step_s, pace.at_s)


def make_pace_observation(job: Job, attempt: Attempt) -> Observation | None:
    """Return a running attempt's predicted and measured speed; None without a measured one.

    As its measured memory the observation has the predicted bytes, so that nothing is learned of
    memory.
    """
    pace = attempt.pace
    if pace is None:
        return None
    observation = _make_observation_from(
        job, attempt, attempt.estimate.allocated_bytes, pace.step_s, pace.at_s
    )
    return None if observation.step_ratio is None else observation


def _make_observation_from(
    job: Job, attempt: Attempt, measured_bytes: int, step_s: float | None, at_s: float
) -> Observation:
    """Return an observation (prediction beside measurement) of the attempt with these measured
    values.
    """
    estimate = attempt.estimate
    is_timed = attempt.step_s > 0 and estimate.source not in UNTIMED
    return Observation(
        job=job.key,
        number=attempt.number,
        device=attempt.device,
        family=job.spec.family_name,
        torch_version="",
        plan=attempt.plan,
        moments=select_worst_moments(estimate.moments),
        predicted_bytes=estimate.allocated_bytes,
        measured_bytes=measured_bytes,
        ran_out=False,
        step_ratio=step_s / attempt.step_s if step_s is not None and is_timed else None,
        at_s=at_s,
        relative_to=attempt.relative_to,
    )


def find_needed_peak_bytes(attempt: Attempt, device_bytes: int | None) -> int | None:
    """Return the highest measured peak of allocated bytes of any rank.

    After running out of memory, it is at least what the failed allocation needed. None where
    nothing was measured, a process was unwatched, an error was injected, or memory ran out outside
    training.
    """
    evidence = attempt.evidence
    failure = attempt.failure
    if (
        evidence is None
        or evidence.unwatched
        or any(r.injected for r in (*evidence.ooms, *evidence.caught))
    ):
        return None
    if failure is not None and ran_out_of_memory(attempt) and failure.phase in OUTSIDE_TRAINING:
        return None
    peaks = [
        beat.peak_bytes
        for beat in evidence.heartbeats
        if beat.steps_done > 0 and beat.peak_bytes > 0
    ]
    if ran_out_of_memory(attempt) or survived_oom(attempt):
        peaks += [
            compute_oom_needed_bytes(report) for report in list_best_oom_reports(evidence)
        ] or [_compute_min_needed_bytes_unreported(attempt, device_bytes)]
    return max(peaks, default=None)


def list_record_warnings(attempt: Attempt) -> tuple[str, ...]:
    """Return sentences that say why an ended attempt's measurements may be wrong or incomplete; ()
    if nothing does.
    """
    evidence = attempt.facts
    sentences = []
    if evidence.unwatched:
        sentences.append(f"unwatched: {evidence.unwatched[0]}; nothing was learned from it")
    sentences += [f"not read: {problem}" for problem in evidence.unread]
    if survived_oom(attempt) and not ran_out_of_memory(attempt):
        sentences.append(
            f"{describe_caught_errors(evidence)}: what they were in was lost, and its peak is no training's"
        )
    if attempt.failure is None and made_no_optimizer_step(evidence):
        sentences.append(
            "its optimizer made no step, though backward passes were made: nothing was trained"
        )
    if other_size := describe_unplanned_group_size(attempt):
        sentences.append(other_size)
    if mixing := _describe_sample_mixing(attempt):
        sentences.append(mixing)
    return tuple(sentences)


def _describe_sample_mixing(attempt: Attempt) -> str:
    """Return a sentence if a changed micro-batch size made this another training; "" if nothing
    shows that.

    A script that mixes the samples of a micro-batch shows it, as batch norm does.
    """
    cut = next((c for c in attempt.change if c.setting == "micro_batch_size"), None)
    mixing = next((beat.mixing for beat in attempt.heartbeats if beat.mixing), ())
    if cut is None or not mixing:
        return ""
    return (
        f"{' and '.join(mixing)}: at micro-batch {cut.after} instead of {cut.before} this is another training, though "
        "its global batch is the same"
    )


def _find_largest_oom_report(attempt: Attempt) -> OomReport | None:
    """Return the out-of-memory report of the rank that needed most bytes; None if no rank reported
    one.
    """
    if not ran_out_of_memory(attempt):
        return None
    return max(list_best_oom_reports(attempt.facts), key=compute_oom_needed_bytes, default=None)


def _find_steps_left_after_oom(job: Job, report: OomReport) -> int | None:
    """Return how many optimizer steps of the job were left when memory ran out; None where the
    total is unknown.
    """
    steps = job.spec.optimizer_steps
    return None if steps is None else max(0, steps - report.step)


def _find_measured_overhead_bytes(attempt: Attempt) -> int | None:
    """Return the device bytes used outside PyTorch's allocator: the largest of all ranks; None
    where not measured.
    """
    evidence = attempt.facts
    if not evidence.free_before_bytes:
        return None
    overheads = (
        evidence.free_before_bytes[beat.rank] - beat.allocator_room_bytes
        for beat in evidence.heartbeats
        if beat.allocator_room_bytes is not None
    )
    return max((count for count in overheads if count > 0), default=None)


def ran_out_of_memory(attempt: Attempt) -> bool:
    """Return whether the attempt failed because its plan needed more memory than its devices have."""
    return attempt.failure is not None and attempt.failure.kind is FailureKind.DEVICE_OOM


def survived_oom(attempt: Attempt) -> bool:
    """Return whether the script caught out-of-memory errors and went on, so that its measured peak
    is too low.
    """
    return bool(attempt.facts.caught) and not attempt.facts.ooms


def _succeeded_beyond_memory(job: Job, attempt: Attempt) -> bool:
    """Return whether an attempt succeeded although its plan needs more memory than its devices
    have.

    The out-of-memory errors that its script caught show that.
    """
    if (
        attempt.failure is not None
        or job.spec.on_caught_oom == "accept"
        or not survived_oom(attempt)
    ):
        return False
    return not any(report.foreign_bytes for report in attempt.facts.caught)


def _shows_peak_of_whole_training(job: Job, attempt: Attempt) -> bool:
    """Return whether the attempt's measured peak is that of the whole training.

    It is if the attempt ended the training and did at least half of its steps: earlier steps may
    have needed more. A script counts its steps from 0 in each attempt, so the furthest step of all
    attempts stands for the last.
    """
    if attempt.failure is not None or attempt.probe or survived_oom(attempt):
        return False
    last_step = 0
    for entry in (*job.attempts, attempt):
        last_step = max(last_step, *(beat.step for beat in entry.heartbeats), 0)
    return any(2 * beat.steps_done >= last_step > 0 for beat in attempt.heartbeats)


def _compute_min_needed_bytes_unreported(attempt: Attempt, device_bytes: int | None) -> int:
    """Return a lower bound of the needed bytes of one device where only the log says that memory
    ran out.
    """
    estimate = attempt.estimate
    predicted = correct_allocated_bytes(estimate, attempt.correction)
    around = estimate.device_bytes - estimate.allocated_bytes
    return max(predicted, (device_bytes or 0) - around) + 1
