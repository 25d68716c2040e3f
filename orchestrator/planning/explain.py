"""Explanations of a plan for people: its bytes by cause, the closest plan, and why it was chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.memory.calibration.calibrate import CONFIDENCE, Calibration
from orchestrator.memory.calibration.correction import correct_estimate
from orchestrator.planning.frontier import (
    Candidate,
    Frontier,
    estimate_needed_device_bytes,
    find_rejection_reason,
    list_fitting,
)
from orchestrator.planning.trust import SPREAD_MAX, Choice, get_allowed_memory_fill
from orchestrator.planning.ways_out import (
    UnfitJob,
    WayOut,
    describe_missing_knobs,
    list_cards_with,
    list_ways_out,
    number_ways_out,
)
from orchestrator.specs.job.pins import format_pins
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, MomentBytes, Source
from orchestrator.specs.settings import format_plan
from orchestrator.specs.units import format_bytes, format_probability

MOMENTS_SHOWN = 8
PINS_NAMED = 4  # of more, `closest` says which plan it is


def list_bytes_by_cause(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """Return (cause, bytes) pairs, largest first, that add up to the estimate's `device_bytes`."""
    causes = sorted(estimate.by_cause, key=lambda cause: -cause[1])
    around = (
        ("allocator", estimate.reserved_bytes - estimate.allocated_bytes),
        ("context and communicators", estimate.device_bytes - estimate.reserved_bytes),
    )
    return (*causes, *((cause, count) for cause, count in around if count))


def list_highest_moments(estimate: MemoryEstimate) -> tuple[MomentBytes, ...]:
    """Return the MOMENTS_SHOWN highest memory peaks of a step in time order, each on the rank that
    needs most then.
    """
    worst: dict[str, MomentBytes] = {}
    for moment in estimate.moments:
        if moment.name not in worst or _sum_bytes(moment) > _sum_bytes(worst[moment.name]):
            worst[moment.name] = moment
    shown = set(
        sorted(worst, key=lambda name: _sum_bytes(worst[name]), reverse=True)[:MOMENTS_SHOWN]
    )
    return tuple(moment for name, moment in worst.items() if name in shown)


def find_fastest_fitting_or_lightest(
    frontier: Frontier, capacity_bytes: int, calibrated: Calibration
) -> Candidate | None:
    """Return the fastest candidate that fits; where none fits, the one that needs least memory;
    None for a frontier without candidates.
    """
    best = next(list_fitting(frontier, capacity_bytes, calibrated), None)
    return best or find_lightest_untried(frontier, calibrated)


def find_lightest_untried(
    frontier: Frontier, calibrated: Calibration, refuted: frozenset[Plan] = frozenset()
) -> Candidate | None:
    """Return the candidate outside `refuted` that needs the least device memory; None where all are
    refuted.

    Candidates with enough host memory come first.
    """

    def missing(candidate: Candidate) -> tuple[object, ...]:
        return (
            candidate.degradation,
            0 if candidate.fits_host else candidate.host_bytes,
            estimate_needed_device_bytes(candidate, calibrated),
        )

    untried = (candidate for candidate in frontier.candidates if candidate.plan not in refuted)
    return min(untried, key=missing, default=None)


