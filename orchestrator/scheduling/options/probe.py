"""Probes: two to four short attempts that measure a script's memory per sample before it trains.

A probe uses up no retry budget, and nothing of it is progress. A bug in it ends the job, as anywhere else. Two
measurements that differ give a line (memory/calibration/calibrate.py), with which the first real attempt is planned.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.memory.calibration.calibrate import MARGIN, PROBES_MAX, Calibration
from orchestrator.planning.frontier import Candidate
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.strategies import list_batch_cuts
from orchestrator.specs.attempt import Attempt, Failure, FailureKind
from orchestrator.specs.choices import ActivationCheckpointing, Degradation, ZeroStage
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import PROBED_BY, Knob, Knobs
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace

MICRO_BATCHES_MIN = 3  # that the job could run with: of two, an attempt tells as much
BACKWARD = (
    1.25  # of what a forward pass keeps: a backward pass holds gradients of activations beside it
)
PROBE_TURNS = 2  # the second has the gradients of the first beside its own
ONE_SAMPLE = "more than 1 value per channel"  # torch/nn/functional.py, _verify_batch_size


def set_measured_memory(spec: JobSpec, calibration: Calibration) -> JobSpec:
    """Return the job with the bytes per sample that probes of its family measured.

    It is unchanged where there was no probe, or where the job declares its memory.
    """
    if not _has_unknown_memory(spec) or (
        calibration.line is None and calibration.relative_to is None
    ):
        return spec
    return spec.model_copy(
        update={"measured": calibration.line, "relative_to": calibration.relative_to}
    )


def find_probe_plan(
    job: Job, device: DeviceSpec, calibration: Calibration, candidates: Sequence[Candidate]
) -> Candidate | None:
    """Return the plan for a short measuring attempt (a probe) before the job trains; None where
    none is needed.

    It has as few devices as the job takes. The first probe has the smallest micro-batch, the next
    one the largest that will fit. A peak is the maximum over points of a step, each of which grows
    linearly with the samples. So it is convex, and a line through two small micro-batches falls
    short of large ones. k times the micro-batch never needs more than k times the bytes. A probe
    accumulates PROBE_TURNS gradients at most: more take time and no memory.
    """
    if job.spec.probe == "never" or not _can_be_probed(job.spec) or job.fault is not None:
        return None
    if (
        calibration.line is not None
        or calibration.is_seen
        or not _were_all_probes(job.attempts, device.name)
    ):
        return None
    alike = [candidate for candidate in candidates if _saves_no_memory(candidate)]
    fewest = min((candidate.plan.world_size for candidate in alike), default=0)
    alike = sorted(
        (candidate for candidate in alike if candidate.plan.world_size == fewest),
        key=lambda candidate: candidate.plan.micro_batch_size,
    )
    tried = {attempt.plan.micro_batch_size for attempt in job.attempts}
    if len({candidate.plan.micro_batch_size for candidate in alike} | tried) < MICRO_BATCHES_MIN:
        return None
    fresh = [candidate for candidate in alike if candidate.plan.micro_batch_size not in tried]
    sure = [candidate for candidate in fresh if _will_probe_fit(candidate, job.attempts, device)]
    probe = next(iter([*sure[-1:], *fresh]), None)
    return None if probe is None else _limit_micro_batches(probe, job.spec.knobs)


def _limit_micro_batches(probe: Candidate, knobs: Knobs) -> Candidate:
    """Return the probe's plan with at most PROBE_TURNS micro-batches per step, if a knob sets their
    number.
    """
    is_told = isinstance(knobs.gradient_accumulation_steps, Knob)
    if not is_told or knobs.global_batch_size is not None:  # which the script would divide itself
        return probe
    whole = probe.plan.gradient_accumulation_steps
    turns = min(PROBE_TURNS, whole)
    return replace(
        probe,
        plan=replace(probe.plan, gradient_accumulation_steps=turns),
        step_s=probe.step_s * turns / whole,
    )


def failed_because_of_single_sample(attempt: Attempt, failure: Failure) -> bool:
    """Return whether a probe failed only because batch normalisation cannot train on a single
    sample.
    """
    evidence = attempt.evidence
    if evidence is None or attempt.plan.micro_batch_size != 1:
        return False
    texts = [failure.excerpt, *(error.traceback for error in evidence.errors)]
    texts += [end.log_tail for end in evidence.ranks]
    return any(ONE_SAMPLE in text for text in texts)


def find_max_probe_bytes(probe: Candidate, earlier_probe: Attempt | None) -> int | None:
    """Return an upper bound of the bytes that a probe needs, from the peak of an earlier probe.

    None where `earlier_probe` is None or has no peak.
    """
    if earlier_probe is None or earlier_probe.peak_bytes is None:
        return None
    times = probe.plan.micro_batch_size / earlier_probe.plan.micro_batch_size
    return (
        round(MARGIN * times * earlier_probe.peak_bytes)
        + probe.estimate.device_bytes
        - probe.estimate.allocated_bytes
    )


def _will_probe_fit(
    candidate: Candidate, earlier_probes: Sequence[Attempt], device: DeviceSpec
) -> bool:
    """Return whether a probe will fit the device, judged by the peaks of the earlier probes; False
    without any.
    """
    if not earlier_probes:
        return False
    least = find_max_probe_bytes(candidate, earlier_probes[-1])
    if least is None or least <= device.memory:
        return least is not None
    first = earlier_probes[0]
    last = earlier_probes[-1]
    more = last.plan.micro_batch_size - first.plan.micro_batch_size
    sample_bytes = (last.forward_bytes - first.forward_bytes) / max(1, more)
    if sample_bytes <= 0 or not first.forward_bytes:
        return False
    samples = candidate.plan.micro_batch_size - last.plan.micro_batch_size
    peak_bytes = (last.peak_bytes or 0) + BACKWARD * samples * sample_bytes
    return MARGIN * peak_bytes <= device.memory


def _were_all_probes(attempts: Sequence[Attempt], device_kind: str) -> bool:
    """Return whether the attempts are only successful probes on this kind of device, and fewer than
    PROBES_MAX.
    """
    return len(attempts) < PROBES_MAX and all(
        attempt.probe
        and attempt.device == device_kind
        and attempt.failure is not None
        and attempt.failure.kind is FailureKind.PROBED
        for attempt in attempts
    )


def find_probe_obstacle(spec: JobSpec) -> str | None:
    """Return why no probe can measure the memory of this script, as text; None where one can."""
    if missing := _list_missing_knob_names(spec):
        return f"no knob for {' and '.join(missing)}"
    count = len(list_batch_cuts(read_plan_request(spec), spec.gpus.min))
    is_short = count < MICRO_BATCHES_MIN
    return (
        f"its batch has {count} possible micro-batches, and {MICRO_BATCHES_MIN} are needed"
        if is_short
        else None
    )


def _can_be_probed(spec: JobSpec) -> bool:
    """Return whether the job is a script of unknown memory that has the knobs (flags) which a probe
    sets.
    """
    return _has_unknown_memory(spec) and not _list_missing_knob_names(spec)


def _list_missing_knob_names(spec: JobSpec) -> list[str]:
    """Return the names, as people call them, of the knobs that a probe needs and the job lacks."""
    return [word for name, word in PROBED_BY.items() if getattr(spec.knobs, name) is None]


def _has_unknown_memory(spec: JobSpec) -> bool:
    """Return whether the job is a script whose memory neither its file nor a model of ours tells."""
    return spec.is_script and spec.profile is None and spec.trains is None


def _saves_no_memory(candidate: Candidate) -> bool:
    """Return whether the plan neither checkpoints activations nor shards, and changes nothing of
    the training.
    """
    plan = candidate.plan
    nothing = ActivationCheckpointing.NONE, ZeroStage.NONE, Degradation.EXACT
    return (plan.activation_checkpointing, plan.zero_stage, candidate.degradation) == nothing
