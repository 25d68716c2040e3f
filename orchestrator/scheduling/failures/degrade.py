"""Selects the plans to try after an out-of-memory failure, by the phase in which it happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from orchestrator.memory.engines.widths import compute_master_bytes_per_weight
from orchestrator.planning.frontier import Candidate
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.scheduling.failures.out_of_memory import (
    compute_oom_needed_bytes,
    list_best_oom_reports,
)
from orchestrator.specs.attempt import Attempt, Phase
from orchestrator.specs.choices import Offload, Optimizer, ZeroStage
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace

# Bytes of optimizer state per parameter: two fp32 moments (arXiv:1711.05101), the same in 8 bits
# (arXiv:2110.02861),
# means of rows and columns (arXiv:1804.04235), one fp32 momentum.
STATE_BYTES = {
    Optimizer.ADAMW: 8.0,
    Optimizer.ADAMW_8BIT: 2.0,
    Optimizer.ADAFACTOR: 0.0,
    Optimizer.SGD: 4.0,
}

SETTINGS_BUT_BATCHES = tuple(
    field.name
    for field in fields(Plan)
    if field.name not in ("micro_batch_size", "gradient_accumulation_steps")
)


def select_candidates_after_oom(
    spec: JobSpec, attempts: Sequence[Attempt], candidates: Iterable[Candidate]
) -> list[Candidate]:
    """Return the candidate plans that need less memory in the phase in which `attempts` ran out of
    it.

    After a failure in the optimizer step, these are plans that hold less there, since no batch size
    shrinks weights, gradients and optimizer states. All plans stay if none holds less and the
    failure had a micro-batch above 1. A phase with its own batch size, such as evaluation, excludes
    no plan: every plan gets half that batch size. Where the same bytes ran out under two
    micro-batches, only plans stay that differ in more than their batches.
    """
    chosen = list(candidates)
    if find_batch_independent_oom_bytes(attempts) is not None:
        tried = {_list_settings_except_batches(attempt.plan) for attempt in attempts}
        chosen = [
            candidate
            for candidate in chosen
            if _list_settings_except_batches(candidate.plan) not in tried
        ]
    burst = [attempt.plan for attempt in attempts if _find_oom_phase(attempt) is Phase.OPTIMIZER]
    if burst:
        least = min(map(estimate_bytes_per_parameter, burst))
        lighter = [
            candidate
            for candidate in chosen
            if estimate_bytes_per_parameter(candidate.plan) < least
        ]
        if lighter or any(plan.micro_batch_size == 1 for plan in burst):
            chosen = lighter
    lowered = list_halved_batch_size_by_phase(spec, attempts)
    return (
        [
            replace(candidate, plan=replace(candidate.plan, phase_batch_sizes=lowered))
            for candidate in chosen
        ]
        if lowered
        else chosen
    )


def find_batch_independent_oom_bytes(attempts: Sequence[Attempt]) -> int | None:
    """Return the needed bytes of a device if memory ran out identically under two micro-batch
    sizes; else None.

    Both times the live and the requested bytes were exactly equal. So they do not depend on the
    number of samples: no smaller batch helps.
    """
    needs: dict[tuple[object, int, int], int] = {}
    for attempt in attempts:
        if _find_oom_phase(attempt) is Phase.OPTIMIZER or not ran_out_of_memory(attempt):
            continue
        report = max(
            list_best_oom_reports(attempt.facts), key=compute_oom_needed_bytes, default=None
        )
        if report is None or report.injected or not report.requested_bytes:
            continue
        key = (
            _list_settings_except_batches(attempt.plan),
            report.live_bytes,
            report.requested_bytes,
        )
        if needs.setdefault(key, attempt.plan.micro_batch_size) != attempt.plan.micro_batch_size:
            return report.live_bytes + report.requested_bytes
    return None


def _list_settings_except_batches(plan: Plan) -> tuple[object, ...]:
    """Return the values of all settings of a plan but its micro-batch and accumulation, to compare
    plans.
    """
    return tuple(getattr(plan, name) for name in SETTINGS_BUT_BATCHES)


def estimate_bytes_per_parameter(plan: Plan) -> float:
    """Return the bytes per model parameter that one device holds in the optimizer step.

    Source of the formula: arXiv:1910.02054, section 5.
    """
    if plan.offload is Offload.PARAMETERS:
        return 0.0
    stage = plan.mechanics.stage
    shards = plan.mechanics.shards
    width = float(compute_master_bytes_per_weight(plan))
    weights = width / (shards if stage >= ZeroStage.PARAMETERS else 1)
    gradients = width / (shards if stage >= ZeroStage.GRADIENTS else 1)
    states = STATE_BYTES[plan.optimizer] / shards
    if plan.offload is Offload.OPTIMIZER:
        states = 0.0
    if plan.optimizer_in_backward:
        gradients = 0.0
    return (weights + gradients + states) / (plan.layout.tp * plan.layout.pp)


def list_halved_batch_size_by_phase(
    spec: JobSpec, attempts: Iterable[Attempt]
) -> tuple[tuple[str, int], ...]:
    """Return (phase, half of its batch size) for each phase that ran out of memory at a batch size
    of its own.
    """
    sizes: dict[str, int] = {}
    for attempt in attempts:
        phase = find_lowerable_phase(spec, attempt)
        if phase is not None:
            sizes[phase.value] = _get_phase_batch_size(spec, attempt.plan, phase) // 2
    return tuple(sorted(sizes.items()))


def find_lowerable_phase(spec: JobSpec, attempt: Attempt) -> Phase | None:
    """Return the phase in which the attempt ran out of memory, if a knob can lower that phase's own
    batch size; else None.
    """
    phase = _find_oom_phase(attempt)
    if phase is None or _get_phase_batch_size(spec, attempt.plan, phase) <= 1:
        return None
    return phase


def _find_oom_phase(attempt: Attempt) -> Phase | None:
    """Return the phase in which the attempt ran out of device memory; None if it did not, or if
    that is unknown.
    """
    return (
        attempt.failure.phase
        if attempt.failure is not None and ran_out_of_memory(attempt)
        else None
    )


def _get_phase_batch_size(spec: JobSpec, plan: Plan, phase: Phase) -> int:
    """Return the plan's batch size for this phase; 0 where no knob sets it."""
    knob = spec.knobs.micro_batch_size
    phase_knob = (
        next((part for part in knob.all if part.phase == phase), None) if knob is not None else None
    )
    if phase_knob is None or phase_knob.default is None:
        return 0
    return dict(plan.phase_batch_sizes).get(phase, int(phase_knob.default))
