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
from orchestrator.planning.frontier import Candidate, fit_probability, needed_device_bytes
from orchestrator.scheduling.base.migration import FILL_LAUNCHES
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.base.start_windows import start_hours_of, window_facts
from orchestrator.scheduling.failures.places import (
    device_sets_to_avoid,
    format_places,
    must_avoid_devices,
)
from orchestrator.scheduling.options.asks import Question, find_next_question
from orchestrator.scheduling.options.job_options import (
    Infeasible,
    JobOptions,
    SizeOption,
    calibration_for,
    list_job_options,
    measured_peak_bytes_by_plan,
)
from orchestrator.scheduling.placement.availability import AvailabilityProfile, StartSlot
from orchestrator.scheduling.queue.demand import leaves_headroom_from_s
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
    """Return a wait with the code and facts of the job's last decision, and this reservation."""
    return Wait(code=job.pending or Pending.DEVICES, facts=job.facts, reservation=reservation)


Decision = StartDecision | Wait | Infeasible | Question


class PricedOption(NamedTuple):
    """An option of a job on a pool of devices, with its cost in seconds if it started now."""

    cost_s: float
    pool: AvailabilityProfile
    entry: SizeOption


EarliestStart = Callable[[PricedOption, float], float]  # when it may start, from a time on


class _FutureSlot(NamedTuple):
    """An option that can start later, at `slot`; enough devices are free from `free_s` on."""

    cost_s: float
    offer: PricedOption
    slot: StartSlot
    free_s: float


def device_second_price(index: SchedulerIndex) -> float:
    """Return the price of a device-second, in seconds of completion time; it grows with the jobs
    per device.
    """
    others = max(0, len(index.waiting) + len(index.running) - 1)
    return index.tuning.price_alone + index.tuning.price * others / max(1, index.devices)


def idle_device_second_price(index: SchedulerIndex) -> float:
    """Return the price of a device-second that no job could use now; only waiting jobs raise it."""
    return index.tuning.price_idle + index.tuning.price * len(index.waiting) / max(1, index.devices)


def find_array_wait(
    index: SchedulerIndex, job: Job, promised: Mapping[str | None, int]
) -> Wait | None:
    """Return why the job must wait for other jobs of its array; None where it need not.

    An array runs `max_concurrent` jobs at once, and the jobs of a comparison run in turn.
    `promised` counts reservations by array; they count as running.
    """
    member = job.spec.member
    if job.array is None or member is None:
        return None
    if index.running_of_array[job.array] + promised[job.array] >= member.max_concurrent:
        return Wait(
            code=Pending.ARRAY_LIMIT, facts=(("array", job.array), ("most", member.max_concurrent))
        )
    before = _next_before(index, job, member.number) if member.compared else None
    if before is None:
        return None
    return Wait(code=Pending.ARRAY_LIMIT, facts=(("array", job.array), ("first", before)))


def _next_before(index: SchedulerIndex, job: Job, number: int) -> str | None:
    """Return the id of the nearest earlier job of the same comparison that waits for devices; None
    without one.
    """
    for order in range(job.order - 1, job.order - number - 1, -1):
        other = index.waiting.get(f"{job.spec.name}-{order}")
        if other is not None and other.job.not_before_s <= index.state.at_s:
            return other.job.id
    return None


def has_no_startable_option(index: SchedulerIndex, waiting: WaitingJob) -> bool:
    """Return whether no option of the job fits the devices that are idle now."""
    fits = False
    for pool, menu in index.options.options_of(waiting):
        for entry in allowed_options(index, pool, menu) if isinstance(menu, JobOptions) else ():
            if _can_start(pool, entry, index.state.at_s):
                return False
            fits = True
    return fits


