"""Explanations of why a queued job waits, and what would start it sooner, derived from the current
state.

A job that waits for devices could use free ones unless something excludes them. `Obstacle` lists
the possible causes in the order of the checks. The reason names every obstacle up to the first one
that leaves too few devices together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from math import inf
from typing import NamedTuple

from orchestrator.scheduling.base.drain import list_active_suspensions
from orchestrator.scheduling.base.held_devices import map_held_device_to_job_id
from orchestrator.scheduling.base.sentences import (
    describe_status,
    format_too_late_for_maintenance,
    format_waiting_sentence,
)
from orchestrator.scheduling.base.shape import GangShape
from orchestrator.scheduling.base.start_windows import make_start_window_facts
from orchestrator.scheduling.failures.places import (
    list_device_sets_to_avoid,
    must_avoid_last_devices,
)
from orchestrator.scheduling.options.job_options import Infeasible, SizeOption
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.queue.wait_queue import WaitingJob
from orchestrator.scheduling.scheduling_pass.decide import (
    PricedOption,
    Wait,
    explain_wait,
    find_array_wait,
    find_start_slot,
    has_startable_option,
    make_earliest_start_function,
    make_maintenance_facts,
    price_options,
)
from orchestrator.scheduling.scheduling_pass.index import waits_for_devices
from orchestrator.scheduling.scheduling_pass.quotas import count_devices_by_team
from orchestrator.specs.attempt import Device, count_devices, list_devices_of
from orchestrator.specs.clock import format_local_time
from orchestrator.specs.cluster import Window, describe_unreadable
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.pending import Pending
from orchestrator.specs.plain_text import join_first_words
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from orchestrator.specs.units import format_bytes, format_seconds

NAMES_MAX = 3  # nodes, devices or jobs in a sentence


class Obstacle(Enum):
    """A reason why a job cannot use a free device; the members are in the order in which they are
    checked.
    """

    SET_ASIDE = 1  # attempts ended there for no known reason
    AVOIDED = 2  # the job itself ended there, and goes on elsewhere
    DRAINED = 3
    MAINTENANCE = 4  # the job would not end before it
    MEMORY = 5  # that other processes hold
    RESERVED = 6  # for another job


class DeviceReservation(NamedTuple):
    """A reservation of one device: its start, its job's id, and its position in the state's list of
    reservations.
    """

    start_s: float
    job_id: str
    number: int


class BlockedOption(NamedTuple):
    """An option (plan and devices) of a job, with what keeps the job from the free devices of its
    pool.
    """

    offer: PricedOption
    free: int
    obstacles: Mapping[Obstacle, tuple[Device, ...]]
    scattered: bool  # enough devices are left, but not on suitable nodes

    @property
    def can_start(self) -> bool:
        """Whether no obstacle keeps the job from starting with this option."""
        return not self.obstacles and not self.scattered


class WaitExplainer:
    """Explains why the jobs of one state wait, and what would help.

    Construction visits every job that holds devices. An object is not safe for use by several
    threads at once.
    """

    def __init__(self, state: State, time_zone: str = "UTC") -> None:
        """Prepare for the jobs of this state; times in sentences are in `time_zone`."""
        self._state = state
        self._zone = time_zone
        holding = [
            job
            for job in state.jobs.values()
            if any(not attempt.released for attempt in job.attempts)
        ]
        self._index = make_index(replace(state, jobs=Jobs(holding)))
        self._index.reserve(state.reservations)
        self._nodes = {node.name: node for node in state.nodes}
        self._holders = map_held_device_to_job_id(state)
        self._free = [
            [
                (node.name, device)
                for node in pool.group.nodes
                for device in range(node.devices)
                if (node.name, device) not in self._holders and device not in node.unreadable
            ]
            for pool in self._index.pools
        ]
        self._aside = {
            (entry.node, entry.device): entry.until_s for entry in list_active_suspensions(state)
        }
        self._numbers = {entry.job_id: number for number, entry in enumerate(state.reservations)}
        self._promises: dict[Device, list[DeviceReservation]] = {}
        for number, entry in enumerate(state.reservations):
            promise = DeviceReservation(entry.start_s, entry.job_id, number)
            for device in list_devices_of(entry.placement):
                self._promises.setdefault(device, []).append(promise)
        self._arrays = Counter(
            state.jobs[job_id].array for job_id in self._numbers if job_id in state.jobs
        )
        self._order: list[str] | None = None  # of jobs that wait for devices, once looked for

    def explain_wait(self, job: Job) -> str:
        """Return why the job waits, as text; the stored reason of a job that does not wait for
        devices.
        """
        state = self._state
        index = self._index
        if not _waits_only_for_devices(job, state):
            return describe_status(job)
        if not state.nodes and job.pending is Pending.DEVICES:
            return format_waiting_sentence(Pending.NODES_AWAY, ())
        if not state.nodes:
            return describe_status(job)
        promised = Counter(
            {job.array: 1} if job.id in self._numbers else {}
        )  # what is promised to the job itself
        if limited := find_array_wait(index, job, self._arrays - promised):
            return format_waiting_sentence(limited.code, limited.facts)
        waiting, offers = self._list_options(job)
        if not offers:
            outcome = explain_wait(state, index, waiting)
            if isinstance(outcome, Wait):
                return format_waiting_sentence(outcome.code, outcome.facts)
            return describe_status(job)
        blocked = self._list_blocked_options(waiting, offers)
        if not blocked:
            return self._describe_lack_of_devices(waiting, offers)
        startable = [entry for entry in blocked if entry.can_start]
        return (
            self._explain_unused_devices(waiting, startable)
            if startable
            else self._describe_obstacles(job, blocked[0])
        )

    def describe_start_and_remedies(self, job: Job) -> tuple[str, ...]:
        """Return sentences on when the job is expected to start, and what would start it now.

        Each remedy was tried on the state. Returns () for a job that does not wait for devices.
        Policies without reservations give only the time.
        """
        if not (_waits_only_for_devices(job, self._state) and self._state.nodes):
            return ()
        waiting, offers = self._list_options(job)
        blocked = self._list_blocked_options(waiting, offers)
        sentences = [self._describe_start(job, offers), self._describe_quotas(job)]
        if self._index.policy.reservations_max and not any(size.can_start for size in blocked):
            sentences += [
                self._describe_fewer_devices(job, offers),
                *(self._describe_remedies(waiting, blocked[0]) if blocked else ()),
            ]
        return tuple(sentence for sentence in sentences if sentence)

    def _list_options(self, job: Job) -> tuple[WaitingJob, Sequence[PricedOption]]:
        """Return (the job's queue entry, its options with their costs, cheapest first)."""
        waiting = self._index.make_queue_entry(job)
        return waiting, price_options(
            self._index, self._index.options.find_options(waiting), 0.0, job.spec
        )

    # what excludes what

    def _list_blocked_options(
        self, waiting: WaitingJob, priced_options: Sequence[PricedOption]
    ) -> list[BlockedOption]:
        """Return the options for which enough devices are free, fewest devices first, each with
        what keeps it from them.
        """
        free = {
            id(pool): devices for pool, devices in zip(self._index.pools, self._free, strict=True)
        }
        priced_options = sorted(priced_options, key=lambda offer: offer.entry.devices)
        hidden = self._find_devices_to_avoid(waiting)
        return [
            self._find_obstacles(waiting.job, offer, free[id(offer.pool)], hidden)
            for offer in priced_options
            if len(free[id(offer.pool)]) >= offer.entry.devices
        ]

    def _find_devices_to_avoid(self, waiting: WaitingJob) -> set[Device]:
        """Return the devices that the job must not use, because it ended there for no known reason.

        It is empty where no other devices could hold the job.
        """
        places = list_device_sets_to_avoid(waiting.job, self._state.nodes, self._state.at_s)
        if not places or not must_avoid_last_devices(waiting.job):
            return set()
        with self._index.hiding_devices(places[-1]):
            return set(places[-1]) if has_startable_option(self._index, waiting, 0.0) else set()

    def _find_obstacles(
        self,
        job: Job,
        priced_option: PricedOption,
        free_devices: Sequence[Device],
        avoided_devices: set[Device],
        ignored_obstacle: Obstacle | None = None,
    ) -> BlockedOption:
        """Return the option with the obstacles that keep it from free devices, except
        `ignored_obstacle`.
        """
        entry = priced_option.entry
        left = tuple(free_devices)
        end_s = self._state.at_s + entry.seconds
        open_until_s = self._state.at_s + entry.open_s
        excludes: Mapping[Obstacle, Callable[[Device], bool]] = {
            Obstacle.SET_ASIDE: lambda device: (
                device in self._aside or (device[0], None) in self._aside
            ),
            Obstacle.AVOIDED: lambda device: device in avoided_devices,
            Obstacle.DRAINED: lambda device: device[0] in self._state.drained,
            Obstacle.MAINTENANCE: lambda device: (
                self._find_next_maintenance(device[0])[0] < open_until_s
            ),
            Obstacle.MEMORY: lambda device: (
                self._nodes[device[0]].free_bytes[device[1]] < entry.least_bytes
            ),
            Obstacle.RESERVED: lambda device: (
                self._find_first_reservation_to_respect(device, job).start_s < end_s
            ),
        }
        obstacles: dict[Obstacle, tuple[Device, ...]] = {}
        for obstacle, is_excluded in excludes.items():
            excluded = tuple(filter(is_excluded, left))
            if excluded and obstacle is not ignored_obstacle:
                left = tuple(device for device in left if device not in excluded)
                obstacles[obstacle] = excluded
            if not _can_hold_gang(entry.shape, left):
                return BlockedOption(
                    priced_option, len(free_devices), obstacles, len(left) >= entry.devices
                )
        return BlockedOption(priced_option, len(free_devices), {}, scattered=False)

    def _find_next_maintenance(self, node_name: str) -> Window:
        """Return (begin, end) of a node's next maintenance; (infinity, infinity) without one."""
        windows = [
            window
            for window in self._index.closed.get(node_name, ())
            if node_name not in self._state.drained and (node_name, None) not in self._aside
        ]
        return windows[0] if windows else (inf, inf)

    def _find_first_reservation_to_respect(self, device: Device, job: Job) -> DeviceReservation:
        """Return the first reservation of the device for a job before this one, or for a guaranteed
        job.

        Where there is none, its start is infinity.
        """
        number = self._numbers.get(job.id, len(self._numbers))
        jobs = self._state.jobs
        before = [
            promise
            for promise in self._promises.get(device, ())
            if promise.number < number
            or (promise.job_id in jobs and jobs[promise.job_id].spec.guarantee is not None)
            if promise.job_id != job.id
        ]
        return min(before, default=DeviceReservation(inf, "", 0))

    # sentences

    def _describe_lack_of_devices(
        self, waiting: WaitingJob, priced_options: Sequence[PricedOption]
    ) -> str:
        """Return text that names the devices for which the job waits, and free ones that cannot
        hold it.
        """
        fewest: dict[str, int] = {}
        for offer in priced_options:
            name = offer.pool.group.hardware.device.name
            fewest[name] = min(fewest.get(name, offer.entry.devices), offer.entry.devices)
        needed = "waits for " + " or ".join(
            f"{count} free {name}" for name, count in fewest.items()
        )
        menus = {id(pool): menu for pool, menu in self._index.options.find_options(waiting)}
        small = [
            f"{len(free)} {pool.group.hardware.device.name}"
            for pool, free in zip(self._index.pools, self._free, strict=True)
            if free and isinstance(menus.get(id(pool)), Infeasible)
        ]
        if small:
            needed += f" ({' and '.join(small)} are free, but no plan of it fits there)"
        unreadable = describe_unreadable(
            node
            for pool in {id(offer.pool): offer.pool for offer in priced_options}.values()
            for node in pool.unreadable_nodes
        )
        return f"{needed}; cannot be read: {unreadable}" if unreadable else needed

    def _describe_obstacles(self, job: Job, blocked_option: BlockedOption) -> str:
        """Return a sentence that names everything that keeps the option from free devices."""
        begin = _describe_free_devices(blocked_option)
        clauses = [
            self._describe_obstacle(job, blocked_option, *pair)
            for pair in blocked_option.obstacles.items()
        ]
        reserved = blocked_option.obstacles.get(Obstacle.RESERVED, ())
        if len(blocked_option.obstacles) == 1 and len(reserved) == blocked_option.free:
            return f"{begin} and kept for {self._name_jobs_with_reservations(job, reserved)}"
        if blocked_option.scattered:
            share = max(blocked_option.offer.entry.shape.shares)
            nodes = blocked_option.offer.entry.devices // share
            where = "one node" if nodes == 1 else f"each of {nodes} nodes"
            clauses.append(
                f"{'the rest' if clauses else 'they'} are not together: it takes {share} on {where}"
            )
        return f"{begin}: {'; '.join(clauses)}"

    def _describe_obstacle(
        self, job: Job, blocked_option: BlockedOption, obstacle: Obstacle, devices: Sequence[Device]
    ) -> str:
        """Return a clause on one obstacle, and on the devices that it excludes."""
        nodes = join_first_words(dict.fromkeys(node for node, _ in devices), NAMES_MAX)
        match obstacle:
            case Obstacle.SET_ASIDE:
                until_s = min(
                    until_s
                    for place, until_s in self._aside.items()
                    if place in devices or place[1] is None
                )
                until = self._format_time(until_s)
                return f"{len(devices)} on {nodes} set aside until {until}, as attempts ended there"
            case Obstacle.AVOIDED:
                return f"it ended on {len(devices)} of them, on {nodes}, for no known reason"
            case Obstacle.DRAINED:
                several = len({node for node, _ in devices}) > 1
                return f"{nodes} {'take' if several else 'takes'} nothing new"
            case Obstacle.MAINTENANCE if all(
                self._find_next_maintenance(node)[0] == -inf for node, _ in devices
            ):
                until_s = min(self._find_next_maintenance(node)[1] for node, _ in devices)
                verb = "are" if "," in nodes else "is"
                return f"{nodes} {verb} in maintenance until {self._format_time(until_s)}"
            case Obstacle.MAINTENANCE:
                return format_too_late_for_maintenance(
                    make_maintenance_facts(blocked_option.offer.entry, nodes)
                )
            case Obstacle.MEMORY:
                needed = format_bytes(blocked_option.offer.entry.least_bytes)
                return f"other processes leave less than its {needed} on {len(devices)} of them, on {nodes}"
            case Obstacle.RESERVED:
                count = len(devices)
                verb = "is" if count == 1 else "are"
                return f"{count} of them {verb} kept for {self._name_jobs_with_reservations(job, devices)}"

    def _name_jobs_with_reservations(self, job: Job, devices: Iterable[Device]) -> str:
        """Return the names of the jobs for which these devices are reserved; the first one with its
        start time.
        """
        promises = sorted(
            {self._find_first_reservation_to_respect(device, job)[:2] for device in devices}
        )
        start_s, first = promises[0]
        others = [job_id for _, job_id in promises[1:]]
        more = f", and for {join_first_words(others, NAMES_MAX)}" if others else ""
        return f"{first}, which starts about {self._format_time(start_s)}{more}"

    def _explain_unused_devices(
        self, waiting: WaitingJob, startable_options: Sequence[BlockedOption]
    ) -> str:
        """Return why a job leaves free devices unused: its start window, the queue's order, or a
        better later start.
        """
        state = self._state
        spec = waiting.job.spec
        at_s = self._state.at_s
        opening = make_earliest_start_function(
            self._index, waiting, [blocked.offer for blocked in startable_options], at_s, inf
        )
        times_s = [(opening(blocked.offer, at_s), blocked) for blocked in startable_options]
        start_s, blocked = min(times_s, key=lambda pair: pair[0])
        needed = blocked.offer.entry.devices
        device = blocked.offer.pool.group.hardware.device.name
        if start_s > at_s and spec.start_window is not None:
            return format_waiting_sentence(
                Pending.START_WINDOW, make_start_window_facts(spec, start_s)
            )
        if start_s > at_s:
            return format_waiting_sentence(
                Pending.DEVICES, (("devices", needed), ("device", device))
            )
        if (
            self._index.policy.reservations_max == 0
            and (before := self._describe_earlier_job(waiting)) is not None
        ):
            return f"{_describe_free_devices(blocked)}; the order {state.policy.order} {before}"
        begin = f"could start on {needed} {device}, but"
        if (number := self._numbers.get(waiting.job.id)) is None:
            return f"{begin} waits for more devices or faster ones, on which it ends sooner"
        reservation = state.reservations[number]
        count = count_devices(reservation.placement)
        start = self._format_time(reservation.start_s)
        return f"{begin} takes {count} from about {start} on, with which it ends sooner"

    def _describe_earlier_job(self, waiting: WaitingJob) -> str | None:
        """Return text that names the job which starts before this one; None if this one is the
        first.

        It is for policies without reservations. It looks at every job once, and only where a job
        waits beside free devices.
        """
        if self._order is None:
            jobs = [entry.job for entry, _ in make_index(self._state).policy.iterate_in_order()]
            self._order = [
                job.id for job in jobs if not find_array_wait(self._index, job, self._arrays)
            ]
        if not self._index.policy.lets_later_jobs_overtake(waiting):
            return (
                None if self._order[0] == waiting.job.id else f"starts none before {self._order[0]}"
            )
        return None if waiting.job.id in self._order else "keeps them for jobs that come before it"

    # what would help

    def _describe_start(self, job: Job, priced_options: Sequence[PricedOption]) -> str:
        """Return a sentence on when the job is expected to start, on which nodes, and after which
        jobs end; "" if unknown.
        """
        state = self._state
        number = self._numbers.get(job.id)
        if number is not None:
            start_s = state.reservations[number].start_s
            placement = state.reservations[number].placement
            begin = "It starts about"
            bound = ""
        else:
            slots = [
                (slot.start_s, offer.pool.choose_slot_devices(slot, offer.entry.least_bytes))
                for offer in priced_options
                if (slot := find_start_slot(offer, state.at_s)) is not None
                and slot.start_s > state.at_s
            ]
            if not slots:
                return ""
            start_s, placement = min(slots, key=lambda slot: slot[0])
            begin = "It starts"
            bound = " at the earliest"
        devices = list_devices_of(placement)
        ends = dict.fromkeys(self._holders[device] for device in devices if device in self._holders)
        after = f", after the end of {join_first_words(ends, NAMES_MAX)}" if ends else ""
        nodes = join_first_words((part.node for part in placement), NAMES_MAX)
        return f"{begin} {self._format_time(start_s)}{bound}, on {len(devices)} of {nodes}{after}."

    def _describe_quotas(self, job: Job) -> str:
        """Return a sentence on teams that come first since they use less than their quotas; ""
        without any.
        """
        policy = self._state.policy
        state = self._state
        if not policy.has_quotas:
            return ""
        devices = count_devices_by_team(policy, self._index.running.values())
        own_team = policy.find_team(job.user)
        waiting = {
            policy.find_team(other.user).name
            for other in state.jobs.values()
            if _waits_only_for_devices(other, state)
        }
        below = [
            team
            for team in policy.teams
            if team.name in waiting and devices[team.name] < team.quota
        ]
        others = [
            f"{team.name} ({devices[team.name]} of {team.quota})"
            for team in below
            if team.name != own_team.name
        ]
        if not others or own_team in below:
            return ""
        count = devices[own_team.name]
        first = join_first_words(others, NAMES_MAX)
        return f"Its team {own_team.name} holds {count} of a quota of {own_team.quota}; first come {first}."

    def _describe_fewer_devices(self, job: Job, priced_options: Sequence[PricedOption]) -> str:
        """Return a sentence on how many devices below the job's `gpus.min` would let it start now;
        "" if none would.
        """
        least = job.spec.gpus.min
        if least == 1 or not priced_options or job.spec.guarantee is not None:
            return ""
        gpus = job.spec.gpus.model_copy(update={"min": 1, "max": least - 1})
        smaller = replace(job, spec=job.spec.model_copy(update={"gpus": gpus}))
        waiting, sizes = self._list_options(smaller)
        opening = make_earliest_start_function(self._index, waiting, sizes, self._state.at_s, inf)
        counts = [
            size.offer.entry.devices
            for size in self._list_blocked_options(waiting, sizes)
            if size.can_start and opening(size.offer, self._state.at_s) <= self._state.at_s
        ]
        return f"With `gpus: {max(counts)}` it could start now." if counts else ""

    def _describe_remedies(
        self, waiting: WaitingJob, blocked_option: BlockedOption
    ) -> Iterator[str]:
        """Yield sentences on changes that would let the job start now on the free devices; each was
        tried on the state.
        """
        job = waiting.job
        offer = blocked_option.offer
        at_s = self._state.at_s
        entry = offer.entry
        pool = offer.pool
        free = self._free[self._index.pools.index(pool)]
        hidden = self._find_devices_to_avoid(waiting)

        def starts(entry: SizeOption, lifted: Obstacle | None = None) -> bool:
            changed = offer._replace(entry=entry)
            is_open = (
                make_earliest_start_function(self._index, waiting, [changed], at_s, inf)(
                    changed, at_s
                )
                <= at_s
            )
            return is_open and self._find_obstacles(job, changed, free, hidden, lifted).can_start

        begins = {self._find_next_maintenance(node)[0] for node, _ in free} | {
            self._find_first_reservation_to_respect(device, job).start_s for device in free
        }
        least_s = at_s + pool.launch_cost_s
        most_s = at_s + max(entry.seconds, entry.open_s)
        for end_s in sorted((end_s for end_s in begins if least_s < end_s < most_s), reverse=True):
            length_s = end_s - at_s
            if starts(replace(entry, seconds=length_s, open_s=length_s)):
                length = f"this one takes {format_seconds(entry.seconds)}"
                if not entry.is_known:
                    length = "how long this one takes is not known, and `time_limit` bounds it"
                yield f"A run that ends by {self._format_time(end_s)} could start now: {length}."
                break
        rooms = sorted(
            {self._nodes[node].free_bytes[device] for node, device in free}, reverse=True
        )
        room = next(
            (
                room
                for room in rooms
                if 0 < room < entry.least_bytes and starts(replace(entry, least_bytes=room))
            ),
            0,
        )
        if room:
            needed = format_bytes(entry.least_bytes)
            yield f"A plan that needs {format_bytes(room)} on a device could start now: this one needs {needed}."
        for obstacle in (Obstacle.SET_ASIDE, Obstacle.DRAINED):
            if obstacle in blocked_option.obstacles and starts(entry, obstacle):
                nodes = join_first_words(
                    dict.fromkeys(node for node, _ in blocked_option.obstacles[obstacle]), NAMES_MAX
                )
                yield f"It could start now after `orc drain NODE --undo` of {nodes}."
        windows = {
            self._find_next_maintenance(node)[1]: node
            for node, _ in blocked_option.obstacles.get(Obstacle.MAINTENANCE, ())
        }
        yield from (
            f"The maintenance of {node} ends {self._format_time(end_s)}."
            for end_s, node in sorted(windows.items())[:1]
        )

    def _format_time(self, at_s: float) -> str:
        return format_local_time(at_s, self._zone)


def _waits_only_for_devices(job: Job, state: State) -> bool:
    """Return whether nothing but a lack of devices, or other jobs of its array, keeps the job from
    starting.
    """
    return waits_for_devices(job) and job.not_before_s <= state.at_s


def _describe_free_devices(blocked_option: BlockedOption) -> str:
    """Return a clause such as `3 a100-80gb are free`."""
    device = blocked_option.offer.pool.group.hardware.device.name
    return f"{blocked_option.free} {device} {'is' if blocked_option.free == 1 else 'are'} free"


def _can_hold_gang(shape: GangShape, devices: Iterable[Device]) -> bool:
    """Return whether these devices suffice for the job's ranks: equally many on each of enough
    nodes.
    """
    counts = Counter(node for node, _ in devices)
    return any(
        sum(count >= share for count in counts.values()) >= shape.devices // share
        for share in shape.shares
    )
