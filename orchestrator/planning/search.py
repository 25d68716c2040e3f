"""The search over every legal plan of a job on some hardware, for those that no other beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from math import ceil, floor, inf, log2
from typing import NamedTuple

from orchestrator.memory.calibration.calibrate import UNMEASURED, Calibration
from orchestrator.memory.calibration.correction import correct_device_bytes
from orchestrator.memory.engines.activations import is_full_checkpointing_lightest
from orchestrator.memory.engines.overhead import MeasuredOverhead
from orchestrator.memory.estimate import DeviceBytes, make_device_bytes_cache_key
from orchestrator.planning.cost import Hardware, StepTimePredictor, estimate_busy_share
from orchestrator.planning.families import (
    PlanFamily,
    SettingsVariant,
    copy_if_legal,
    list_families,
    list_variants,
)
from orchestrator.planning.frontier import Candidate, Frontier, estimate_node_host_bytes
from orchestrator.planning.layouts import list_layouts
from orchestrator.planning.pareto import (
    CostedPlan,
    Staircase,
    TimedPlan,
    find_pareto_front,
    get_device_bytes,
)
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import PlanRequest
from orchestrator.planning.strategies import list_engines, make_no_strategy_error
from orchestrator.planning.trust import OFFLOADED, rate_trust
from orchestrator.planning.work import OTHER_PLANS_MAX, PLANS_MAX, PlanCounter
from orchestrator.specs.choices import (
    AXES,
    ActivationCheckpointing,
    ParallelLayout,
)
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job.pins import format_pins
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, ModelProfile
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import format_setting_value

__all__ = ["Hardware", "find_frontier", "list_layouts", "list_plans"]

_Needed = Callable[[Plan, MemoryEstimate], float]  # bytes of a device
_Beats = Callable[[int, float, int, float], bool]
# devices: plans that need more memory than so many have are left out, as long as any needs less
REACH = 2
CORRECTION_STEPS = 4  # in which a correction doubles: frontiers are kept for each


def find_frontier(
    request: PlanRequest,
    hardware: Hardware,
    calibrated: Calibration = UNMEASURED,
    *,
    skips_oversized: bool = False,
) -> Frontier:
    """Return the plans of the job on this hardware that no other plan beats; cached for all jobs of
    the same shape.

    Every legal plan is examined. Plans that need more than the memory of REACH devices count only
    where all plans need more. `calibrated` has the correction, a factor on the activations, and the
    memory outside the allocator on such devices. A plan that keeps less of a sample may beat the
    others only where the correction is large. So the plans are those that no other beats as
    estimated, or at the two steps of a scale around the correction. A plan that needs less in
    between may be missing, by no more than a step: nothing grows faster than the correction. The
    job's `speeds` give the step time of the fastest plan per number of devices; the cost model
    scales other plans to that time. Raises SpecError where the allowed devices cannot split the
    global batch, and TooManyPlans where the job allows more than PLANS_MAX plans. `skips_oversized`
    examines only plans that need no more than REACH devices' memory, OTHER_PLANS_MAX at most; the
    frontier may then be empty.
    """
    if request.launches_block and hardware.device.kind.traits.runs_beside_host:
        hardware = replace(hardware, launches_block=True)
    step = CORRECTION_STEPS * log2(max(1.0, calibrated.correction))
    steps = tuple(sorted({0, floor(step), ceil(step)}))
    result = _build_frontier_at_speeds(
        request, hardware, calibrated.overhead, steps, skips_oversized
    )
    if isinstance(result, SpecError):
        raise result.with_traceback(None)
    return result


@lru_cache(maxsize=512)
def _build_frontier_at_speeds(
    request: PlanRequest,
    hardware: Hardware,
    overhead: MeasuredOverhead,
    correction_steps: tuple[int, ...],
    skips_oversized: bool,
) -> Frontier | SpecError:
    """Return the frontier scaled to the job's measured `speeds`, or the SpecError that says why the
    job has no plan.

    Jobs that differ in `speeds` alone share one search.
    """
    if not request.speeds:
        return _get_cached_frontier(request, hardware, overhead, correction_steps, skips_oversized)
    counts = tuple((count, 1.0) for count, _ in request.speeds)
    costed = _get_cached_frontier(
        replace(request, speeds=counts), hardware, overhead, correction_steps, skips_oversized
    )
    return (
        costed if isinstance(costed, SpecError) else _scale_to_speeds(costed, dict(request.speeds))
    )


@lru_cache(maxsize=512)
def _get_cached_frontier(
    request: PlanRequest,
    hardware: Hardware,
    overhead: MeasuredOverhead,
    correction_steps: tuple[int, ...],
    skips_oversized: bool,
) -> Frontier | SpecError:
    """Return the plans that no other beats at any of these corrections of memory, or the SpecError
    that says why there is none.

    `correction_steps` are steps of the scale of corrections (factors on activations).
    """
    needs = _MemoryEstimator(request, hardware, overhead)
    work = PlanCounter(OTHER_PLANS_MAX if skips_oversized else PLANS_MAX)
    candidates = list[Candidate]()
    try:
        classes = group_values(
            (variant.degradation, variant) for variant in list_variants(request, hardware)
        )
        for degradation, variants in sorted(classes.items()):
            unbeaten = _list_unbeaten_plans(
                request,
                hardware,
                variants,
                needs,
                correction_steps,
                work,
                skips_oversized=skips_oversized,
            )
            candidates += (
                Candidate(
                    plan=costed.plan,
                    estimate=costed.estimate,
                    step_s=costed.step_s,
                    degradation=degradation,
                    busy_share=estimate_busy_share(
                        needs.profile(costed.plan), costed.plan, hardware
                    ),
                    host_bytes=estimate_node_host_bytes(costed.plan, costed.estimate, hardware),
                    host_memory=hardware.host_memory,
                )
                for costed in unbeaten
            )
        if not candidates and not skips_oversized:
            return _make_no_plan_error(request, hardware, work)
    except SpecError as error:
        return error  # it took as long to find
    return Frontier(tuple(candidates), work.looked)


def _scale_to_speeds(frontier: Frontier, step_s_by_device_count: Mapping[int, float]) -> Frontier:
    """Return the frontier with scaled step times: the fastest plan for each number of devices gets
    its measured time.
    """
    fastest_s: dict[int, float] = {}
    for candidate in frontier.candidates:
        world_size = candidate.plan.world_size
        fastest_s[world_size] = min(candidate.step_s, fastest_s.get(world_size, inf))
    candidates = [
        replace(
            candidate,
            step_s=candidate.step_s
            * step_s_by_device_count[candidate.plan.world_size]
            / fastest_s[candidate.plan.world_size],
        )
        for candidate in frontier.candidates
    ]
    candidates.sort(key=lambda candidate: (candidate.degradation, candidate.step_s))
    return Frontier(tuple(candidates), frontier.looked)


def _make_no_plan_error(
    request: PlanRequest, hardware: Hardware, plan_counter: PlanCounter
) -> SpecError:
    """Return an error that names the pinned setting to blame, and its values in plans that have all
    other pins.

    Raises SpecError where the job has no plan without its pins either.
    """
    if not request.plan or not any(
        True for _ in list_plans(replace(request, plan=()), hardware, plan_counter)
    ):
        return make_no_strategy_error(request, hardware)
    for key, value in request.plan:
        others = tuple(pin for pin in request.plan if pin[0] != key)
        values = {
            getattr(plan.layout if key in AXES else plan, key)
            for plan in list_plans(replace(request, plan=others), hardware, plan_counter)
        }
        if values:
            beside = f" with {format_pins(others)}" if others else ""
            return SpecError(
                f"no plan on {hardware.device.name} has it",
                path=f"plan.{key}",
                got=format_setting_value(value),
                allowed=f"{', '.join(map(format_setting_value, sorted(values)))}{beside}",
                hint=_explain_illegal_pins(request),
            )
    return SpecError(
        f"no plan on {hardware.device.name} has these settings together",
        path="plan",
        got=format_pins(request.plan),
        hint=_explain_illegal_pins(request) or "leave some of them out",
    )


def _explain_illegal_pins(request: PlanRequest) -> str:
    """Return why no engine allows the pinned settings, with all others at their defaults; "" where
    an engine does.
    """
    pins = dict(request.plan)
    layout = ParallelLayout(**{axis: pins.pop(axis) for axis in AXES if axis in pins})
    usual = {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": layout.pp,
        "precision": request.precision,
    }
    reasons = []
    engines = list_engines(request)
    for engine in engines:
        try:
            Plan(layout=layout, **{"engine": engine, **usual, **pins})
        except IllegalPlan as error:
            reasons.append(str(error))
    return "; ".join(dict.fromkeys(reasons)) if len(reasons) == len(engines) else ""


def _list_unbeaten_plans(
    request: PlanRequest,
    hardware: Hardware,
    variants: Sequence[SettingsVariant],
    memory_estimator: _MemoryEstimator,
    correction_steps: tuple[int, ...],
    plan_counter: PlanCounter,
    *,
    skips_oversized: bool,
) -> list[CostedPlan]:
    """Return the plans that no other legal plan beats at one of the correction steps, the fastest
    first.

    Each plan is timed once. Plans that need more than the memory of REACH devices count only where
    all need more. Where a plan needs more host memory than a node has, the plans that are unbeaten
    among those within that memory are added. Plans with few layers in full recomputation come
    second. None is made where another plan beats the least time and memory that it can cost.
    """

    @cache
    def timed(most_bytes: float) -> tuple[list[TimedPlan], list[_PartialModePlans]]:
        between: list[_PartialModePlans] = []
        families = (
            family
            for variant in variants
            for family in list_families(
                request, hardware, variant, memory_estimator.profile, plan_counter
            )
        )
        return [
            plan
            for family in families
            for plan in _time_family(
                hardware, family, memory_estimator, most_bytes, between, plan_counter
            )
        ], between

    estimate = cache(memory_estimator.estimate)

    def best(needed: _Needed) -> list[CostedPlan]:
        reach_bytes = REACH * hardware.device.memory
        for most_bytes in (reach_bytes,) if skips_oversized else (reach_bytes, inf):
            alike, between = timed(most_bytes)
            costed = _find_fronts(request, alike, estimate, most_bytes, needed)
            beats = _make_beaten_test(costed, by_device_count=bool(request.speeds))
            others: list[TimedPlan] = []
            for cut in between:
                others.extend(
                    _time_partial_modes(cut, memory_estimator, most_bytes, beats, plan_counter)
                )
            first = [
                TimedPlan(plan.plan, plan.step_s, plan.estimate.device_bytes, plan.rank)
                for plan in costed
            ]
            if others:
                costed = _find_fronts(request, [*first, *others], estimate, most_bytes, needed)
            if costed:
                return costed
        return []

    by_plan: dict[Plan, CostedPlan] = {}
    for step in correction_steps:
        needed = _make_corrected_need(2 ** (step / CORRECTION_STEPS)) if step else get_device_bytes
        costed = best(needed)
        if any(
            estimate_node_host_bytes(entry.plan, entry.estimate, hardware) > hardware.host_memory
            for entry in costed
        ):
            costed += best(_make_need_within_host(needed, hardware))
        elif len(correction_steps) == 1:
            return costed
        by_plan |= {entry.plan: entry for entry in costed}
    return sorted(
        by_plan.values(),
        key=lambda entry: (
            entry.step_s,
            entry.estimate.device_bytes,
            entry.plan.world_size,
            entry.rank,
        ),
    )


def _make_corrected_need(activation_factor: float) -> _Needed:
    return lambda _plan, estimate: correct_device_bytes(estimate, activation_factor)


def _make_need_within_host(needed_bytes_of: _Needed, hardware: Hardware) -> _Needed:
    """Return a function like `needed_bytes_of` that returns infinity for plans that need more host
    memory than a node has.
    """

    def bytes_of(plan: Plan, estimate: MemoryEstimate) -> float:
        fits = estimate_node_host_bytes(plan, estimate, hardware) <= hardware.host_memory
        return needed_bytes_of(plan, estimate) if fits else inf

    return bytes_of


def _find_fronts(
    request: PlanRequest,
    timed_plans: Sequence[TimedPlan],
    estimate: Callable[[Plan], MemoryEstimate],
    limit_bytes: float,
    needed_bytes_of: _Needed,
) -> list[CostedPlan]:
    """Return the plans on the Pareto front; for a job with `speeds`, those on one front per number
    of devices, one after another.
    """
    if not request.speeds:
        return find_pareto_front(timed_plans, estimate, limit_bytes, needed_bytes_of)
    by_count = group_values((entry.plan.world_size, entry) for entry in timed_plans)
    return [
        best
        for _, group in sorted(by_count.items())
        for best in find_pareto_front(group, estimate, limit_bytes, needed_bytes_of)
    ]


def _make_beaten_test(costed: Sequence[CostedPlan], *, by_device_count: bool) -> _Beats:
    """Return a function that tells whether one of `costed` beats a plan with these lower bounds of
    time and memory.

    A plan beats another if it is no slower, needs no more bytes and devices, and is trusted as
    much. With `by_device_count`, only plans on as many devices are compared.
    """
    staircases: dict[tuple[int, float], Staircase] = {}

    def beats(count: int, step_s: float, least_bytes: int, rank: float) -> bool:
        key = count, rank
        if key not in staircases:
            sizes = {count} if by_device_count else range(count + 1)
            staircases[key] = Staircase()
            for plan in costed:
                if plan.plan.world_size in sizes and plan.rank <= rank:
                    staircases[key].add(plan.step_s, plan.needed_bytes)
        return least_bytes > staircases[key].compute_bytes_to_beat(step_s, inf)

    return beats


def list_plans(
    request: PlanRequest, hardware: Hardware, plan_counter: PlanCounter | None = None
) -> Iterator[Plan]:
    """Yield every legal plan of the job once, smaller micro-batches first. Raises SpecError as
    `find_frontier`.
    """
    plan_counter = plan_counter or PlanCounter()
    for variant in list_variants(request, hardware):
        for family in list_families(
            request, hardware, variant, partial(find_profile, request, hardware), plan_counter
        ):
            for plan in family:
                plan_counter.count_examined()
                yield plan


class _MemoryEstimator:
    """Estimates the memory of a job's plans on one kind of device.

    Plans that differ only in batch and checkpointing share results.
    """

    def __init__(
        self, request: PlanRequest, hardware: Hardware, overhead: MeasuredOverhead
    ) -> None:
        self._request = request
        self._hardware = hardware
        self._overhead = overhead
        self._by_likeness: dict[object, tuple[ModelProfile, DeviceBytes]] = {}

    def get_profile_and_bytes(self, plan: Plan) -> tuple[ModelProfile, DeviceBytes]:
        """Return (the plan's profile, the DeviceBytes that plans with equal memory terms share)."""
        key = make_device_bytes_cache_key(plan)
        if key not in self._by_likeness:
            profile = find_profile(self._request, self._hardware, plan)
            self._by_likeness[key] = (
                profile,
                DeviceBytes(profile, plan, self._hardware.device, self._overhead),
            )
        return self._by_likeness[key]

    def profile(self, plan: Plan) -> ModelProfile:
        return self.get_profile_and_bytes(plan)[0]

    def estimate(self, plan: Plan) -> MemoryEstimate:
        return self.get_profile_and_bytes(plan)[1].estimate(plan)


class _PartialModePlans(NamedTuple):
    """Plans, not yet made, that fully recompute only a stage's first layers, with lower bounds of
    their time and memory.
    """

    family: PlanFamily
    micro: int
    accumulation: int
    takes: StepTimePredictor
    least_s: float = 0.0
    least_bytes: int = 0
    # whether more layers in full take longer, and need less: then these are known
    is_ordered: bool = False


def _time_family(
    hardware: Hardware,
    family: PlanFamily,
    memory_estimator: _MemoryEstimator,
    limit_bytes: float,
    partial_plans: list[_PartialModePlans],
    plan_counter: PlanCounter,
) -> Iterator[TimedPlan]:
    """Yield the plans of a family that may need no more than `limit_bytes`, each with its predicted
    step time.

    Plans that recompute only a stage's first layers in full are not made here, but added to the
    list `partial_plans` with lower bounds. That of time is the time of selective checkpointing.
    That of memory is the memory of full checkpointing, where that is slower and never needs more. A
    batch cut is skipped as a whole where the bytes beside activations exceed the limit:
    checkpointing rarely changes these bytes.
    """
    profile, bytes_of = memory_estimator.get_profile_and_bytes(family.example)
    takes: StepTimePredictor | None = None
    is_selective = any(mode is ActivationCheckpointing.SELECTIVE for mode, *_ in family.partial)
    is_lightest = is_selective and is_full_checkpointing_lightest(profile)
    has_full = any(mode is ActivationCheckpointing.FULL for mode, *_ in family.alike)
    trusted = rate_trust(family.example).rank
    is_beyond: dict[object, bool] = {}
    for micro, accumulation in family.cuts:
        turns = bytes_of.make_accumulation_cache_key(accumulation)
        selective: TimedPlan | None = None
        full: TimedPlan | None = None
        plan_counter.count_examined()
        for plan in (
            ()
            if is_beyond.get(turns)
            else family.list_plans_of_batch(micro, accumulation, family.list_uniform_modes(micro))
        ):
            plan_counter.count_examined()
            if bytes_of.counts_every_mode_alike and turns not in is_beyond:
                is_beyond[turns] = (
                    bytes_of.compute_lower_bound_without_activations(plan) > limit_bytes
                )
            if is_beyond.get(turns):
                break
            if (at_least_bytes := bytes_of.compute_lower_bound_bytes(plan)) <= limit_bytes:
                takes = takes or StepTimePredictor(profile, family.example, hardware)
                rank = max(trusted, OFFLOADED) if plan.activation_offload else trusted
                timed = TimedPlan(plan, takes(plan), at_least_bytes, rank)
                if (
                    plan.activation_checkpointing is ActivationCheckpointing.FULL
                    and not plan.activation_offload
                ):
                    full = timed
                elif plan.activation_checkpointing is ActivationCheckpointing.SELECTIVE:
                    selective = timed
                yield timed
        if not family.partial or is_beyond.get(turns):
            continue
        if not is_lightest or not has_full:
            takes = takes or StepTimePredictor(profile, family.example, hardware)
            partial_plans.append(_PartialModePlans(family, micro, accumulation, takes))
        elif full is not None and takes is not None:
            lighter = copy_if_legal(
                full.plan, activation_checkpointing=ActivationCheckpointing.SELECTIVE
            )
            if selective is not None:
                least_s = selective.step_s
            elif lighter is not None:
                least_s = takes(lighter)
            else:
                least_s = math.inf
            ordered = (least_s, full.at_least_bytes, True) if least_s <= full.step_s else ()
            partial_plans.append(_PartialModePlans(family, micro, accumulation, takes, *ordered))


def _time_partial_modes(
    partial_plans: _PartialModePlans,
    memory_estimator: _MemoryEstimator,
    limit_bytes: float,
    is_beaten: _Beats,
    plan_counter: PlanCounter,
) -> Iterator[TimedPlan]:
    """Yield those of the partial plans, with step times, that no plan so far beats.

    The plan in the middle bounds both halves from below. The more layers are recomputed in full,
    the longer a step takes, and the less memory a plan needs.
    """
    family = partial_plans.family
    modes = family.partial
    count = family.example.world_size
    _, bytes_of = memory_estimator.get_profile_and_bytes(family.example)
    rank = rate_trust(family.example).rank
    halves = [(0, len(modes), partial_plans.least_s, partial_plans.least_bytes)]
    while halves:
        low, high, least_s, least_bytes = halves.pop()
        if low == high or least_bytes > limit_bytes or is_beaten(count, least_s, least_bytes, rank):
            continue
        middle = (low + high) // 2
        plan_counter.count_examined()
        plan = next(
            family.list_plans_of_batch(
                partial_plans.micro, partial_plans.accumulation, modes[middle : middle + 1]
            ),
            None,
        )
        if plan is None:
            halves += [
                (low, middle, least_s, least_bytes),
                (middle + 1, high, least_s, least_bytes),
            ]
            continue
        at_least_bytes = bytes_of.compute_lower_bound_bytes(plan)
        step_s = partial_plans.takes(plan)
        if at_least_bytes <= limit_bytes:
            yield TimedPlan(plan, step_s, at_least_bytes, rank)
        halves.append((low, middle, least_s, at_least_bytes if partial_plans.is_ordered else 0))
        halves.append((middle + 1, high, step_s if partial_plans.is_ordered else 0.0, least_bytes))
