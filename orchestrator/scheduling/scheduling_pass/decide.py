"""The decision on a waiting job: start now with an option, wait with a reservation, or wait without
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from math import inf
from operator import attrgetter
from typing import NamedTuple

from orchestrator.memory.calibration.calibrate import CONFIDENCE, rests_on_measurements
from orchestrator.memory.calibration.correction import rests_on_facts
from orchestrator.planning.explain import describe_rejected_fastest
from orchestrator.planning.frontier import (
    Candidate,
    estimate_candidate_fit_probability,
    estimate_needed_device_bytes,
)
from orchestrator.scheduling.base.migration import FILL_LAUNCHES
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.base.start_windows import make_start_hours, make_start_window_facts
from orchestrator.scheduling.failures.places import (
    format_devices_or_nodes,
    list_device_sets_to_avoid,
    must_avoid_last_devices,
)
from orchestrator.scheduling.options.asks import Question, find_change_or_question
from orchestrator.scheduling.options.job_options import (
    Infeasible,
    JobOptions,
    SizeOption,
    collect_measured_peak_bytes_by_plan,
    list_job_options,
    make_calibration_for_job,
)
from orchestrator.scheduling.placement.availability import AvailabilityProfile, StartSlot
from orchestrator.scheduling.queue.demand import leaves_enough_headroom_from_s
from orchestrator.scheduling.queue.wait_queue import OptionsByPool, WaitingJob
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.attempt import Device, Placement, list_devices_of
from orchestrator.specs.cluster import describe_unreadable
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.pending import Facts, Pending
from orchestrator.specs.state import Reservation, State

NAMED_MAX = 3  # nodes in a reason
# of its seconds and its price, against its start: a job with a promised speed starts as soon as it
# can
SOON = 1e-6


@frozen
class StartDecision:
    """The decision to start the job now, with this plan on these devices."""

    candidate: Candidate
    placement: Placement
    device: str
    correction: float  # factor on the activations, as calibrated
    needed_bytes: int | None  # None: its peak was measured before
    fit_probability: float | None  # None: memory unknown, or its peak was measured before
    probe: bool  # only to be measured
    passed_over: str | None  # why it is chosen over the fastest plan


class Wait(NamedTuple):
    """The decision that the job waits, with a code for the reason.

    A reservation, if any, keeps later jobs from delaying it.
    """

    code: Pending
    facts: Facts = ()
    reservation: Reservation | None = None
    # when headroom for shorter jobs suffices, if it waits only for that
    reevaluate_at_s: float | None = None


def repeat_wait(job: Job, reservation: Reservation) -> Wait:
    """Return the decision to wait with the code and facts of the job's last decision, and with this
    reservation.
    """
    return Wait(code=job.pending or Pending.DEVICES, facts=job.facts, reservation=reservation)


Decision = StartDecision | Wait | Infeasible | Question


class PricedOption(NamedTuple):
    """An option (plan, devices, run time) of a job on a pool of equal nodes, with its cost in
    seconds if it started now.
    """

    cost_s: float
    pool: AvailabilityProfile
    entry: SizeOption


EarliestStart = Callable[[PricedOption, float], float]  # when it may start, from a time on


class _FutureSlot(NamedTuple):
    """An option that can start later, at `slot`. Enough devices are free from `free_s` on, by then
    also those to leave free.
    """

    cost_s: float
    offer: PricedOption
    slot: StartSlot
    free_s: float


def compute_device_second_price(index: SchedulerIndex) -> float:
    """Return how many seconds of completion time a device-second is worth; more with more jobs per
    device.
    """
    others = max(0, len(index.waiting) + len(index.running) - 1)
    return index.tuning.price_alone + index.tuning.price * others / max(1, index.devices)


def compute_idle_device_second_price(index: SchedulerIndex) -> float:
    """Return how many seconds of completion time a device-second is worth that no job could use
    now.

    Only waiting jobs raise it.
    """
    return index.tuning.price_idle + index.tuning.price * len(index.waiting) / max(1, index.devices)


def find_array_wait(
    index: SchedulerIndex, job: Job, reservations_by_array: Mapping[str | None, int]
) -> Wait | None:
    """Return the decision that the job waits for other jobs of its array; None where it need not.

    An array runs `max_concurrent` jobs at once, and the jobs of a comparison run in turn.
    `reservations_by_array` are numbers of reservations by array; they count as running jobs.
    """
    member = job.spec.member
    if job.array is None or member is None:
        return None
    if (
        index.running_of_array[job.array] + reservations_by_array[job.array]
        >= member.max_concurrent
    ):
        return Wait(
            code=Pending.ARRAY_LIMIT, facts=(("array", job.array), ("most", member.max_concurrent))
        )
    before = _find_id_of_earlier_waiting_job(index, job, member.number) if member.compared else None
    if before is None:
        return None
    return Wait(code=Pending.ARRAY_LIMIT, facts=(("array", job.array), ("first", before)))


def _find_id_of_earlier_waiting_job(
    index: SchedulerIndex, job: Job, member_number: int
) -> str | None:
    """Return the id of the nearest earlier job of the same comparison that waits for devices; None
    without one.
    """
    for order in range(job.order - 1, job.order - member_number - 1, -1):
        other = index.waiting.get(f"{job.spec.name}-{order}")
        if other is not None and other.job.not_before_s <= index.state.at_s:
            return other.job.id
    return None


def fits_no_idle_devices(index: SchedulerIndex, waiting: WaitingJob) -> bool:
    """Return whether the job has an option, but none that fits the devices that are idle now."""
    fits = False
    for pool, menu in index.options.find_options(waiting):
        for entry in (
            list_allowed_options(index, pool, menu) if isinstance(menu, JobOptions) else ()
        ):
            if _can_start_now(pool, entry, index.state.at_s):
                return False
            fits = True
    return fits


def decide_on_job(
    state: State,
    index: SchedulerIndex,
    waiting: WaitingJob,
    price_per_device_s: float,
    *,
    may_reserve: bool,
    end_by_s: float,
    devices_max: int | None,
) -> Decision | None:
    """Return the decision on a waiting job that should end by `end_by_s`.

    None means that the job goes on waiting as before, or cannot start. The number of devices, at
    most `devices_max`, is chosen by end time and price, now or when enough are free. Devices on
    which the job ended for no known reason come last. Where its verdict demands other devices,
    those do not count as long as others could hold the job.
    """
    decided = partial(
        _decide_on_visible_devices,
        state,
        index,
        waiting,
        price_per_device_s,
        may_reserve=may_reserve,
        end_by_s=end_by_s,
        devices_max=devices_max,
    )
    places = list_device_sets_to_avoid(waiting.job, state.nodes, state.at_s)
    for devices in places:
        with index.hiding_devices(devices):
            outcome = decided()
            if isinstance(outcome, StartDecision):
                return outcome
            if (
                devices is places[-1]
                and must_avoid_last_devices(waiting.job)
                and has_startable_option(index, waiting, price_per_device_s)
            ):
                return _add_avoided_devices(outcome, devices)
    return decided()


def _add_avoided_devices(
    decision: Wait | Infeasible | Question | None, avoided_devices: set[Device]
) -> Wait | Infeasible | Question | None:
    """Return the decision to wait with the avoided devices among its facts; None where a job may
    only be refused or ask.
    """
    if not isinstance(decision, Wait):
        return None
    return decision._replace(
        facts=(*decision.facts, ("avoided", format_devices_or_nodes(avoided_devices)))
    )


def has_startable_option(
    index: SchedulerIndex, waiting: WaitingJob, price_per_device_s: float
) -> bool:
    """Return whether any option of the job can start now or at a known later time."""
    offers = price_options(
        index, index.options.find_options(waiting), price_per_device_s, waiting.job.spec
    )
    return any(find_start_slot(offer, index.state.at_s) is not None for offer in offers)


def _decide_on_visible_devices(
    state: State,
    index: SchedulerIndex,
    waiting: WaitingJob,
    price_per_device_s: float,
    *,
    may_reserve: bool,
    end_by_s: float,
    devices_max: int | None,
) -> Decision | None:
    """Return the decision on the job, on the devices that the index does not hide; None as in
    `decide_on_job`.
    """
    menus = index.options.find_options(waiting)
    offers = price_options(index, menus, price_per_device_s, waiting.job.spec, devices_max)
    if not offers and devices_max is not None:
        return None
    if not offers:
        return _explain_lack_of_options(state, waiting.job, menus)
    opening = make_earliest_start_function(index, waiting, offers, state.at_s, end_by_s)
    now, later = _pick_best_option_and_slot(offers, opening, state.at_s, may_reserve=may_reserve)
    if later is not None and (now is None or later.cost_s < now.cost_s):
        return _make_wait_with_reservation(waiting.job, later, state.at_s) if may_reserve else None
    return None if now is None else _make_start_decision(index, waiting.job, now, state.at_s)


def make_expected_reservation(
    index: SchedulerIndex,
    waiting: WaitingJob,
    price_per_device_s: float,
    *,
    earliest_s: float,
    end_by_s: float,
) -> Reservation | None:
    """Return the devices and times with which the job would start at `earliest_s` or later and end
    by `end_by_s`.

    None where that is unknown or impossible.
    """
    offers = price_options(
        index, index.options.find_options(waiting), price_per_device_s, waiting.job.spec
    )
    now_s = index.state.at_s
    opening = make_earliest_start_function(index, waiting, offers, earliest_s, end_by_s)
    if earliest_s > now_s:
        later = _pick_cheapest_slot(offers, opening, earliest_s)
        return (
            None
            if later is None
            else _make_wait_with_reservation(waiting.job, later, now_s).reservation
        )
    now, later = _pick_best_option_and_slot(offers, opening, now_s, may_reserve=True)
    if now is not None and (later is None or now.cost_s <= later.cost_s):
        end_s = now_s + now.entry.seconds
        placement = find_start_devices(now.pool, now.entry, now_s)
        assert placement is not None, waiting.job.id
        return Reservation(job_id=waiting.job.id, start_s=now_s, end_s=end_s, placement=placement)
    return (
        None
        if later is None
        else _make_wait_with_reservation(waiting.job, later, now_s).reservation
    )


def explain_wait(
    state: State, index: SchedulerIndex, waiting: WaitingJob
) -> Wait | Infeasible | Question:
    """Return why the job waits: a Wait with the reason, a Question to a person, or Infeasible if it
    can never start.
    """
    menus = index.options.find_options(waiting)
    offers = [
        (pool, entry)
        for pool, menu in menus
        if isinstance(menu, JobOptions)
        for entry in list_allowed_options(index, pool, menu)
    ]
    if not offers:
        return _explain_lack_of_options(state, waiting.job, menus)
    pool, entry = min(offers, key=lambda offer: offer[1].seconds)
    spec = waiting.job.spec
    now_s = state.at_s
    lengths_s = (option.seconds for _, option in offers)
    fill_s = FILL_LAUNCHES * pool.launch_cost_s
    start_s = make_start_hours(spec, lengths_s, now_s, least_left_s=fill_s).find_first_start_s(
        now_s, entry.seconds
    )
    if start_s == now_s:
        return _make_wait_for_devices(pool, entry, now_s)
    return Wait(code=Pending.START_WINDOW, facts=make_start_window_facts(spec, start_s))


def price_options(
    index: SchedulerIndex,
    options_by_pool: OptionsByPool,
    price_per_device_s: float,
    spec: JobSpec,
    devices_max: int | None = None,
) -> list[PricedOption]:
    """Return all options of the job with their costs in seconds, cheapest first, as if their
    devices were free.

    `devices_max` is set where devices are reserved for the job or owned by its team. Then any
    number of devices up to it is allowed, whatever the policy says.
    """
    weight = 1.0 if spec.guarantee is None else SOON
    offers = [
        PricedOption(
            weight * (entry.seconds + price_per_device_s * entry.device_seconds), pool, entry
        )
        for pool, menu in options_by_pool
        if isinstance(menu, JobOptions)
        for entry in (
            list_allowed_options(index, pool, menu)
            if devices_max is None
            else _list_options_that_fit(pool, menu)
        )
        if devices_max is None or entry.devices <= devices_max
    ]
    if len(offers) > 1:
        offers.sort(key=attrgetter("cost_s"))
    return offers


def make_earliest_start_function(
    index: SchedulerIndex,
    waiting: WaitingJob,
    priced_options: Sequence[PricedOption],
    now_s: float,
    end_by_s: float,
) -> EarliestStart:
    """Return a function of an option and a time, which gives the option's earliest start from that
    time on.

    Times are seconds since 1970. The start follows from the job's start window, and from the free
    devices that it must leave for shorter jobs.
    """
    spec = waiting.job.spec
    wanted = index.compute_average_devices_by_duration_class(now_s)
    fill_s = FILL_LAUNCHES * max(
        (offer.pool.launch_cost_s for offer in priced_options), default=0.0
    )
    hours = make_start_hours(
        spec, (offer.entry.seconds for offer in priced_options), now_s, end_by_s, fill_s
    )
    if spec.start_window is not None or not index.policy.must_leave_headroom(waiting, now_s):
        return lambda offer, from_s: hours.find_first_start_s(from_s, offer.entry.seconds)

    def with_room(offer: PricedOption, from_s: float) -> float:
        room_s = leaves_enough_headroom_from_s(
            wanted, offer.pool, offer.entry.devices, offer.entry.seconds
        )
        return hours.find_first_start_s(max(from_s, room_s), offer.entry.seconds)

    return with_room


def _pick_best_option_and_slot(
    priced_options: Sequence[PricedOption],
    earliest_start: EarliestStart,
    now_s: float,
    *,
    may_reserve: bool,
) -> tuple[PricedOption | None, _FutureSlot | None]:
    """Return (best option that can start now, best later slot); each may be None.

    There is no slot where the option that can start now is the best of all.
    """
    now = None
    for offer in priced_options:
        if _can_start_now(offer.pool, offer.entry, now_s) and earliest_start(offer, now_s) == now_s:
            now = offer
            break
    if not priced_options or now is priced_options[0] or not (may_reserve or now is not None):
        return now, None
    return now, _pick_cheapest_slot(priced_options, earliest_start, now_s)


def list_allowed_options(
    index: SchedulerIndex, pool: AvailabilityProfile, options: JobOptions
) -> Sequence[SizeOption]:
    """Return the job's options that the queue policy allows on this pool (group of equal nodes)."""
    return index.policy.select_allowed_options(_list_options_that_fit(pool, options))


