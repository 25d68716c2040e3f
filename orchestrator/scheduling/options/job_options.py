"""Options of a job: for each number of devices the best plan of its frontier (plans that no other
plan beats).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import attrgetter

from orchestrator.memory.calibration.calibrate import (
    Calibration,
    StepKind,
    calibrate,
    has_unmeasured_cache,
    step_kind_of,
    step_time_correction_of,
)
from orchestrator.memory.calibration.correction import corrected_device_bytes
from orchestrator.planning.explain import why_nothing_fits
from orchestrator.planning.frontier import (
    Candidate,
    CandidateRoom,
    find_likeliest_fitting,
    fit_probability,
    needed_device_bytes,
)
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.trust import Choice, ChoiceRule, allowed_memory_fill_of
from orchestrator.planning.ways_out import UnfitJob
from orchestrator.scheduling.base.migration import required_open_s
from orchestrator.scheduling.base.node_groups import NodeGroup
from orchestrator.scheduling.base.shape import GangShape, find_gang_shape
from orchestrator.scheduling.failures.degrade import (
    batch_independent_oom_bytes,
    candidates_for_oom,
    find_lowerable_phase,
)
from orchestrator.scheduling.failures.observation import ran_out_of_memory, survived_oom
from orchestrator.scheduling.failures.out_of_memory import min_loaded_bytes
from orchestrator.scheduling.failures.verdict import NEAR_LIMIT_ROW
from orchestrator.scheduling.options.hedge import expected_failure_cost_s, pick_first_plan_to_try
from orchestrator.scheduling.options.lengths import DurationHistory, PredictedDuration
from orchestrator.scheduling.options.probe import (
    find_probe_plan,
    probe_bytes_bound,
    with_measured_memory,
)
from orchestrator.specs.attempt import Attempt, FailureKind
from orchestrator.specs.choices import Degradation
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.pins import make_pins
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import UNTIMED, WITHOUT_SECONDS, MemoryEstimate, Source
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from orchestrator.specs.units import format_bytes

# How likely a plan must be to fit, after a failure, where only the order of the plans' speeds is
# known: then every
# fifth such job runs out of memory once more.
LIKELY = 0.8
AS_FAST = 1 + 1e-9  # times the seconds of a request: equal but for rounding


@dataclass(frozen=True, slots=True, eq=False)
class SizeOption:
    """A way to run the job: a plan, how its devices spread over nodes, and its run time."""

    candidate: Candidate
    shape: GangShape
    least_bytes: int  # required free on each device
    seconds: float  # from its launch to its end
    open_s: float  # how long its nodes must stay open, launch included
    is_known: bool = True  # its seconds: told, measured or learned; else they are told nobody
    probe: bool = False  # only a measurement
    fill: float = 0.0  # used share of a device's memory
    fastest: Choice | None = None  # faster plan that was rejected for it

    @property
    def choice(self) -> Choice:
        """The quantities by which options are compared."""
        return Choice(self.candidate.plan, self.seconds, self.fill, self.shape.crosses_nodes)

    @property
    def devices(self) -> int:
        return self.shape.devices

    @property
    def device_seconds(self) -> float:
        return self.shape.devices * self.seconds


@dataclass(frozen=True, slots=True, eq=False)
class JobOptions:
    """All plans of a job that fit an empty group of nodes, and the best of them per number of
    devices.
    """

    fitting: tuple[SizeOption, ...]  # in the order of the frontier
    entries: tuple[SizeOption, ...]  # fewest devices first, each faster than those before it
    most_bytes: int  # the most that any entry requires free on a device
    rule: ChoiceRule

    def best_where(self, is_allowed: Callable[[SizeOption], bool]) -> tuple[SizeOption, ...]:
        """Return the best option per number of devices, of those options for which `is_allowed` is
        true.
        """
        return best_option_per_device_count(
            (entry for entry in self.fitting if is_allowed(entry)), self.rule
        )


@frozen
class Infeasible:
    """The result where no plan of a job fits a group of nodes, even if all of its devices are
    empty.
    """

    why: Callable[[], str]  # returns the reason; slow, so called only if no other group fits
    likeliest: JobOptions | None = None  # options of the plan that may fit all the same


NOTHING_LEARNED = DurationHistory()


def list_job_options(
    job: Job,
    group: NodeGroup,
    calibrated: Calibration,
    launch_cost_s: float,
    history: DurationHistory = NOTHING_LEARNED,
) -> JobOptions | Infeasible:
    """Return the options of the job's untried plans on an empty group; Infeasible where no plan
    fits.

    `history` predicts durations that nothing else tells.
    """
    device = group.hardware.device
    job = replace(job, spec=with_measured_memory(job.spec, calibrated))
    if job.spec.gpus.min > group.devices:
        too_few = f"wants {job.spec.gpus.min} devices of one kind: there are {group.devices} {device.name}"
        return Infeasible(why=lambda: too_few)
    try:
        candidates = list(untried_candidates(job, group, calibrated))
    except SpecError as error:  # the global batch cannot be cut over so many devices
        return Infeasible(why=partial(str, error))
    constant = batch_independent_oom_bytes(_on_device(job, device.name))
    if constant is not None and not candidates:
        text = f"no micro-batch is small enough: {format_bytes(constant)} ran out alike under two of them"
        return Infeasible(why=lambda: text)
    probe, probe_least = _probe_within(device, job, calibrated, candidates)
    if probe is not None:
        candidates = [probe]
    measured = measured_peak_bytes_by_plan(job, device.name)
    shapes = partial(
        find_gang_shape,
        devices_per_node=group.hardware.devices_per_node,
        nodes=group.hardware.nodes,
    )

    def options_from(
        fitting: Sequence[tuple[Candidate, GangShape, int]],
    ) -> JobOptions | Infeasible:  # and the free bytes that a device must have
        candidates = [candidate for candidate, _, _ in fitting]
        if probe is None:
            expected = _predict_durations(job, candidates, group, calibrated, history)
        else:
            probe_s = max(0.0, history.expected_probe_s() - launch_cost_s)
            expected = [PredictedDuration(probe_s, probe_s)]
        entries: Sequence[SizeOption] = [
            SizeOption(
                candidate,
                shape,
                least,
                launch_cost_s + length.seconds,
                required_open_s(job, launch_cost_s + length.open_s, launch_cost_s),
                is_known=length.is_known,
                probe=probe is not None,
                fill=least / device.memory,
            )
            for (candidate, shape, least), length in zip(fitting, expected, strict=True)
        ]
        if job.spec.guarantee is not None and probe is None:
            entries = pick_guaranteed(job, entries, group.devices)
            if not entries:
                is_timed = not any(
                    has_unknown_step_time(job, candidate.estimate.source)
                    for candidate, _, _ in fitting
                )
                return Infeasible(
                    why=lambda: _why_not_guaranteed(job.spec, device.name, is_timed=is_timed)
                )
        rule = choice_rule_of(job, device.name, calibrated, entries[0].candidate)
        best = best_option_per_device_count(entries, rule)
        most_bytes = max(entry.least_bytes for entry in best)
        return JobOptions(fitting=tuple(entries), entries=best, most_bytes=most_bytes, rule=rule)

    needs = [
        (candidate, probe_least or needed_free_bytes(candidate, calibrated, measured))
        for candidate in candidates
        if candidate.fits_host
    ]
    fitting = [
        (candidate, shape, least)
        for candidate, least in needs
        if least <= device.memory and (shape := shapes(candidate.plan))
    ]
    fitting = [option for option in fitting if option[0].plan == _plan_of_climb(job)] or fitting
    if fitting:
        return options_from(_keep_likely_to_fit(job, group, calibrated, fitting, launch_cost_s))
    why = partial(
        why_nothing_fits,
        UnfitJob(job.spec, group.hardware, device.memory, calibrated, job.refuted),
        min_loaded_bytes(job, device.name),
    )
    candidate = find_likeliest_fitting(
        (
            CandidateRoom(candidate, device.memory)
            for candidate in candidates
            if shapes(candidate.plan)
        ),
        calibrated,
    )
    if candidate is None or (shape := shapes(candidate.plan)) is None:
        return Infeasible(why=why)
    correction = calibrated.activation_factor_of(candidate.plan, candidate.estimate)
    least = corrected_device_bytes(
        candidate.estimate,
        min(correction, calibrated.belief.least) if calibrated.belief else correction,
    )
    likely = options_from([(candidate, shape, least)])
    return Infeasible(why=why, likeliest=likely) if isinstance(likely, JobOptions) else likely


def _probe_within(
    device: DeviceSpec, job: Job, calibrated: Calibration, candidates: Sequence[Candidate]
) -> tuple[Candidate | None, int | None]:
    """Return (the probe to run first, the bytes that it needs according to an earlier probe).

    Both are None where no probe is needed or fits; the bytes alone are None where nothing was
    measured.
    """
    probe = find_probe_plan(job, device, calibrated, candidates)
    bound = None if probe is None else probe_bytes_bound(probe, job.last)
    if bound is not None and bound <= device.memory:
        return probe, bound  # by what was measured, not by what is assumed of the script
    if probe is not None and needed_free_bytes(probe, calibrated, {}) > device.memory:
        return None, None
    return probe, None


def _plan_of_climb(job: Job) -> Plan | None:
    """Return the plan that the job was stopped to move to; None where it was not.

    If that plan then ran out of memory, it is the plan that the job had before.
    """
    climber = next((attempt for attempt in job.attempts if attempt.climbs_to is not None), None)
    if climber is None or climber.climbs_to is None:
        return None
    if climber.climbs_to in job.refuted:
        return climber.plan
    return climber.climbs_to if climber is job.last else None


def pick_guaranteed(job: Job, entries: Sequence[SizeOption], devices: int) -> Sequence[SizeOption]:
    """Return the options that are as fast as the job's guarantee, each on the fewest nodes; ()
    without any.

    `devices` is the number of devices in the group. Where it is below the promised number, nodes
    are away, and the job waits for them. Where the requested plan has failed since it was promised,
    all options on at least as many devices are returned, or else all options.
    """
    guarantee = job.spec.guarantee
    assert guarantee is not None, job.id
    packed = [
        replace(entry, shape=replace(entry.shape, shares=entry.shape.shares[:1]))
        for entry in entries
    ]
    same_size = [entry for entry in packed if entry.devices == job.spec.guaranteed_gpus]
    if guarantee.step is not None:
        matches = [
            entry
            for entry in packed
            if entry.candidate.step_s <= guarantee.step * AS_FAST
            and not has_unknown_step_time(job, entry.candidate.estimate.source)
        ]
    else:
        mildest = [
            entry.seconds
            for entry in same_size
            if entry.candidate.degradation == same_size[0].candidate.degradation
        ]
        matches = [
            entry for entry in packed if entry.seconds <= min(mildest, default=-inf) * AS_FAST
        ]
    is_promised = bool(job.attempts) or job.starts_by_s is not None
    are_away = guarantee.step is None and devices < job.spec.guaranteed_gpus
    if matches or are_away or not is_promised:
        return matches
    return [entry for entry in packed if entry.devices >= job.spec.guaranteed_gpus] or packed


def _why_not_guaranteed(spec: JobSpec, device: str, *, is_timed: bool) -> str:
    if spec.guarantee is not None and spec.guarantee.step is not None and not is_timed:
        return "cannot be promised seconds of a step: nothing tells them; say `speeds`"
    if spec.guarantee is not None and spec.guarantee.step is not None:
        return f"cannot be promised {spec.guarantee.step:g} s a step: no plan that fits {device} is as fast"
    return (
        f"cannot be promised the speed of {spec.guaranteed_gpus} {device}: no plan fits on so many"
    )


def _keep_likely_to_fit(
    job: Job,
    group: NodeGroup,
    calibrated: Calibration,
    fitting: Sequence[tuple[Candidate, GangShape, int]],
    launch_cost_s: float,
) -> Sequence[tuple[Candidate, GangShape, int]]:
    """Return the options that are at least as likely to fit as the plan with which the job ends
    soonest.

    hedge.py finds that plan. Only options of the mildest degradation are kept: a likelier fit is no
    reason to change what the user asked for.
    """
    if calibrated.belief is None or not fitting:
        return fitting
    device = group.hardware.device
    measured = measured_peak_bytes_by_plan(job, device.name)
    mildest = [option for option in fitting if option[0].degradation == fitting[0][0].degradation]
    chances = [
        1.0 if candidate.plan in measured else fit_probability(candidate, device.memory, calibrated)
        for candidate, _, _ in mildest
    ]
    lengths = _predict_durations(
        job, [candidate for candidate, _, _ in mildest], group, calibrated, NOTHING_LEARNED
    )
    seconds = [length.seconds for length in lengths]
    if mildest[0][0].estimate.source in UNTIMED:
        least = min(LIKELY, max(chances))
        return [option for option, chance in zip(mildest, chances, strict=True) if chance >= least]
    first = pick_first_plan_to_try(
        list(zip(seconds, chances, strict=True)),
        expected_failure_cost_s(job, launch_cost_s, seconds),
    )
    return [
        option for option, chance in zip(mildest, chances, strict=True) if chance >= chances[first]
    ]


def choice_rule_of(
    job: Job, device: str, calibrated: Calibration, candidate: Candidate
) -> ChoiceRule:
    """Return the rule by which the job chooses among its fitting plans; `candidate` is any of them.

    Jobs with a guarantee or a deadline use the fastest plan. So does a script with assumed or
    declared step times, since only the order of its plans is known.
    """
    spec = job.spec
    trained = job.trained
    is_timed = candidate.estimate.source not in UNTIMED and not spec.speeds
    is_due = spec.deadline is not None or spec.guarantee is not None
    incumbents = {
        *measured_step_s_by_plan(job, device),
        *(observation.plan for observation in calibrated.proven),
    }
    is_measured = bool(job.attempts or calibrated.proven or calibrated.refuted or calibrated.line)
    is_counted = not has_unmeasured_cache(candidate.estimate)  # as on a virtual device
    is_supposed = candidate.estimate.source is Source.ASSUMED  # to fill a device, by its own batch
    keeps_room = not (is_measured or is_counted or is_supposed or spec.objective == "fastest")
    return ChoiceRule(
        room=allowed_memory_fill_of(candidate.plan) if keeps_room else 1.0,
        is_fastest=spec.objective == "fastest" or is_due or not is_timed,
        incumbents=frozenset(incumbents - job.refuted),
        before=trained[-1].plan if trained and ran_out_of_memory(trained[-1]) else None,
    )


def best_option_per_device_count(
    fitting: Iterable[SizeOption], rule: ChoiceRule
) -> tuple[SizeOption, ...]:
    """Return the preferred option for each number of devices, fewest first.

    Numbers of devices that make the job no faster are left out. Only options of the mildest
    degradation count.
    """
    by_devices: dict[int, list[SizeOption]] = {}
    mildest: Degradation | None = None
    for option in fitting:
        if mildest is None:
            mildest = option.candidate.degradation
        if option.candidate.degradation is not mildest:
            break
        by_devices.setdefault(option.devices, []).append(option)
    best = [_best_option(options, rule) for _, options in sorted(by_devices.items())]
    return tuple(
        best[index]
        for index in rule.choose_indices_worth_devices([option.choice for option in best])
    )


def _best_option(options: Sequence[SizeOption], rule: ChoiceRule) -> SizeOption:
    choices = [option.choice for option in options]
    taken = rule.choose_plan_index(choices)
    fastest = min(choices, key=attrgetter("seconds"))
    return options[taken] if choices[taken] is fastest else replace(options[taken], fastest=fastest)


def calibration_for(state: State, job: Job, device: str) -> Calibration:
    """Return the calibration of memory and time predictions for the job's family on this kind of
    device.
    """
    return calibrate(
        state.observations, device=device, family=job.spec.family_name, job_key=job.key
    )


def steps_left(job: Job, before: Attempt | None = None) -> int | None:
    """Return the number of optimizer steps after the newest checkpoint; None where the total is
    unknown.

    With an attempt as `before`, only checkpoints of earlier attempts count.
    """
    steps = job.spec.optimizer_steps
    done = job.continues_step
    if steps is None:
        return None
    for attempt in job.attempts if before is None else job.attempts[: before.number - 1]:
        done = max(done, attempt.facts.checkpoint_step or 0)
    return max(0, steps - done)


def predict_attempt_duration(
    job: Job,
    attempt: Attempt,
    group: NodeGroup,
    calibrated: Calibration,
    launch_cost_s: float,
    history: DurationHistory,
) -> PredictedDuration:
    """Return the predicted duration of an attempt, from its launch to its end.

    It follows from the attempt's measured pace, else from predicted or learned step times.
    """
    if attempt.probe:
        return PredictedDuration(history.expected_probe_s(), history.expected_probe_s())
    left = steps_left(job, attempt)
    pace = attempt.pace
    if left is not None and pace is not None:
        past_s = pace.at_s - attempt.launched_at_s
        return certain_duration(past_s + max(0, left - pace.steps_done) * pace.step_s)
    ran_before = measured_step_s_by_plan(job, attempt.device, attempt.number).get(attempt.plan)
    factors = own_step_factors(job, attempt.device, attempt.number), calibrated.step_factors
    if left is None or has_unknown_step_time(job, attempt.estimate.source, *factors):
        unknown = _guess_duration(job, group, attempt.step_s, left, history)
        return unknown._replace(
            seconds=launch_cost_s + unknown.seconds, open_s=launch_cost_s + unknown.open_s
        )
    step_s = ran_before or attempt.step_s * step_time_correction_of(attempt.plan, *factors)
    return certain_duration(launch_cost_s + left * step_s)


def certain_duration(seconds: float) -> PredictedDuration:
    """Return these seconds as a duration that was measured or stated, so that its nodes stay open
    as long.
    """
    return PredictedDuration(seconds, seconds)


def measured_step_s_by_plan(
    job: Job, device: str, before_attempt: int | None = None
) -> dict[Plan, float]:
    """Return {plan: measured seconds per step} of the job's attempts on this kind of device.

    With a number as `before_attempt`, only earlier attempts count.
    """
    return {
        attempt.plan: attempt.measured_step_s
        for attempt in job.attempts[: None if before_attempt is None else before_attempt - 1]
        if attempt.device == device and attempt.measured_step_s and not attempt.probe
    }


def own_step_factors(
    job: Job, device: str, before_attempt: int | None = None
) -> Mapping[StepKind, float]:
    """Return {kind of step: measured over predicted step time} of the job's attempts on this kind
    of device.

    With a number as `before_attempt`, only earlier attempts count.
    """
    return {
        step_kind_of(attempt.plan): attempt.measured_step_s / attempt.step_s
        for attempt in job.attempts[: None if before_attempt is None else before_attempt - 1]
        if attempt.device == device and attempt.measured_step_s and attempt.step_s > 0
    }


def measured_peak_bytes_by_plan(job: Job, device: str) -> dict[Plan, int]:
    """Return {plan: measured allocated peak bytes} of the job's attempts on this kind of device.

    Plans that ran out of memory are left out.
    """
    peaks: dict[Plan, int] = {}
    for attempt in job.attempts:
        trained = any(beat.steps_done > 0 for beat in attempt.heartbeats)
        has_peak = trained and not survived_oom(attempt)
        if has_peak and attempt.device == device and attempt.plan not in job.refuted:
            peaks[attempt.plan] = max(attempt.peak_bytes or 0, peaks.get(attempt.plan, 0))
    return peaks


def _predict_durations(
    job: Job,
    candidates: Sequence[Candidate],
    group: NodeGroup,
    calibrated: Calibration,
    history: DurationHistory,
) -> list[PredictedDuration]:
    """Return the predicted duration of the remaining training under each candidate plan.

    Measured step times of the job's family count first.
    """
    left = steps_left(job)
    device = group.hardware.device.name
    measured = measured_step_s_by_plan(job, device) if job.attempts else {}
    factors = own_step_factors(job, device), calibrated.step_factors
    if left is None or (
        candidates and has_unknown_step_time(job, candidates[0].estimate.source, *factors)
    ):
        return [
            _guess_duration(job, group, candidate.step_s, left, history) for candidate in candidates
        ]
    return [
        certain_duration(
            left
            * (
                measured.get(candidate.plan)
                or candidate.step_s * step_time_correction_of(candidate.plan, *factors)
            )
        )
        for candidate in candidates
    ]


def has_unknown_step_time(job: Job, source: Source, *factors: Mapping[StepKind, float]) -> bool:
    """Return whether no seconds of a step are known for the job, only which of its plans is faster."""
    return source in WITHOUT_SECONDS and not job.spec.speeds and not any(factors)


def _guess_duration(
    job: Job, group: NodeGroup, step_s: float, left: int | None, history: DurationHistory
) -> PredictedDuration:
    """Return the duration of a job whose step time or number of steps (`left`) is unknown, from
    `history`.

    `step_s` is the plan's relative step time: the job's slowest plan takes the longest.
    """
    try:
        slowest_s = max(
            candidate.step_s
            for candidate in find_frontier(read_plan_request(job.spec), group.hardware).candidates
        )
    except SpecError:  # what it runs on is no whole group any more
        slowest_s = step_s
    predicted_s = None if left is None else left * step_s
    device = group.hardware.device.name
    return history.predict_duration(job, device, min(1.0, step_s / slowest_s), predicted_s)


def needed_free_bytes(
    candidate: Candidate, calibrated: Calibration, measured: dict[Plan, int]
) -> int:
    """Return the free bytes that the candidate needs on each device.

    They follow from its measured peak, if `measured` has one, else from the corrected prediction.
    """
    around = candidate.estimate.device_bytes - candidate.estimate.allocated_bytes
    if candidate.plan in measured:
        return measured[candidate.plan] + around
    refuted = (
        refutation.needed_bytes + around
        for refutation in calibrated.refuted
        if refutation.plan == candidate.plan
        and refutation.predicted_bytes <= candidate.estimate.allocated_bytes
    )
    return max((needed_device_bytes(candidate, calibrated), *refuted))


def untried_candidates(job: Job, group: NodeGroup, calibrated: Calibration) -> Iterator[Candidate]:
    """Return the plans that the job may still try on this group, in the order of its frontier.

    Each plan that ran out of memory excludes those with no lower peak on equal devices. A job that
    keeps its plan has only that one.
    """
    spec = job.spec
    trained = job.trained
    if trained and spec.degrade.keeps_plan:
        spec = spec.model_copy(update={"plan": make_pins(trained[0].plan)})
    candidates = find_frontier(read_plan_request(spec), group.hardware, calibrated).candidates
    if not job.attempts:
        return iter(candidates)
    here = _on_device(job, group.hardware.device.name)
    refuted_bytes = partial(corrected_device_bytes, activation_factor=calibrated.correction)
    device_bytes_max = _smallest_refuted(job, group, FailureKind.DEVICE_OOM, refuted_bytes)
    host_bytes_max = _smallest_refuted(
        job, group, FailureKind.HOST_OOM, partial(_host_bytes, group)
    )

    def device_bytes(candidate: Candidate) -> int:
        correction = calibrated.activation_factor_of(candidate.plan, candidate.estimate)
        return corrected_device_bytes(candidate.estimate, correction)

    untried = (
        candidate
        for candidate in candidates_for_oom(job.spec, here, candidates)
        if candidate.plan not in job.refuted
        and device_bytes(candidate) < device_bytes_max
        and _host_bytes(group, candidate.estimate) < host_bytes_max
    )
    last = job.attempts[-1]
    verdict = None if last.failure is None else last.failure.verdict
    if verdict is None or verdict.row != NEAR_LIMIT_ROW or spec.degrade.keeps_plan:
        return untried
    # it may have ended for memory: less of it, where any plan takes less
    listed = list(untried)
    lower = [entry for entry in listed if device_bytes(entry) < refuted_bytes(last.estimate)]
    return iter(lower or listed)


def _on_device(job: Job, device: str) -> list[Attempt]:
    return [attempt for attempt in job.attempts if attempt.device == device]


def _smallest_refuted(
    job: Job, group: NodeGroup, kind: FailureKind, bytes_of: Callable[[MemoryEstimate], int]
) -> float:
    """Return the least predicted bytes of the job's plans that failed in this way; infinity without
    any.

    Only failures on the group's kind of device count.
    """
    failed = (
        attempt.estimate
        for attempt in job.attempts
        if attempt.failure
        and attempt.failure.kind is kind
        and attempt.device == group.hardware.device.name
        and find_lowerable_phase(job.spec, attempt) is None
    )
    return min((bytes_of(estimate) for estimate in failed), default=inf)


def _host_bytes(group: NodeGroup, estimate: MemoryEstimate) -> int:
    """Return the host memory of one rank in bytes; on a virtual device, its device memory counts as
    well.
    """
    virtual = group.hardware.device.kind.traits.is_virtual
    return estimate.host_bytes + (estimate.device_bytes if virtual else 0)
