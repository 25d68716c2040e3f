"""Shall a script be measured before it trains? Two short attempts tell what a sample needs.

A probe uses up no budget, and nothing of it is progress; a bug met in it ends the job, as anywhere else. What two of
them measured is a line through both (memory/calibration/calibrate.py); the first real attempt is planned with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.memory.calibration.calibrate import MARGIN, Calibration
from orchestrator.planning.frontier import Candidate
from orchestrator.specs.attempt import Attempt, Failure, FailureKind
from orchestrator.specs.choices import ActivationCheckpointing, Degradation, ZeroStage
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job

PROBES_MAX = 2  # of a job
MICRO_BATCHES_MIN = 3  # that the job could run with: of two, an attempt tells as much
ONE_SAMPLE = "more than 1 value per channel"  # torch/nn/functional.py, _verify_batch_size


def measured_spec(spec: JobSpec, calibrated: Calibration) -> JobSpec:
    """The job with what its family was probed to need, and the settings that outcomes of its family are relative to.

    As it is where there are none, or where the job says itself what it needs.
    """
    if not _is_unknown(spec) or (calibrated.line is None and calibrated.relative_to is None):
        return spec
    return spec.model_copy(update={"measured": calibrated.line, "relative_to": calibrated.relative_to})


def probe_of(
    job: Job, device: DeviceSpec, calibrated: Calibration, candidates: Sequence[Candidate]
) -> Candidate | None:
    """The candidate to be measured before the job trains on this kind of device; None where there is no need.

    With as few devices as the job takes, at the smallest micro-batch; then at the largest that is sure to fit, or the
    next. A peak is the maximum of moments, each of which grows by the sample from what it has without one. So it is
    convex, and a line through two small micro-batches falls short of large ones. k times the micro-batch never needs
    more than k times the bytes.
    """
    if job.spec.probe == "never" or not _can_be_probed(job.spec) or job.fault is not None:
        return None
    if calibrated.line is not None or calibrated.is_seen or not _goes_on(job.attempts, device.name):
        return None
    alike = [one for one in candidates if _is_plain(one)]
    fewest = min((one.plan.world_size for one in alike), default=0)
    alike = sorted((one for one in alike if one.plan.world_size == fewest), key=lambda one: one.plan.micro_batch_size)
    tried = {attempt.plan.micro_batch_size for attempt in job.attempts}
    if len({one.plan.micro_batch_size for one in alike} | tried) < MICRO_BATCHES_MIN:
        return None
    fresh = [one for one in alike if one.plan.micro_batch_size not in tried]
    return max(
        (one for one in fresh if job.last is not None and _surely_fits(one, job.last, device)),
        key=lambda one: one.plan.micro_batch_size,
        default=next(iter(fresh), None),
    )


def is_of_batch(attempt: Attempt, failure: Failure) -> bool:
    """Whether the probe failed only because batch normalisation cannot train on one sample: a larger batch can."""
    return attempt.plan.micro_batch_size == 1 and ONE_SAMPLE in f"{failure.reason}\n{failure.excerpt}"


def probe_bytes(probe: Candidate, probed: Attempt | None) -> int | None:
    """Return what a probe needs at most by what an earlier probe needed, with its margin; None where none told."""
    if probed is None or probed.peak_bytes is None:
        return None
    times = probe.plan.micro_batch_size / probed.plan.micro_batch_size
    return round(MARGIN * times * probed.peak_bytes) + probe.estimate.device_bytes - probe.estimate.allocated_bytes


def _surely_fits(one: Candidate, probed: Attempt, device: DeviceSpec) -> bool:
    least = probe_bytes(one, probed)
    return least is not None and least <= device.memory


def _goes_on(attempts: Sequence[Attempt], device: str) -> bool:
    """Whether all that ran before was probed here, and told what it needs."""
    return len(attempts) < PROBES_MAX and all(
        one.probe and one.device == device and one.failure is not None and one.failure.kind is FailureKind.PROBED
        for one in attempts
    )


def _can_be_probed(spec: JobSpec) -> bool:
    """A probe leaves nothing behind where the job looks for its own: the script has to take another folder."""
    return _is_unknown(spec) and spec.knobs.micro_batch_size is not None and spec.knobs.output_dir is not None


def _is_unknown(spec: JobSpec) -> bool:
    return spec.is_script and spec.profile is None and spec.trains is None


def _is_plain(one: Candidate) -> bool:
    plan = one.plan
    nothing = ActivationCheckpointing.NONE, ZeroStage.NONE, Degradation.EXACT
    return (plan.activation_checkpointing, plan.zero_stage, one.degradation) == nothing