def _list_options_that_fit(pool: AvailabilityProfile, options: JobOptions) -> Sequence[SizeOption]:
    """Return the job's options; where other processes hold memory, only those that still fit."""
    if pool.has_bytes_on_every_device(options.most_bytes):
        return options.entries
    return options.list_best_where(
        lambda entry: pool.has_enough_devices_when_idle(entry.shape, entry.least_bytes)
    )


def _can_start_now(pool: AvailabilityProfile, option: SizeOption, now_s: float) -> bool:
    """Return whether enough idle devices stay free and open for the whole of the option."""
    if pool.idle < option.devices:
        return False
    if pool.has_closed_nodes and option.open_s != option.seconds:
        return find_start_devices(pool, option, now_s) is not None
    if now_s + option.seconds > pool.find_runnable_until_s(option.shape):
        return False
    return (
        pool.has_bytes_on_every_device(option.least_bytes)
        or find_start_devices(pool, option, now_s) is not None
    )


def find_start_devices(
    pool: AvailabilityProfile, option: SizeOption, now_s: float
) -> Placement | None:
    """Return the devices on which the option can start now; None where too few are free."""
    end_s = now_s + option.seconds
    open_until_s = now_s + option.open_s
    return pool.find_devices_now(option.shape, end_s, option.least_bytes, open_until_s)


