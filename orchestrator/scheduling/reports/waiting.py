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
from orchestrator.scheduling.base.held_devices import job_id_by_held_device
from orchestrator.scheduling.base.sentences import (
    describe_status,
    too_late_sentence,
    waiting_sentence,
)
from orchestrator.scheduling.base.shape import GangShape
from orchestrator.scheduling.base.start_windows import window_facts
from orchestrator.scheduling.failures.places import device_sets_to_avoid, must_avoid_devices
from orchestrator.scheduling.options.job_options import Infeasible, SizeOption
from orchestrator.scheduling.policies.registry import index_of
from orchestrator.scheduling.queue.wait_queue import WaitingJob
from orchestrator.scheduling.scheduling_pass.decide import (
    PricedOption,
    Wait,
    explain_wait,
    find_array_wait,
    find_start_slot,
    has_startable_option,
    maintenance_facts,
    make_earliest_start,
    price_options,
)
from orchestrator.scheduling.scheduling_pass.index import waits_for_devices
from orchestrator.scheduling.scheduling_pass.quotas import count_devices_by_team
from orchestrator.specs.attempt import Device, device_count, list_devices_of
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
    """A reason why a job cannot use a free device, in the order of the checks."""

    SET_ASIDE = 1  # attempts ended there for no known reason
    AVOIDED = 2  # the job itself ended there, and goes on elsewhere
    DRAINED = 3
    MAINTENANCE = 4  # the job would not end before it
    MEMORY = 5  # that other processes hold
    RESERVED = 6  # for another job


class DeviceReservation(NamedTuple):
    """A reservation of one device: its start, its job, and its position in the state's list."""

    start_s: float
    job_id: str
    number: int


class BlockedOption(NamedTuple):
    """An option of a job, with the obstacles that keep it from the free devices of its pool."""

    offer: PricedOption
    free: int
    obstacles: Mapping[Obstacle, tuple[Device, ...]]
    scattered: bool  # enough devices are left, but not on suitable nodes

    @property
    def can_start(self) -> bool:
        """Whether no obstacle keeps the job from starting with this option."""
        return not self.obstacles and not self.scattered


