"""Probes: two short attempts that measure a script's memory per sample before it trains.

A probe uses up no retry budget, and nothing of it is progress. A bug in it ends the job, as anywhere else. Two
measurements give a line (memory/calibration/calibrate.py), with which the first real attempt is planned.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.memory.calibration.calibrate import MARGIN, Calibration
from orchestrator.planning.frontier import Candidate
from orchestrator.planning.strategies import batch_cuts
from orchestrator.specs.attempt import Attempt, Failure, FailureKind
from orchestrator.specs.choices import ActivationCheckpointing, Degradation, ZeroStage
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import PROBED_BY
from orchestrator.specs.job_record import Job

PROBES_MAX = 2  # of a job
MICRO_BATCHES_MIN = 3  # that the job could run with: of two, an attempt tells as much
ONE_SAMPLE = "more than 1 value per channel"  # torch/nn/functional.py, _verify_batch_size


def measured_spec(spec: JobSpec, calibrated: Calibration) -> JobSpec:
    """Return the job with memory per sample as probes of its family measured it, and the settings these relate to.

    A job is returned unchanged where there are none, or where it declares its memory.
    """
    if not _is_unknown(spec) or (calibrated.line is None and calibrated.relative_to is None):
        return spec
    return spec.model_copy(
        update={"measured": calibrated.line, "relative_to": calibrated.relative_to}
    )


def probe_of(
    job: Job, device: DeviceSpec, calibrated: Calibration, candidates: Sequence[Candidate]
) -> Candidate | None:
    """Return the plan to probe before the job trains on this kind of device; None where no probe is needed.

    It has as few devices as the job takes, and the smallest micro-batch; then the largest that is sure to fit, or the
    next. A peak is the maximum over points of a step, each of which grows linearly with the samples. So it is convex,
    and a line through two small micro-batches falls short of large ones. k times the micro-batch never needs more than
    k times the bytes.
    """
    if job.spec.probe == "never" or not _can_be_probed(job.spec) or job.fault is not None:
        return None
    if calibrated.line is not None or calibrated.is_seen or not _goes_on(job.attempts, device.name):
        return None
    alike = [candidate for candidate in candidates if _is_plain(candidate)]
    fewest = min((candidate.plan.world_size for candidate in alike), default=0)
    alike = sorted(
        (candidate for candidate in alike if candidate.plan.world_size == fewest),
        key=lambda candidate: candidate.plan.micro_batch_size,
    )
    tried = {attempt.plan.micro_batch_size for attempt in job.attempts}
    if len({candidate.plan.micro_batch_size for candidate in alike} | tried) < MICRO_BATCHES_MIN:
        return None
    fresh = [candidate for candidate in alike if candidate.plan.micro_batch_size not in tried]
    return max(
        (
            candidate
            for candidate in fresh
            if job.last is not None and _surely_fits(candidate, job.last, device)
        ),
        key=lambda candidate: candidate.plan.micro_batch_size,
        default=next(iter(fresh), None),
    )


def is_of_batch(attempt: Attempt, failure: Failure) -> bool:
    """Return whether a probe failed only because batch normalisation cannot train on one sample."""
    evidence = attempt.evidence
    if evidence is None or attempt.plan.micro_batch_size != 1:
        return False
    texts = [failure.excerpt, *(error.traceback for error in evidence.errors)]
    texts += [end.log_tail for end in evidence.ranks]
    return any(ONE_SAMPLE in text for text in texts)


def probe_bytes(probe: Candidate, probed: Attempt | None) -> int | None:
    """Return an upper bound of a probe's bytes, from an earlier probe with a margin; None without a measurement."""
    if probed is None or probed.peak_bytes is None:
        return None
    times = probe.plan.micro_batch_size / probed.plan.micro_batch_size
    return (
        round(MARGIN * times * probed.peak_bytes)
        + probe.estimate.device_bytes
        - probe.estimate.allocated_bytes
    )


def _surely_fits(candidate: Candidate, probed: Attempt, device: DeviceSpec) -> bool:
    least = probe_bytes(candidate, probed)
    return least is not None and least <= device.memory


def _goes_on(attempts: Sequence[Attempt], device: str) -> bool:
    """Return whether all earlier attempts were probes on this kind of device that measured their memory."""
    return len(attempts) < PROBES_MAX and all(
        attempt.probe
        and attempt.device == device
        and attempt.failure is not None
        and attempt.failure.kind is FailureKind.PROBED
        for attempt in attempts
    )


def unmeasured_reason(spec: JobSpec) -> str | None:
    """Return why a script of unknown memory is not probed, as text; None where it is."""
    if missing := _missing_knobs(spec):
        return f"no knob for {' and '.join(missing)}"
    count = len(batch_cuts(spec, spec.gpus.min))
    is_short = count < MICRO_BATCHES_MIN
    return (
        f"its batch has {count} possible micro-batches, and {MICRO_BATCHES_MIN} are needed"
        if is_short
        else None
    )


def _can_be_probed(spec: JobSpec) -> bool:
    return _is_unknown(spec) and not _missing_knobs(spec)


def _missing_knobs(spec: JobSpec) -> list[str]:
    """Return the words of the knobs that the job lacks for a probe."""
    return [word for name, word in PROBED_BY.items() if getattr(spec.knobs, name) is None]


def _is_unknown(spec: JobSpec) -> bool:
    return spec.is_script and spec.profile is None and spec.trains is None


def _is_plain(candidate: Candidate) -> bool:
    plan = candidate.plan
    nothing = ActivationCheckpointing.NONE, ZeroStage.NONE, Degradation.EXACT
    return (plan.activation_checkpointing, plan.zero_stage, candidate.degradation) == nothing