def _pick_cheapest_slot(
    priced_options: Sequence[PricedOption], earliest_start: EarliestStart, earliest_s: float
) -> _FutureSlot | None:
    """Return the slot with the least cost from `earliest_s` on, seconds of waiting included; None
    without one.
    """
    best: _FutureSlot | None = None
    for offer in priced_options:
        if best is not None and offer.cost_s >= best.cost_s:
            continue
        slot = first = find_start_slot(offer, earliest_s)
        while slot is not None and slot.start_s < (opens_s := earliest_start(offer, slot.start_s)):
            slot = find_start_slot(offer, opens_s) if opens_s < inf else None
        if slot is not None and first is not None:
            cost_s = slot.start_s - earliest_s + offer.cost_s
            if cost_s < (inf if best is None else best.cost_s):
                best = _FutureSlot(cost_s, offer, slot, first.start_s)
    return best


def find_start_slot(priced_option: PricedOption, earliest_s: float) -> StartSlot | None:
    """Return the first time and nodes with which the option can start from `earliest_s` on; None if
    it never can.
    """
    entry = priced_option.entry
    return priced_option.pool.find_earliest_slot(
        entry.shape, earliest_s, entry.seconds, entry.least_bytes, entry.open_s
    )


def _make_wait_with_reservation(job: Job, future_slot: _FutureSlot, now_s: float) -> Wait:
    """Return the decision to wait with a reservation of the slot, and the reason for it."""
    pool = future_slot.offer.pool
    entry = future_slot.offer.entry
    reservation = Reservation(
        job_id=job.id,
        start_s=future_slot.slot.start_s,
        end_s=future_slot.slot.start_s + entry.seconds,
        placement=pool.choose_slot_devices(future_slot.slot, entry.least_bytes),
    )
    if future_slot.slot.start_s == future_slot.free_s:
        wait = _make_wait_for_devices(pool, entry, now_s)
        return wait._replace(reservation=reservation)
    if job.spec.start_window is not None:
        return Wait(
            code=Pending.START_WINDOW,
            facts=make_start_window_facts(job.spec, future_slot.slot.start_s),
            reservation=reservation,
        )
    return Wait(
        code=Pending.DEVICES,
        facts=(("devices", entry.devices), ("device", pool.group.hardware.device.name)),
        reservation=reservation,
        reevaluate_at_s=future_slot.slot.start_s,
    )


