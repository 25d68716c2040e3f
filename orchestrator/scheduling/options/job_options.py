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
    get_step_kind,
    get_step_time_correction,
    has_unmeasured_cache,
)
from orchestrator.memory.calibration.correction import correct_device_bytes
from orchestrator.planning.explain import explain_unfit_job
from orchestrator.planning.frontier import (
    Candidate,
    CandidateRoom,
    estimate_candidate_fit_probability,
    estimate_needed_device_bytes,
    find_likeliest_fitting,
)
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.trust import Choice, ChoiceRule, get_allowed_memory_fill
from orchestrator.planning.ways_out import UnfitJob
from orchestrator.scheduling.base.migration import compute_required_open_node_s
from orchestrator.scheduling.base.node_groups import NodeGroup
from orchestrator.scheduling.base.shape import GangShape, find_gang_shape
from orchestrator.scheduling.failures.degrade import (
    find_batch_independent_oom_bytes,
    find_lowerable_phase,
    select_candidates_after_oom,
)
from orchestrator.scheduling.failures.observation import ran_out_of_memory, survived_oom
from orchestrator.scheduling.failures.out_of_memory import find_min_startup_bytes
from orchestrator.scheduling.failures.verdict import NEAR_LIMIT_ROW
from orchestrator.scheduling.options.hedge import estimate_failure_cost_s, pick_first_plan_to_try
from orchestrator.scheduling.options.lengths import DurationHistory, PredictedDuration
from orchestrator.scheduling.options.probe import (
    find_max_probe_bytes,
    find_probe_plan,
    set_measured_memory,
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
    """A way to run a job: a plan, how its devices are split over nodes, and its run time."""

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
        """The quantities by which the rule compares this option with others."""
        return Choice(self.candidate.plan, self.seconds, self.fill, self.shape.crosses_nodes)

    @property
    def devices(self) -> int:
        return self.shape.devices

    @property
    def device_seconds(self) -> float:
        return self.shape.devices * self.seconds


@dataclass(frozen=True, slots=True, eq=False)
class JobOptions:
    """All options (plan, devices, run time) of a job that fit a group of idle nodes, and the best
    per number of devices.
    """

    fitting: tuple[SizeOption, ...]  # in the order of the frontier
    entries: tuple[SizeOption, ...]  # fewest devices first, each faster than those before it
    most_bytes: int  # the most that any entry requires free on a device
    rule: ChoiceRule

    def list_best_where(self, is_allowed: Callable[[SizeOption], bool]) -> tuple[SizeOption, ...]:
        """Return the best option for each number of devices, among the options for which
        `is_allowed` returns true.
        """
        return list_best_options_by_device_count(
            (entry for entry in self.fitting if is_allowed(entry)), self.rule
        )


@frozen
class Infeasible:
    """The result in place of options where no plan of a job fits a group of nodes, even if all
    devices are idle.
    """

    why: Callable[[], str]  # returns the reason; slow, so called only if no other group fits
    likeliest: JobOptions | None = None  # options of the plan that may fit all the same


NOTHING_LEARNED = DurationHistory()


def list_job_options(
    job: Job,
    node_group: NodeGroup,
    calibration: Calibration,
    launch_cost_s: float,
    history: DurationHistory = NOTHING_LEARNED,
) -> JobOptions | Infeasible:
    """Return the options of a job's untried plans on a group of idle nodes; Infeasible where no
    plan fits.

    `history` predicts durations that nothing else tells.
    """
    device = node_group.hardware.device
    job = replace(job, spec=set_measured_memory(job.spec, calibration))
    if job.spec.gpus.min > node_group.devices:
        too_few = f"wants {job.spec.gpus.min} devices of one kind: there are {node_group.devices} {device.name}"
        return Infeasible(why=lambda: too_few)
    try:
        candidates = list(find_untried_candidates(job, node_group, calibration))
    except SpecError as error:  # the global batch cannot be cut over so many devices
        return Infeasible(why=partial(str, error))
    constant = find_batch_independent_oom_bytes(_list_attempts_on_device_kind(job, device.name))
    if constant is not None and not candidates:
        text = f"no micro-batch is small enough: {format_bytes(constant)} ran out alike under two of them"
        return Infeasible(why=lambda: text)
    probe, probe_least = _choose_probe_and_bytes(device, job, calibration, candidates)
    if probe is not None:
        candidates = [probe]
    measured = collect_measured_peak_bytes_by_plan(job, device.name)
    shapes = partial(
        find_gang_shape,
        devices_per_node=node_group.hardware.devices_per_node,
        node_count=node_group.hardware.nodes,
    )

    def options_from(
        fitting: Sequence[tuple[Candidate, GangShape, int]],
    ) -> JobOptions | Infeasible:  # and the free bytes that a device must have
        candidates = [candidate for candidate, _, _ in fitting]
        if probe is None:
            expected = _predict_durations(job, candidates, node_group, calibration, history)
        else:
            probe_s = max(0.0, history.estimate_probe_s() - launch_cost_s)
            expected = [PredictedDuration(probe_s, probe_s)]
        entries: Sequence[SizeOption] = [
            SizeOption(
                candidate,
                shape,
                least,
                launch_cost_s + length.seconds,
                compute_required_open_node_s(job, launch_cost_s + length.open_s, launch_cost_s),
                is_known=length.is_known,
                probe=probe is not None,
                fill=least / device.memory,
            )
            for (candidate, shape, least), length in zip(fitting, expected, strict=True)
        ]
        if job.spec.guarantee is not None and probe is None:
            entries = select_options_as_fast_as_guarantee(job, entries, node_group.devices)
            if not entries:
                is_timed = not any(
                    has_unknown_step_time(job, candidate.estimate.source)
                    for candidate, _, _ in fitting
                )
                return Infeasible(
                    why=lambda: _explain_missed_guarantee(job.spec, device.name, is_timed=is_timed)
                )
        rule = make_choice_rule(job, device.name, calibration, entries[0].candidate)
        best = list_best_options_by_device_count(entries, rule)
        most_bytes = max(entry.least_bytes for entry in best)
        return JobOptions(fitting=tuple(entries), entries=best, most_bytes=most_bytes, rule=rule)

    needs = [
        (candidate, probe_least or estimate_needed_free_bytes(candidate, calibration, measured))
        for candidate in candidates
        if candidate.fits_host
    ]
    fitting = [
        (candidate, shape, least)
        for candidate, least in needs
        if least <= device.memory and (shape := shapes(candidate.plan))
    ]
    fitting = [option for option in fitting if option[0].plan == _find_plan_of_move(job)] or fitting
    if fitting:
        return options_from(
            _keep_likely_to_fit(job, node_group, calibration, fitting, launch_cost_s)
        )
    why = partial(
        explain_unfit_job,
        UnfitJob(job.spec, node_group.hardware, device.memory, calibration, job.refuted),
        find_min_startup_bytes(job, device.name),
    )
    candidate = find_likeliest_fitting(
        (
            CandidateRoom(candidate, device.memory)
            for candidate in candidates
            if shapes(candidate.plan)
        ),
        calibration,
    )
    if candidate is None or (shape := shapes(candidate.plan)) is None:
        return Infeasible(why=why)
    correction = calibration.compute_activation_factor(candidate.plan, candidate.estimate)
    least = correct_device_bytes(
        candidate.estimate,
        min(correction, calibration.belief.least) if calibration.belief else correction,
    )
    likely = options_from([(candidate, shape, least)])
    return Infeasible(why=why, likeliest=likely) if isinstance(likely, JobOptions) else likely


def _choose_probe_and_bytes(
    device: DeviceSpec, job: Job, calibration: Calibration, candidates: Sequence[Candidate]
) -> tuple[Candidate | None, int | None]:
    """Return (probe to run before the training, bytes that an earlier probe showed it to need).

    A probe is a short attempt that measures memory. Both are None where no probe is needed or fits;
    the bytes alone are None where nothing was measured.
    """
    probe = find_probe_plan(job, device, calibration, candidates)
    bound = None if probe is None else find_max_probe_bytes(probe, job.last)
    if bound is not None and bound <= device.memory:
        return probe, bound  # by what was measured, not by what is assumed of the script
    if probe is not None and estimate_needed_free_bytes(probe, calibration, {}) > device.memory:
        return None, None
    return probe, None


def _find_plan_of_move(job: Job) -> Plan | None:
    """Return the plan to which the job was last moved because it is faster; None where it was not.

    If that plan then ran out of memory, it is the plan that the job had before.
    """
    climber = next((attempt for attempt in job.attempts if attempt.climbs_to is not None), None)
    if climber is None or climber.climbs_to is None:
        return None
    if climber.climbs_to in job.refuted:
        return climber.plan
    return climber.climbs_to if climber is job.last else None


def select_options_as_fast_as_guarantee(
    job: Job, options: Sequence[SizeOption], group_device_count: int
) -> Sequence[SizeOption]:
    """Return the options that are as fast as the job's guarantee, each on the fewest nodes; ()
    without any.

    If the group has fewer devices than were promised, nodes are away, and the job waits for them.
    The requested plan may have failed since it was promised. Then all options on at least as many
    devices are returned, or else all options.
    """
    guarantee = job.spec.guarantee
    assert guarantee is not None, job.id
    packed = [
        replace(entry, shape=replace(entry.shape, shares=entry.shape.shares[:1]))
        for entry in options
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
    are_away = guarantee.step is None and group_device_count < job.spec.guaranteed_gpus
    if matches or are_away or not is_promised:
        return matches
    return [entry for entry in packed if entry.devices >= job.spec.guaranteed_gpus] or packed


def _explain_missed_guarantee(spec: JobSpec, device_kind: str, *, is_timed: bool) -> str:
    """Return why no option on this kind of device is as fast as the job's guarantee, as a sentence."""
    if spec.guarantee is not None and spec.guarantee.step is not None and not is_timed:
        return "cannot be promised seconds of a step: nothing tells them; say `speeds`"
    if spec.guarantee is not None and spec.guarantee.step is not None:
        return f"cannot be promised {spec.guarantee.step:g} s a step: no plan that fits {device_kind} is as fast"
    return f"cannot be promised the speed of {spec.guaranteed_gpus} {device_kind}: no plan fits on so many"


def _keep_likely_to_fit(
    job: Job,
    node_group: NodeGroup,
    calibration: Calibration,
    fitting: Sequence[tuple[Candidate, GangShape, int]],
    launch_cost_s: float,
) -> Sequence[tuple[Candidate, GangShape, int]]:
    """Return the options that fit at least as probably as the plan that is best to try first
    (hedge.py).

    Only options of the mildest degradation are kept: a likelier fit is no reason to change what the
    user asked for.
    """
    if calibration.belief is None or not fitting:
        return fitting
    device = node_group.hardware.device
    measured = collect_measured_peak_bytes_by_plan(job, device.name)
    mildest = [option for option in fitting if option[0].degradation == fitting[0][0].degradation]
    chances = [
        1.0
        if candidate.plan in measured
        else estimate_candidate_fit_probability(candidate, device.memory, calibration)
        for candidate, _, _ in mildest
    ]
    lengths = _predict_durations(
        job, [candidate for candidate, _, _ in mildest], node_group, calibration, NOTHING_LEARNED
    )
    seconds = [length.seconds for length in lengths]
    if mildest[0][0].estimate.source in UNTIMED:
        least = min(LIKELY, max(chances))
        return [option for option, chance in zip(mildest, chances, strict=True) if chance >= least]
    first = pick_first_plan_to_try(
        list(zip(seconds, chances, strict=True)),
        estimate_failure_cost_s(job, launch_cost_s, seconds),
    )
    return [
        option for option, chance in zip(mildest, chances, strict=True) if chance >= chances[first]
    ]


def make_choice_rule(
    job: Job, device_kind: str, calibration: Calibration, candidate: Candidate
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
        *collect_measured_step_s_by_plan(job, device_kind),
        *(observation.plan for observation in calibration.proven),
    }
    is_measured = bool(
        job.attempts or calibration.proven or calibration.refuted or calibration.line
    )
    is_counted = not has_unmeasured_cache(candidate.estimate)  # as on a virtual device
    is_supposed = candidate.estimate.source is Source.ASSUMED  # to fill a device, by its own batch
    keeps_room = not (is_measured or is_counted or is_supposed or spec.objective == "fastest")
    return ChoiceRule(
        room=get_allowed_memory_fill(candidate.plan) if keeps_room else 1.0,
        is_fastest=spec.objective == "fastest" or is_due or not is_timed,
        incumbents=frozenset(incumbents - job.refuted),
        before=trained[-1].plan if trained and ran_out_of_memory(trained[-1]) else None,
    )


def list_best_options_by_device_count(
    fitting: Iterable[SizeOption], rule: ChoiceRule
) -> tuple[SizeOption, ...]:
    """Return the preferred option for each number of devices, fewest devices first.

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
    best = [_choose_best_option(options, rule) for _, options in sorted(by_devices.items())]
    return tuple(
        best[index]
        for index in rule.choose_indices_worth_devices([option.choice for option in best])
    )


def _choose_best_option(options: Sequence[SizeOption], rule: ChoiceRule) -> SizeOption:
    """Return the option that the rule prefers; where it is not the fastest, it also names the
    fastest.
    """
    choices = [option.choice for option in options]
    taken = rule.choose_plan_index(choices)
    fastest = min(choices, key=attrgetter("seconds"))
    return options[taken] if choices[taken] is fastest else replace(options[taken], fastest=fastest)


def make_calibration_for_job(state: State, job: Job, device_kind: str) -> Calibration:
    """Return how to correct memory and time predictions for the job on this kind of device, by its
    family's measurements.
    """
    return calibrate(
        state.observations, device=device_kind, family=job.spec.family_name, job_key=job.key
    )


def count_steps_left(job: Job, before_attempt: Attempt | None = None) -> int | None:
    """Return how many optimizer steps of the job are left after its newest checkpoint; None where
    the total is unknown.

    With `before_attempt`, only checkpoints of attempts before that one count.
    """
    steps = job.spec.optimizer_steps
    done = job.continues_step
    if steps is None:
        return None
    for attempt in (
        job.attempts if before_attempt is None else job.attempts[: before_attempt.number - 1]
    ):
        done = max(done, attempt.facts.checkpoint_step or 0)
    return max(0, steps - done)


def predict_attempt_duration(
    job: Job,
    attempt: Attempt,
    node_group: NodeGroup,
    calibration: Calibration,
    launch_cost_s: float,
    history: DurationHistory,
) -> PredictedDuration:
    """Return the predicted duration of an attempt, from its launch to its end.

    It follows from the attempt's measured pace, else from predicted or learned step times.
    """
    if attempt.probe:
        return PredictedDuration(history.estimate_probe_s(), history.estimate_probe_s())
    left = count_steps_left(job, attempt)
    pace = attempt.pace
    if left is not None and pace is not None:
        past_s = pace.at_s - attempt.launched_at_s
        return make_certain_duration(past_s + max(0, left - pace.steps_done) * pace.step_s)
    ran_before = collect_measured_step_s_by_plan(job, attempt.device, attempt.number).get(
        attempt.plan
    )
    factors = (
        compute_measured_step_time_factors(job, attempt.device, attempt.number),
        calibration.step_factors,
    )
    if left is None or has_unknown_step_time(job, attempt.estimate.source, *factors):
        unknown = _guess_duration(job, node_group, attempt.step_s, left, history)
        return unknown._replace(
            seconds=launch_cost_s + unknown.seconds, open_s=launch_cost_s + unknown.open_s
        )
    step_s = ran_before or attempt.step_s * get_step_time_correction(attempt.plan, *factors)
    return make_certain_duration(launch_cost_s + left * step_s)


def make_certain_duration(seconds: float) -> PredictedDuration:
    """Return these seconds as a duration that is known for sure, so that its nodes must stay open
    as long.
    """
    return PredictedDuration(seconds, seconds)


def collect_measured_step_s_by_plan(
    job: Job, device_kind: str, before_attempt_number: int | None = None
) -> dict[Plan, float]:
    """Return {plan: measured seconds per step} of the job's attempts on this kind of device.

    With `before_attempt_number`, only attempts with smaller numbers count.
    """
    return {
        attempt.plan: attempt.measured_step_s
        for attempt in job.attempts[
            : None if before_attempt_number is None else before_attempt_number - 1
        ]
        if attempt.device == device_kind and attempt.measured_step_s and not attempt.probe
    }


def compute_measured_step_time_factors(
    job: Job, device_kind: str, before_attempt_number: int | None = None
) -> Mapping[StepKind, float]:
    """Return {kind of step: measured over predicted step time} of the job's attempts on this kind
    of device.

    With `before_attempt_number`, only attempts with smaller numbers count.
    """
    return {
        get_step_kind(attempt.plan): attempt.measured_step_s / attempt.step_s
        for attempt in job.attempts[
            : None if before_attempt_number is None else before_attempt_number - 1
        ]
        if attempt.device == device_kind and attempt.measured_step_s and attempt.step_s > 0
    }


def collect_measured_peak_bytes_by_plan(job: Job, device_kind: str) -> dict[Plan, int]:
    """Return {plan: measured allocated peak bytes} of the job's attempts on this kind of device.

    Plans that ran out of memory are left out.
    """
    peaks: dict[Plan, int] = {}
    for attempt in job.attempts:
        trained = any(beat.steps_done > 0 for beat in attempt.heartbeats)
        has_peak = trained and not survived_oom(attempt)
        if has_peak and attempt.device == device_kind and attempt.plan not in job.refuted:
            peaks[attempt.plan] = max(attempt.peak_bytes or 0, peaks.get(attempt.plan, 0))
    return peaks


def _predict_durations(
    job: Job,
    candidates: Sequence[Candidate],
    node_group: NodeGroup,
    calibration: Calibration,
    history: DurationHistory,
) -> list[PredictedDuration]:
    """Return the predicted duration of the remaining training under each candidate plan, in the
    same order.

    Measured step times of the job and its family replace predicted ones.
    """
    left = count_steps_left(job)
    device = node_group.hardware.device.name
    measured = collect_measured_step_s_by_plan(job, device) if job.attempts else {}
    factors = compute_measured_step_time_factors(job, device), calibration.step_factors
    if left is None or (
        candidates and has_unknown_step_time(job, candidates[0].estimate.source, *factors)
    ):
        return [
            _guess_duration(job, node_group, candidate.step_s, left, history)
            for candidate in candidates
        ]
    return [
        make_certain_duration(
            left
            * (
                measured.get(candidate.plan)
                or candidate.step_s * get_step_time_correction(candidate.plan, *factors)
            )
        )
        for candidate in candidates
    ]


def has_unknown_step_time(
    job: Job, estimate_source: Source, *measured_factors: Mapping[StepKind, float]
) -> bool:
    """Return whether nothing tells the seconds of a step of the job, but only which of its plans is
    faster.
    """
    return estimate_source in WITHOUT_SECONDS and not job.spec.speeds and not any(measured_factors)


def _guess_duration(
    job: Job,
    node_group: NodeGroup,
    relative_step_s: float,
    steps_left: int | None,
    history: DurationHistory,
) -> PredictedDuration:
    """Return the duration of a job whose step time or number of steps left is unknown, from other
    jobs in `history`.

    `relative_step_s` tells only how the plan compares: the job's slowest plan takes the longest.
    `steps_left` is None where unknown.
    """
    try:
        slowest_s = max(
            candidate.step_s
            for candidate in find_frontier(
                read_plan_request(job.spec), node_group.hardware
            ).candidates
        )
    except SpecError:  # what it runs on is no whole group any more
        slowest_s = relative_step_s
    predicted_s = None if steps_left is None else steps_left * relative_step_s
    device = node_group.hardware.device.name
    return history.predict_duration(job, device, min(1.0, relative_step_s / slowest_s), predicted_s)


def estimate_needed_free_bytes(
    candidate: Candidate, calibration: Calibration, measured_bytes_by_plan: dict[Plan, int]
) -> int:
    """Return the bytes that must be free on each device for the candidate plan.

    They follow from its measured peak, if `measured_bytes_by_plan` has one, else from the corrected
    prediction.
    """
    around = candidate.estimate.device_bytes - candidate.estimate.allocated_bytes
    if candidate.plan in measured_bytes_by_plan:
        return measured_bytes_by_plan[candidate.plan] + around
    refuted = (
        refutation.needed_bytes + around
        for refutation in calibration.refuted
        if refutation.plan == candidate.plan
        and refutation.predicted_bytes <= candidate.estimate.allocated_bytes
    )
    return max((estimate_needed_device_bytes(candidate, calibration), *refuted))


def find_untried_candidates(
    job: Job, node_group: NodeGroup, calibration: Calibration
) -> Iterator[Candidate]:
    """Yield the plans that the job may still try on this group of nodes, in the order of its
    frontier.

    The frontier are the plans that no other plan beats. Each plan that ran out of memory excludes
    those with no lower peak on equal devices. A job that keeps its plan has only that one.
    """
    spec = job.spec
    trained = job.trained
    if trained and spec.degrade.keeps_plan:
        spec = spec.model_copy(update={"plan": make_pins(trained[0].plan)})
    candidates = find_frontier(read_plan_request(spec), node_group.hardware, calibration).candidates
    if not job.attempts:
        return iter(candidates)
    here = _list_attempts_on_device_kind(job, node_group.hardware.device.name)
    refuted_bytes = partial(correct_device_bytes, activation_factor=calibration.correction)
    device_bytes_max = _find_least_failed_bytes(
        job, node_group, FailureKind.DEVICE_OOM, refuted_bytes
    )
    host_bytes_max = _find_least_failed_bytes(
        job, node_group, FailureKind.HOST_OOM, partial(_compute_needed_host_bytes, node_group)
    )

    def device_bytes(candidate: Candidate) -> int:
        correction = calibration.compute_activation_factor(candidate.plan, candidate.estimate)
        return correct_device_bytes(candidate.estimate, correction)

    untried = (
        candidate
        for candidate in select_candidates_after_oom(job.spec, here, candidates)
        if candidate.plan not in job.refuted
        and device_bytes(candidate) < device_bytes_max
        and _compute_needed_host_bytes(node_group, candidate.estimate) < host_bytes_max
    )
    last = job.attempts[-1]
    verdict = None if last.failure is None else last.failure.verdict
    if verdict is None or verdict.row != NEAR_LIMIT_ROW or spec.degrade.keeps_plan:
        return untried
    # it may have ended for memory: less of it, where any plan takes less
    listed = list(untried)
    lower = [entry for entry in listed if device_bytes(entry) < refuted_bytes(last.estimate)]
    return iter(lower or listed)


def _list_attempts_on_device_kind(job: Job, device_kind: str) -> list[Attempt]:
    """Return the job's attempts that ran on this kind of device."""
    return [attempt for attempt in job.attempts if attempt.device == device_kind]


def _find_least_failed_bytes(
    job: Job,
    node_group: NodeGroup,
    failure_kind: FailureKind,
    get_bytes: Callable[[MemoryEstimate], int],
) -> float:
    """Return the smallest predicted bytes of the job's plans that failed with this kind; infinity
    without any.

    `get_bytes` returns the bytes to compare of a plan's estimate. Only failures on the group's kind
    of device count.
    """
    failed = (
        attempt.estimate
        for attempt in job.attempts
        if attempt.failure
        and attempt.failure.kind is failure_kind
        and attempt.device == node_group.hardware.device.name
        and find_lowerable_phase(job.spec, attempt) is None
    )
    return min((get_bytes(estimate) for estimate in failed), default=inf)


def _compute_needed_host_bytes(node_group: NodeGroup, estimate: MemoryEstimate) -> int:
    """Return the host memory of one rank in bytes; for a virtual device this includes its device
    memory.
    """
    virtual = node_group.hardware.device.kind.traits.is_virtual
    return estimate.host_bytes + (estimate.device_bytes if virtual else 0)