class WaitExplainer:
    """Explains for the jobs of one state why they wait.

    Construction visits every job that holds devices. An object is not safe for use by several
    threads at once.
    """

    def __init__(self, state: State, zone: str = "UTC") -> None:
        """`zone` is the time zone of the times in sentences."""
        self._state = state
        self._zone = zone
        holding = [
            job
            for job in state.jobs.values()
            if any(not attempt.released for attempt in job.attempts)
        ]
        self._index = index_of(replace(state, jobs=Jobs(holding)))
        self._index.reserve(state.reservations)
        self._nodes = {node.name: node for node in state.nodes}
        self._holders = job_id_by_held_device(state)
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
        """Return why the job waits, as text; its stored reason if it does not wait for devices."""
        state = self._state
        index = self._index
        if not _waits_for_devices(job, state):
            return describe_status(job)
        if not state.nodes and job.pending is Pending.DEVICES:
            return waiting_sentence(Pending.NODES_AWAY, ())
        if not state.nodes:
            return describe_status(job)
        promised = Counter(
            {job.array: 1} if job.id in self._numbers else {}
        )  # what is promised to the job itself
        if limited := find_array_wait(index, job, self._arrays - promised):
            return waiting_sentence(limited.code, limited.facts)
        waiting, offers = self._list_options(job)
        if not offers:
            outcome = explain_wait(state, index, waiting)
            if isinstance(outcome, Wait):
                return waiting_sentence(outcome.code, outcome.facts)
            return describe_status(job)
        blocked = self._list_blocked_options(waiting, offers)
        if not blocked:
            return self._describe_lack(waiting, offers)
        startable = [entry for entry in blocked if entry.can_start]
        return (
            self._why_not_now(waiting, startable)
            if startable
            else self._describe_obstacles(job, blocked[0])
        )

    def list_remedies(self, job: Job) -> tuple[str, ...]:
        """Return sentences on when the job is expected to start, and what would start it now.

        Each remedy was tried on the state. Returns () for a job that does not wait for devices.
        Policies without reservations give only the time.
        """
        if not (_waits_for_devices(job, self._state) and self._state.nodes):
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
        """Return (the job's queue entry, all options with which it could run)."""
        waiting = self._index.make_queue_entry(job)
        return waiting, price_options(
            self._index, self._index.options.options_of(waiting), 0.0, job.spec
        )

    # what excludes what

    def _list_blocked_options(
        self, waiting: WaitingJob, offers: Sequence[PricedOption]
    ) -> list[BlockedOption]:
        """Return the options for which enough devices are free, with their obstacles, fewest
        devices first.
        """
        free = {
            id(pool): devices for pool, devices in zip(self._index.pools, self._free, strict=True)
        }
        offers = sorted(offers, key=lambda offer: offer.entry.devices)
        hidden = self._avoided_devices(waiting)
        return [
            self._find_obstacles(waiting.job, offer, free[id(offer.pool)], hidden)
            for offer in offers
            if len(free[id(offer.pool)]) >= offer.entry.devices
        ]

    def _avoided_devices(self, waiting: WaitingJob) -> set[Device]:
        """Return the devices that the job must not use, because it ended there for no known reason.

        They are empty where no others could hold the job.
        """
        places = device_sets_to_avoid(waiting.job, self._state.nodes, self._state.at_s)
        if not places or not must_avoid_devices(waiting.job):
            return set()
        with self._index.hiding_devices(places[-1]):
            return set(places[-1]) if has_startable_option(self._index, waiting, 0.0) else set()

    def _find_obstacles(
        self,
        job: Job,
        offer: PricedOption,
        free: Sequence[Device],
        hidden: set[Device],
        lifted: Obstacle | None = None,
    ) -> BlockedOption:
        """Return the option with the obstacles that exclude free devices; `lifted` is one to
        ignore.
        """
        entry = offer.entry
        left = tuple(free)
        end_s = self._state.at_s + entry.seconds
        open_until_s = self._state.at_s + entry.open_s
        excludes: Mapping[Obstacle, Callable[[Device], bool]] = {
            Obstacle.SET_ASIDE: lambda device: (
                device in self._aside or (device[0], None) in self._aside
            ),
            Obstacle.AVOIDED: lambda device: device in hidden,
            Obstacle.DRAINED: lambda device: device[0] in self._state.drained,
            Obstacle.MAINTENANCE: lambda device: self._window_of(device[0])[0] < open_until_s,
            Obstacle.MEMORY: lambda device: (
                self._nodes[device[0]].free_bytes[device[1]] < entry.least_bytes
            ),
            Obstacle.RESERVED: lambda device: self._first_reservation(device, job).start_s < end_s,
        }
        obstacles: dict[Obstacle, tuple[Device, ...]] = {}
        for obstacle, is_excluded in excludes.items():
            excluded = tuple(filter(is_excluded, left))
            if excluded and obstacle is not lifted:
                left = tuple(device for device in left if device not in excluded)
                obstacles[obstacle] = excluded
            if not _fits(entry.shape, left):
                return BlockedOption(offer, len(free), obstacles, len(left) >= entry.devices)
        return BlockedOption(offer, len(free), {}, scattered=False)

    def _window_of(self, node: str) -> Window:
        """Return the next maintenance of a node, (begin, end); (infinity, infinity) without one."""
        windows = [
            window
            for window in self._index.closed.get(node, ())
            if node not in self._state.drained and (node, None) not in self._aside
        ]
        return windows[0] if windows else (inf, inf)

    def _first_reservation(self, device: Device, job: Job) -> DeviceReservation:
        """Return the first reservation of the device that the job must respect.

        Those are the reservations of jobs before it, and of guaranteed jobs.
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

    def _describe_lack(self, waiting: WaitingJob, offers: Sequence[PricedOption]) -> str:
        """Return text that tells of which devices too few are free, and which free ones cannot hold
        the job.
        """
        fewest: dict[str, int] = {}
        for offer in offers:
            name = offer.pool.group.hardware.device.name
            fewest[name] = min(fewest.get(name, offer.entry.devices), offer.entry.devices)
        needed = "waits for " + " or ".join(
            f"{count} free {name}" for name, count in fewest.items()
        )
        menus = {id(pool): menu for pool, menu in self._index.options.options_of(waiting)}
        small = [
            f"{len(free)} {pool.group.hardware.device.name}"
            for pool, free in zip(self._index.pools, self._free, strict=True)
            if free and isinstance(menus.get(id(pool)), Infeasible)
        ]
        if small:
            needed += f" ({' and '.join(small)} are free, but no plan of it fits there)"
        unreadable = describe_unreadable(
            node
            for pool in {id(offer.pool): offer.pool for offer in offers}.values()
            for node in pool.unreadable_nodes
        )
        return f"{needed}; cannot be read: {unreadable}" if unreadable else needed

    def _describe_obstacles(self, job: Job, blocked: BlockedOption) -> str:
        begin = _are_free(blocked)
        clauses = [
            self._describe_obstacle(job, blocked, *pair) for pair in blocked.obstacles.items()
        ]
        if [*blocked.obstacles] == [Obstacle.RESERVED] and len(
            blocked.obstacles[Obstacle.RESERVED]
        ) == blocked.free:
            return f"{begin} and kept for {self._reserved_for(job, blocked.obstacles[Obstacle.RESERVED])}"
        if blocked.scattered:
            share = max(blocked.offer.entry.shape.shares)
            nodes = blocked.offer.entry.devices // share
            where = "one node" if nodes == 1 else f"each of {nodes} nodes"
            clauses.append(
                f"{'the rest' if clauses else 'they'} are not together: it takes {share} on {where}"
            )
        return f"{begin}: {'; '.join(clauses)}"

    def _describe_obstacle(
        self, job: Job, blocked: BlockedOption, obstacle: Obstacle, devices: Sequence[Device]
    ) -> str:
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
                self._window_of(node)[0] == -inf for node, _ in devices
            ):
                until_s = min(self._window_of(node)[1] for node, _ in devices)
                verb = "are" if "," in nodes else "is"
                return f"{nodes} {verb} in maintenance until {self._format_time(until_s)}"
            case Obstacle.MAINTENANCE:
                return too_late_sentence(maintenance_facts(blocked.offer.entry, nodes))
            case Obstacle.MEMORY:
                needed = format_bytes(blocked.offer.entry.least_bytes)
                return f"other processes leave less than its {needed} on {len(devices)} of them, on {nodes}"
            case Obstacle.RESERVED:
                count = len(devices)
                verb = "is" if count == 1 else "are"
                return f"{count} of them {verb} kept for {self._reserved_for(job, devices)}"

    def _reserved_for(self, job: Job, devices: Iterable[Device]) -> str:
        """Return the names of the jobs for which the devices are reserved; the first one has its
        start time.
        """
        promises = sorted({self._first_reservation(device, job)[:2] for device in devices})
        start_s, first = promises[0]
        others = [job_id for _, job_id in promises[1:]]
        more = f", and for {join_first_words(others, NAMES_MAX)}" if others else ""
        return f"{first}, which starts about {self._format_time(start_s)}{more}"

    def _why_not_now(self, waiting: WaitingJob, startable: Sequence[BlockedOption]) -> str:
        """Return why a job leaves free devices unused: its start window, the order, or a better
        later start.
        """
        state = self._state
        spec = waiting.job.spec
        at_s = self._state.at_s
        opening = make_earliest_start(
            self._index, waiting, [blocked.offer for blocked in startable], at_s, inf
        )
        times_s = [(opening(blocked.offer, at_s), blocked) for blocked in startable]
        start_s, blocked = min(times_s, key=lambda pair: pair[0])
        needed = blocked.offer.entry.devices
        device = blocked.offer.pool.group.hardware.device.name
        if start_s > at_s and spec.start_window is not None:
            return waiting_sentence(Pending.START_WINDOW, window_facts(spec, start_s))
        if start_s > at_s:
            return waiting_sentence(Pending.DEVICES, (("devices", needed), ("device", device)))
        if (
            self._index.policy.reservations_max == 0
            and (before := self._describe_earlier_job(waiting)) is not None
        ):
            return f"{_are_free(blocked)}; the order {state.policy.order} {before}"
        begin = f"could start on {needed} {device}, but"
        if (number := self._numbers.get(waiting.job.id)) is None:
            return f"{begin} waits for more devices or faster ones, on which it ends sooner"
        reservation = state.reservations[number]
        count = device_count(reservation.placement)
        start = self._format_time(reservation.start_s)
        return f"{begin} takes {count} from about {start} on, with which it ends sooner"

    def _describe_earlier_job(self, waiting: WaitingJob) -> str | None:
        """Return text that names the job which goes first; None if it is this one.

        For policies without reservations. It looks at every job once, and only where a job waits
        beside free devices.
        """
        if self._order is None:
            jobs = [entry.job for entry, _ in index_of(self._state).policy.in_order()]
            self._order = [
                job.id for job in jobs if not find_array_wait(self._index, job, self._arrays)
            ]
        if not self._index.policy.may_overtake(waiting):
            return (
                None if self._order[0] == waiting.job.id else f"starts none before {self._order[0]}"
            )
        return None if waiting.job.id in self._order else "keeps them for jobs that come before it"

    # what would help

    def _describe_start(self, job: Job, offers: Sequence[PricedOption]) -> str:
        """Return a sentence on when the job is expected to start, and after the ends of which jobs;
        "" if unknown.
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
                for offer in offers
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
        """Return a sentence on teams that come first since they hold less than their quotas; ""
        without any.
        """
        policy = self._state.policy
        state = self._state
        if not policy.has_quotas:
            return ""
        devices = count_devices_by_team(policy, self._index.running.values())
        own_team = policy.team_of(job.user)
        waiting = {
            policy.team_of(other.user).name
            for other in state.jobs.values()
            if _waits_for_devices(other, state)
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

    def _describe_fewer_devices(self, job: Job, offers: Sequence[PricedOption]) -> str:
        """Return a sentence on how many devices below `gpus.min` would let the job start now; "" if
        none.
        """
        least = job.spec.gpus.min
        if least == 1 or not offers or job.spec.guarantee is not None:
            return ""
        gpus = job.spec.gpus.model_copy(update={"min": 1, "max": least - 1})
        smaller = replace(job, spec=job.spec.model_copy(update={"gpus": gpus}))
        waiting, sizes = self._list_options(smaller)
        opening = make_earliest_start(self._index, waiting, sizes, self._state.at_s, inf)
        counts = [
            size.offer.entry.devices
            for size in self._list_blocked_options(waiting, sizes)
            if size.can_start and opening(size.offer, self._state.at_s) <= self._state.at_s
        ]
        return f"With `gpus: {max(counts)}` it could start now." if counts else ""

    def _describe_remedies(self, waiting: WaitingJob, blocked: BlockedOption) -> Iterator[str]:
        """Yield sentences on changes that would let the job start now on the free devices; each was
        tried.
        """
        job = waiting.job
        offer = blocked.offer
        at_s = self._state.at_s
        entry = offer.entry
        pool = offer.pool
        free = self._free[self._index.pools.index(pool)]
        hidden = self._avoided_devices(waiting)

        def starts(entry: SizeOption, lifted: Obstacle | None = None) -> bool:
            changed = offer._replace(entry=entry)
            is_open = (
                make_earliest_start(self._index, waiting, [changed], at_s, inf)(changed, at_s)
                <= at_s
            )
            return is_open and self._find_obstacles(job, changed, free, hidden, lifted).can_start

        begins = {self._window_of(node)[0] for node, _ in free} | {
            self._first_reservation(device, job).start_s for device in free
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
            if obstacle in blocked.obstacles and starts(entry, obstacle):
                nodes = join_first_words(
                    dict.fromkeys(node for node, _ in blocked.obstacles[obstacle]), NAMES_MAX
                )
                yield f"It could start now after `orc drain NODE --undo` of {nodes}."
        windows = {
            self._window_of(node)[1]: node
            for node, _ in blocked.obstacles.get(Obstacle.MAINTENANCE, ())
        }
        yield from (
            f"The maintenance of {node} ends {self._format_time(end_s)}."
            for end_s, node in sorted(windows.items())[:1]
        )

    def _format_time(self, at_s: float) -> str:
        return format_local_time(at_s, self._zone)


def _waits_for_devices(job: Job, state: State) -> bool:
    """Return whether only devices, or other jobs of its array, keep the job from starting."""
    return waits_for_devices(job) and job.not_before_s <= state.at_s


def _are_free(blocked: BlockedOption) -> str:
    device = blocked.offer.pool.group.hardware.device.name
    return f"{blocked.free} {device} {'is' if blocked.free == 1 else 'are'} free"


def _fits(shape: GangShape, devices: Iterable[Device]) -> bool:
    """Return whether these devices can hold the gang: equally many on each of enough nodes."""
    counts = Counter(node for node, _ in devices)
    return any(
        sum(count >= share for count in counts.values()) >= shape.devices // share
        for share in shape.shares
    )