def _make_wait_for_devices(pool: AvailabilityProfile, option: SizeOption, now_s: float) -> Wait:
    """Return the decision to wait for devices, with the code that says if they are busy,
    unreadable, drained or closing.

    Its facts stay while the state changes; `reports/waiting.py` has numbers, names and times.
    """
    if pool.unreadable and pool.idle < option.devices <= pool.idle + pool.idle_unreadable_count:
        places = describe_unreadable(pool.unreadable_nodes)
        return Wait(code=Pending.UNREADABLE, facts=(("places", places),))
    closed = pool.list_closing_nodes(now_s + option.open_s)
    open_devices = pool.idle - sum(node.idle_devices for node in closed)
    if not closed or not open_devices < option.devices <= pool.idle:
        return Wait(code=Pending.DEVICES)
    names = ", ".join([node.name for node in closed][:NAMED_MAX])
    if len(closed) > NAMED_MAX:
        names += ", ..."
    if all(node.closes_s <= now_s for node in closed):
        return Wait(code=Pending.DRAIN, facts=(("node" if len(closed) == 1 else "nodes", names),))
    return Wait(code=Pending.MAINTENANCE, facts=make_maintenance_facts(option, names))


def make_maintenance_facts(option: SizeOption, node_names: str) -> Facts:
    """Return the facts for the sentence that a job waits for the maintenance of these nodes.

    They say if only the time limit bounds the job, because its duration is unknown.
    """
    if option.is_known and option.open_s <= option.seconds:
        return (("nodes", node_names),)
    return (("nodes", node_names), ("bound", "time_limit"))