def explain_unfit_job(
    case: UnfitJob,
    bytes_before_forward: int | None = None,
    ways_out: Sequence[WayOut] | None = None,
) -> str:
    """Return lines of text: the plan nearest to fitting, its bytes by cause, and changes with which
    the job would fit.

    `bytes_before_forward` is what a script was seen to allocate before its first forward pass,
    which no batch changes. `ways_out` are the changes to list, numbered; None means those of
    `list_ways_out`, without numbers.
    """
    capacity_bytes = case.capacity_bytes
    calibrated = case.calibrated
    if bytes_before_forward is not None:
        return _explain_failed_loading(case, bytes_before_forward)
    candidates = case.frontier
    closest = find_lightest_untried(candidates, calibrated, case.refuted) or find_lightest_untried(
        candidates, calibrated
    )
    assert closest is not None, "a frontier is never empty"
    estimate = correct_estimate(
        closest.estimate, calibrated.compute_activation_factor(closest.plan, closest.estimate)
    )
    needed = estimate_needed_device_bytes(closest, calibrated)
    pins = case.spec.plan
    pinned = ""
    if pins:
        pinned = f" with {format_pins(pins)}" if len(pins) <= PINS_NAMED else " as pinned"
    nothing = f"no plan{pinned} fits {case.tried_memory_text}"
    if closest.estimate.source is Source.ASSUMED:
        # its bytes are supposed from its own micro-batch: no number to act on
        lines = [
            nothing,
            f"plans such as {format_plan(closest.plan)} are supposed to need no less than one "
            "that ran out; "
            "what they need was not measured",
        ]
    elif needed <= capacity_bytes and closest.fits_host:
        # each plan ran out, or is predicted to need no less than one that did
        lines = [
            nothing,
            f"plans such as {format_plan(closest.plan)} were predicted to fit, "
            "and need no less than one that ran out",
        ]
    elif needed <= capacity_bytes:
        why = find_rejection_reason(closest, capacity_bytes, calibrated)
        lines = [
            f"{nothing} and its node",
            f"closest: {format_plan(closest.plan)} {why}",
        ]
    else:
        lines = [
            nothing,
            f"closest: {format_plan(closest.plan)} needs {format_bytes(needed)} "
            f"at its worst moment ({estimate.moment})",
            *(
                f"  {format_bytes(count):>12}  {cause}"
                for cause, count in list_bytes_by_cause(estimate)
            ),
            f"  {format_bytes(needed - estimate.device_bytes):>12}  margin",
        ]
    if ways_out is None:
        lines += [f"would fit: {way.sentence}" for way in list_ways_out(case)]
    else:
        lines += number_ways_out(ways_out)
    lines += describe_missing_knobs(case)
    if case.is_search_exhausted:
        lines.append("other changes were not searched: the job allows too many plans")
    return "\n".join(lines)


def _explain_failed_loading(case: UnfitJob, bytes_before_forward: int) -> str:
    """Return text on why a smaller batch does not help a script whose weights and states alone do
    not fit, and what would help.
    """
    needed = format_bytes(bytes_before_forward)
    cards = list_cards_with(bytes_before_forward)
    names = f", such as {', '.join(cards)}" if cards else ""
    lines = [
        f"no plan fits {case.tried_memory_text}: at micro-batch 1 it ran out of memory before its first forward pass",
        f"what it loads needs at least {needed}, and no batch lowers that",
        f"would fit: devices with more than {needed} free{names}",
        "would help: adapters, weights in fewer bits, or weights shared among devices, by a switch of the script",
    ]
    return "\n".join(lines)


def describe_choice(fit_probability: float | None, why_not_faster: str | None = None) -> str:
    """Return text on why a job's first plan was chosen.

    A `fit_probability` of None means that its memory is unknown. `why_not_faster` says why no
    faster plan was chosen; None where the plan is the fastest.
    """
    if why_not_faster is not None:
        return why_not_faster
    if fit_probability is None or fit_probability >= CONFIDENCE:
        return "the fastest plan that fits"
    return f"the plan that most probably fits ({format_probability(fit_probability)})"


def describe_rejected_fastest(taken: Choice, fastest: Choice) -> str | None:
    """Return text on why a plan is chosen over the fastest one; None where it is the fastest."""
    gain = 1 - fastest.seconds / taken.seconds if taken.seconds > 0 else 0.0
    if gain <= 0:
        return None
    faster = f"{format_plan(fastest.plan)} is predicted {gain:.1%} faster"
    taking = "(`objective: fastest` takes it)"
    if fastest.fill > max(taken.fill, get_allowed_memory_fill(taken.plan)):
        fill = f"and fills {fastest.fill:.0%} of a device"
        return f"a plan with more room for what predictions are off: {faster}, {fill} {taking}"
    why = "which is within the error of predictions"
    if gain > 1 - math.exp(-SPREAD_MAX):
        why = "and trusted less"
    return f"the most trusted plan near the fastest: {faster}, {why} {taking}"


def _sum_bytes(moment: MomentBytes) -> int:
    return moment.counted_bytes + moment.activation_bytes