def decide_on_job(
    state: State,
    index: SchedulerIndex,
    waiting: WaitingJob,
    price: float,
    *,
    may_reserve: bool,
    by_s: float = inf,
    devices_max: int | None = None,
) -> Decision | None:
    """Return the decision on a waiting job that should end by `by_s`.

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
        price,
        may_reserve=may_reserve,
        by_s=by_s,
        devices_max=devices_max,
    )
    places = device_sets_to_avoid(waiting.job, state.nodes, state.at_s)
    for devices in places:
        with index.hiding_devices(devices):
            outcome = decided()
            if isinstance(outcome, StartDecision):
                return outcome
            if (
                devices is places[-1]
                and must_avoid_devices(waiting.job)
                and has_startable_option(index, waiting, price)
            ):
                return _name_avoided_devices(outcome, devices)
    return decided()


def _name_avoided_devices(
    outcome: Wait | Infeasible | Question | None, devices: set[Device]
) -> Wait | Infeasible | Question | None:
    if not isinstance(outcome, Wait):
        return None
    return outcome._replace(facts=(*outcome.facts, ("avoided", format_places(devices))))


def has_startable_option(index: SchedulerIndex, waiting: WaitingJob, price: float) -> bool:
    """Return whether any option of the job can start now or later."""
    offers = price_options(index, index.options.options_of(waiting), price, waiting.job.spec)
    return any(find_start_slot(offer, index.state.at_s) is not None for offer in offers)


def _decide_on_visible_devices(
    state: State,
    index: SchedulerIndex,
    waiting: WaitingJob,
    price: float,
    *,
    may_reserve: bool,
    by_s: float,
    devices_max: int | None,
) -> Decision | None:
    """Return the decision on the job, on the devices that the index does not hide; None as in
    `decide_on_job`.
    """
    menus = index.options.options_of(waiting)
    offers = price_options(index, menus, price, waiting.job.spec, devices_max)
    if not offers and devices_max is not None:
        return None
    if not offers:
        return _explain_no_options(state, waiting.job, menus)
    opening = make_earliest_start(index, waiting, offers, state.at_s, by_s)
    now, later = _pick_best(offers, opening, state.at_s, may_reserve=may_reserve)
    if later is not None and (now is None or later.cost_s < now.cost_s):
        return _reserve_later(waiting.job, later, state.at_s) if may_reserve else None
    return None if now is None else _choose_start(index, waiting.job, now, state.at_s)


def expected_reservation(
    index: SchedulerIndex, waiting: WaitingJob, price: float, *, from_s: float, by_s: float
) -> Reservation | None:
    """Return the devices and times with which the job would start at `from_s` or later and end by
    `by_s`.

    None where that is unknown or impossible.
    """
    offers = price_options(index, index.options.options_of(waiting), price, waiting.job.spec)
    now_s = index.state.at_s
    opening = make_earliest_start(index, waiting, offers, from_s, by_s)
    if from_s > now_s:
        later = _pick_best_slot(offers, opening, from_s)
        return None if later is None else _reserve_later(waiting.job, later, now_s).reservation
    now, later = _pick_best(offers, opening, now_s, may_reserve=True)
    if now is not None and (later is None or now.cost_s <= later.cost_s):
        end_s = now_s + now.entry.seconds
        placement = find_start_devices(now.pool, now.entry, now_s)
        assert placement is not None, waiting.job.id
        return Reservation(job_id=waiting.job.id, start_s=now_s, end_s=end_s, placement=placement)
    return None if later is None else _reserve_later(waiting.job, later, now_s).reservation


def explain_wait(
    state: State, index: SchedulerIndex, waiting: WaitingJob
) -> Wait | Infeasible | Question:
    """Return why the job waits: a Wait, a Question to a person, or Infeasible if it can never
    start.
    """
    menus = index.options.options_of(waiting)
    offers = [
        (pool, entry)
        for pool, menu in menus
        if isinstance(menu, JobOptions)
        for entry in allowed_options(index, pool, menu)
    ]
    if not offers:
        return _explain_no_options(state, waiting.job, menus)
    pool, entry = min(offers, key=lambda offer: offer[1].seconds)
    spec = waiting.job.spec
    now_s = state.at_s
    lengths_s = (option.seconds for _, option in offers)
    fill_s = FILL_LAUNCHES * pool.launch_cost_s
    start_s = start_hours_of(spec, lengths_s, now_s, fill_s=fill_s).start_s(now_s, entry.seconds)
    if start_s == now_s:
        return _wait_for_devices(pool, entry, now_s)
    return Wait(code=Pending.START_WINDOW, facts=window_facts(spec, start_s))


def price_options(
    index: SchedulerIndex,
    options_by_pool: OptionsByPool,
    price: float,
    spec: JobSpec,
    devices_max: int | None = None,
) -> list[PricedOption]:
    """Return all options of the job with their costs, cheapest first, as if their devices were
    free.

    With `devices_max`, devices are reserved for the job or owned by its team: any number up to that
    is allowed.
    """
    weight = 1.0 if spec.guarantee is None else SOON
    offers = [
        PricedOption(weight * (entry.seconds + price * entry.device_seconds), pool, entry)
        for pool, menu in options_by_pool
        if isinstance(menu, JobOptions)
        for entry in (
            allowed_options(index, pool, menu)
            if devices_max is None
            else _options_that_fit(pool, menu)
        )
        if devices_max is None or entry.devices <= devices_max
    ]
    if len(offers) > 1:
        offers.sort(key=attrgetter("cost_s"))
    return offers


def make_earliest_start(
    index: SchedulerIndex,
    waiting: WaitingJob,
    offers: Sequence[PricedOption],
    now_s: float,
    by_s: float,
) -> EarliestStart:
    """Return a function that gives an option's earliest start after a given time, in seconds since
    1970.

    It follows from the job's start window, and from the free devices that it must leave for shorter
    jobs.
    """
    spec = waiting.job.spec
    wanted = index.devices_used_by_shorter_jobs(now_s)
    fill_s = FILL_LAUNCHES * max((offer.pool.launch_cost_s for offer in offers), default=0.0)
    hours = start_hours_of(spec, (offer.entry.seconds for offer in offers), now_s, by_s, fill_s)
    if spec.start_window is not None or not index.policy.leaves_headroom(waiting, now_s):
        return lambda offer, from_s: hours.start_s(from_s, offer.entry.seconds)

    def with_room(offer: PricedOption, from_s: float) -> float:
        room_s = leaves_headroom_from_s(
            wanted, offer.pool, offer.entry.devices, offer.entry.seconds
        )
        return hours.start_s(max(from_s, room_s), offer.entry.seconds)

    return with_room


def _pick_best(
    offers: Sequence[PricedOption], opening: EarliestStart, now_s: float, *, may_reserve: bool
) -> tuple[PricedOption | None, _FutureSlot | None]:
    """Return (best option that can start now, best later slot); each may be None.

    There is no slot where the option that can start now is the best of all.
    """
    now = None
    for offer in offers:
        if _can_start(offer.pool, offer.entry, now_s) and opening(offer, now_s) == now_s:
            now = offer
            break
    if not offers or now is offers[0] or not (may_reserve or now is not None):
        return now, None
    return now, _pick_best_slot(offers, opening, now_s)


def allowed_options(
    index: SchedulerIndex, pool: AvailabilityProfile, options: JobOptions
) -> Sequence[SizeOption]:
    """Return the options that the queue policy allows on this pool of devices."""
    return index.policy.widths(_options_that_fit(pool, options))


def _options_that_fit(pool: AvailabilityProfile, options: JobOptions) -> Sequence[SizeOption]:
    """Return the options, or, where other processes hold memory, those that still fit."""
    if pool.has_bytes_on_every_device(options.most_bytes):
        return options.entries
    return options.best_where(lambda entry: pool.can_ever_hold(entry.shape, entry.least_bytes))


def _can_start(pool: AvailabilityProfile, option: SizeOption, now_s: float) -> bool:
    if pool.idle < option.devices:
        return False
    if pool.has_closed_nodes and option.open_s != option.seconds:
        return find_start_devices(pool, option, now_s) is not None
    if now_s + option.seconds > pool.could_run_until_s(option.shape):
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


def _pick_best_slot(
    offers: Sequence[PricedOption], opening: EarliestStart, from_s: float
) -> _FutureSlot | None:
    """Return the cheapest slot from `from_s` on, waiting included; None without one."""
    best: _FutureSlot | None = None
    for offer in offers:
        if best is not None and offer.cost_s >= best.cost_s:
            continue
        slot = first = find_start_slot(offer, from_s)
        while slot is not None and slot.start_s < (opens_s := opening(offer, slot.start_s)):
            slot = find_start_slot(offer, opens_s) if opens_s < inf else None
        if slot is not None and first is not None:
            cost_s = slot.start_s - from_s + offer.cost_s
            if cost_s < (inf if best is None else best.cost_s):
                best = _FutureSlot(cost_s, offer, slot, first.start_s)
    return best


def find_start_slot(priced: PricedOption, from_s: float) -> StartSlot | None:
    """Return the first slot in which the option can start from `from_s` on; None if it never can."""
    entry = priced.entry
    return priced.pool.find_earliest_slot(
        entry.shape, from_s, entry.seconds, entry.least_bytes, entry.open_s
    )


def _reserve_later(job: Job, later: _FutureSlot, now_s: float) -> Wait:
    pool = later.offer.pool
    entry = later.offer.entry
    reservation = Reservation(
        job_id=job.id,
        start_s=later.slot.start_s,
        end_s=later.slot.start_s + entry.seconds,
        placement=pool.choose_slot_devices(later.slot, entry.least_bytes),
    )
    if later.slot.start_s == later.free_s:
        wait = _wait_for_devices(pool, entry, now_s)
        return wait._replace(reservation=reservation)
    if job.spec.start_window is not None:
        return Wait(
            code=Pending.START_WINDOW,
            facts=window_facts(job.spec, later.slot.start_s),
            reservation=reservation,
        )
    return Wait(
        code=Pending.DEVICES,
        facts=(("devices", entry.devices), ("device", pool.group.hardware.device.name)),
        reservation=reservation,
        reevaluate_at_s=later.slot.start_s,
    )


def _wait_for_devices(pool: AvailabilityProfile, option: SizeOption, now_s: float) -> Wait:
    """Return the wait of a job for devices: for busy, unreadable, drained or closing ones.

    Its facts stay while the state changes; `reports/waiting.py` has numbers, names and times.
    """
    if pool.unreadable and pool.idle < option.devices <= pool.idle + pool.idle_unreadable:
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
    return Wait(code=Pending.MAINTENANCE, facts=maintenance_facts(option, names))


def maintenance_facts(option: SizeOption, nodes: str) -> Facts:
    """Return the facts of a wait for these nodes' maintenance.

    They say if the time limit bounds the job, because its duration is unknown.
    """
    if option.is_known and option.open_s <= option.seconds:
        return (("nodes", nodes),)
    return (("nodes", nodes), ("bound", "time_limit"))


def _choose_start(
    index: SchedulerIndex, job: Job, offer: PricedOption, now_s: float
) -> StartDecision:
    """Return the decision to start the option now, with its probability to fit the fullest of its
    devices.
    """
    pool = offer.pool
    entry = offer.entry
    placement = find_start_devices(pool, entry, now_s)
    assert placement is not None, (job.id, entry)
    device = pool.group.hardware.device.name
    candidate = entry.candidate
    calibrated = index.options.calibration_of(job, device)
    judged = candidate.plan not in measured_peak_bytes_by_plan(job, device)
    capacity_bytes = min(starmap(pool.free_bytes, list_devices_of(placement)))
    correction = calibrated.activation_factor_of(candidate.plan, candidate.estimate)
    chance: float | None = None
    if judged and rests_on_facts(candidate.estimate, correction):
        chance = fit_probability(candidate, capacity_bytes, calibrated)
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
        needed_bytes=needed_device_bytes(candidate, calibrated) if judged else None,
        fit_probability=chance,
        probe=entry.probe,
        passed_over=None
        if entry.fastest is None
        else describe_rejected_fastest(entry.choice, entry.fastest),
    )


def _explain_no_options(
    state: State, job: Job, menus: OptionsByPool
) -> Wait | Infeasible | Question:
    """Return why a job has no option: a Wait for foreign memory or absent nodes, a Question, or
    Infeasible.
    """
    for pool, menu in menus:
        if isinstance(menu, JobOptions):
            device = pool.group.hardware.device.name
            return Wait(code=Pending.FOREIGN_MEMORY, facts=(("device", device),))
    never = []
    groups = group_equal_nodes(state.declared or state.nodes)
    for group in groups:
        options = list_job_options(
            job, group, calibration_for(state, job, group.hardware.device.name), 0.0
        )
        if isinstance(options, JobOptions) or options.likeliest is not None:
            device = group.hardware.device.name
            return Wait(code=Pending.NODES_AWAY, facts=(("device", device),))
        never.append(options)
    return find_next_question(state, job, groups) or Infeasible(
        why=lambda: "\n".join(refusal.why() for refusal in never)
    )