def _make_start_decision(
    index: SchedulerIndex, job: Job, priced_option: PricedOption, now_s: float
) -> StartDecision:
    """Return the decision to start the option now, with its probability to fit the fullest of its
    devices.
    """
    pool = priced_option.pool
    entry = priced_option.entry
    placement = find_start_devices(pool, entry, now_s)
    assert placement is not None, (job.id, entry)
    device = pool.group.hardware.device.name
    candidate = entry.candidate
    calibrated = index.options.find_calibration(job, device)
    judged = candidate.plan not in collect_measured_peak_bytes_by_plan(job, device)
    capacity_bytes = min(starmap(pool.get_free_bytes, list_devices_of(placement)))
    correction = calibrated.compute_activation_factor(candidate.plan, candidate.estimate)
    chance: float | None = None
    if judged and rests_on_facts(candidate.estimate, correction):
        chance = estimate_candidate_fit_probability(candidate, capacity_bytes, calibrated)
    # what a job file declares may raise a doubt; it is no proof before anything was measured
    if (
        chance is not None
        and chance >= CONFIDENCE
        and not rests_on_measurements(candidate.plan, candidate.estimate, calibrated)
    ):
        chance = None
    return StartDecision(
        candidate=candidate,
        placement=placement,
        device=device,
        correction=correction,
        needed_bytes=estimate_needed_device_bytes(candidate, calibrated) if judged else None,
        fit_probability=chance,
        probe=entry.probe,
        passed_over=None
        if entry.fastest is None
        else describe_rejected_fastest(entry.choice, entry.fastest),
    )


def _explain_lack_of_options(
    state: State, job: Job, options_by_pool: OptionsByPool
) -> Wait | Infeasible | Question:
    """Return why a job has no option: a Wait for foreign memory or absent nodes, a Question, or
    Infeasible.
    """
    for pool, menu in options_by_pool:
        if isinstance(menu, JobOptions):
            device = pool.group.hardware.device.name
            return Wait(code=Pending.FOREIGN_MEMORY, facts=(("device", device),))
    never = []
    groups = group_equal_nodes(state.declared or state.nodes)
    for group in groups:
        options = list_job_options(
            job, group, make_calibration_for_job(state, job, group.hardware.device.name), 0.0
        )
        if isinstance(options, JobOptions) or options.likeliest is not None:
            device = group.hardware.device.name
            return Wait(code=Pending.NODES_AWAY, facts=(("device", device),))
        never.append(options)
    return find_change_or_question(state, job, groups) or Infeasible(
        why=lambda: "\n".join(refusal.why() for refusal in never)
    )
