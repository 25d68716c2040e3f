"""When the devices of a group of equal nodes are free: after running attempts, reservations and
maintenance.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from math import inf
from typing import NamedTuple

from orchestrator.scheduling.base.node_groups import NodeGroup
from orchestrator.scheduling.base.shape import GangShape
from orchestrator.specs.attempt import NodeDevices, Placement
from orchestrator.specs.cluster import Node, Window
from orchestrator.specs.group_values import group_values

IDLE = -inf  # the time since which an unheld device is free

_Able = tuple[int, tuple[int, ...]]  # a node's number, and its usable devices


@dataclass(slots=True, eq=False)
class _FreeTimes:
    """For each node, the time from which enough of its devices are free for good; by node, and
    sorted.

    Enough is a number per node (`share`), which the owner of the object knows.
    """

    by_node: list[float]
    order: list[tuple[float, int]]
    unread: set[int]  # nodes that have changed since

    def copy(self) -> _FreeTimes:
        """Return a copy that may be changed without changing this object."""
        return _FreeTimes(self.by_node[:], self.order[:], set(self.unread))


@dataclass(slots=True, eq=False)
class _DeviceTimes:
    """For each device of one node: when it becomes free for good, and when it is reserved next."""

    free_s: list[float]  # when it is free for good, but for what is promised for later
    next_s: list[float]  # when it is promised next


class _Promise(NamedTuple):
    """A reservation of some devices of one node from one time to another."""

    start_s: float
    end_s: float
    devices: tuple[int, ...]
    is_later: bool  # they are idle before, and may be promised to others


class StartSlot(NamedTuple):
    """A time at which a job can start, and the nodes for it.

    From `start_s` on, `share` devices of each node in `nodes` are free for `seconds` seconds.
    """

    start_s: float
    seconds: float
    share: int
    nodes: tuple[int, ...]  # numbers in the pool


class ClosingNode(NamedTuple):
    """A node with idle devices that is, or soon will be, closed to attempts for a maintenance or a
    drain.
    """

    name: str
    closes_s: float  # minus infinity: it is closed
    idle_devices: int


class AvailabilityProfile:
    """The devices of a group of equal nodes (a pool), with the times at which each device is free.

    A device is free for good after its running attempt and its reservations. Later reservations
    leave it free before them. All nodes are searched at once in sorted lists, which each change
    keeps up to date. Nodes have numbers: their positions in the group.
    """

    def __init__(self, node_group: NodeGroup) -> None:
        """Start with every device idle and nothing reserved."""
        self.group = node_group
        self.names = [node.name for node in node_group.nodes]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.devices_per_node = node_group.hardware.devices_per_node
        self.launch_cost_s = max(node.launch_cost_s for node in node_group.nodes)
        count = len(self.names)
        self._until_s = [[IDLE] * self.devices_per_node for _ in range(count)]
        self._idle = [self.devices_per_node] * count
        self._by_idle: list[list[int]] = [[] for _ in range(self.devices_per_node + 1)]
        self._by_idle[self.devices_per_node] = list(range(count))
        self._ends_s: list[float] = []  # of every device that is held, soonest first
        self.idle = count * self.devices_per_node
        self._promised: dict[int, list[_Promise]] = {}  # by node
        self._later: dict[int, list[_Promise]] = {}  # those of them before which devices are idle
        self._closed: dict[int, tuple[Window, ...]] = {}  # by node
        self._has_racks = len({node.rack for node in node_group.nodes}) > 1
        self._futures: dict[
            int, _DeviceTimes
        ] = {}  # of nodes with promises or maintenance, as far as asked
        self._when: dict[int, _FreeTimes] = {}  # by share
        self._unpromised: dict[
            int, _FreeTimes
        ] = {}  # the same, as it was before anything was promised
        self._changed_since: set[int] = set()  # nodes on which it is otherwise by now
        self._open_until_s: dict[GangShape, float] = {}
        self._room_bytes: int | None = None  # once asked
        self.update_nodes(node_group.nodes)

    # what is

    def has_bytes_on_every_device(self, least_bytes: int) -> bool:
        """Return whether every device would have `least_bytes` free if none of our attempts ran."""
        if least_bytes <= self._least_free_bytes:
            return True
        if self._room_bytes is None:
            self._room_bytes = min(
                self.compute_usable_bytes(number, device)
                for number in range(len(self.names))
                for device in range(self.devices_per_node)
            )
        return least_bytes <= self._room_bytes

    def compute_usable_bytes(self, node_number: int, device_index: int) -> int:
        """Return the bytes that a new attempt could use on one device if our attempt there had
        ended.
        """
        if self._until_s[node_number][device_index] != IDLE:
            return self.group.hardware.device.memory
        return self._free_bytes[node_number][device_index]

    def get_free_bytes(self, node_name: str, device_index: int) -> int:
        """Return the free bytes of one device as last reported."""
        return self._free_bytes[self.numbers[node_name]][device_index]

    # what changes

    def update_nodes(self, nodes: Sequence[Node]) -> None:
        """Take over newly reported free bytes and unreadable devices; `nodes` are those of the
        group, in the same order.
        """
        self.unreadable_nodes = [node for node in nodes if node.unreadable]
        self.unreadable = {
            (node.name, device) for node in self.unreadable_nodes for device in node.unreadable
        }
        self._free_bytes = [node.free_bytes for node in nodes]
        self._least_free_bytes = min(min(free_bytes) for free_bytes in self._free_bytes)
        self._room_bytes = None

    def occupy(self, node_name: str, device_indices: Iterable[int], expected_end_s: float) -> None:
        """Mark these devices of a node as busy until the expected end of their attempt, in seconds
        since 1970.
        """
        self._set_busy_until(node_name, device_indices, expected_end_s)

    def vacate(self, node_name: str, device_indices: Iterable[int]) -> None:
        """Mark these devices of a node as idle: no attempt runs there."""
        self._set_busy_until(node_name, device_indices, IDLE)

    def count_free_before(self, node_name: str, device_indices: Iterable[int], at_s: float) -> int:
        """Return how many of these devices are free for good before `at_s`; reservations for later
        times are ignored.
        """
        number = self.numbers.get(node_name)
        if number is None:
            return 0
        free_s = self._list_device_free_times(number)
        return sum([free_s[device] < at_s for device in device_indices])

    def count_idle_devices(self, node_name: str) -> int:
        """Return on how many devices of this node no attempt runs."""
        return self._idle[self.numbers[node_name]]

    def estimate_attempts_end_at_s(self, node_name: str, device_indices: Iterable[int]) -> float:
        """Return when the last of the attempts on these devices of a node is expected to end, in
        seconds since 1970.

        It is minus infinity where no attempt runs there.
        """
        return max([self._until_s[self.numbers[node_name]][device] for device in device_indices])

    def reserve(
        self,
        node_name: str,
        device_indices: tuple[int, ...],
        start_s: float,
        end_s: float,
        *,
        is_usable_before: bool,
    ) -> None:
        """Reserve these devices of a node from `start_s` to `end_s` (seconds since 1970), so that
        nothing else runs there then.

        With `is_usable_before`, other jobs may still use the devices until `start_s`.
        """
        number = self.numbers.get(node_name)
        if number is None:
            return
        if not self._promised:
            self._unpromised = {share: times.copy() for share, times in self._when.items()}
        future = self._find_device_times(number)
        promise = _Promise(start_s, end_s, device_indices, is_usable_before)
        self._promised.setdefault(number, []).append(promise)
        if is_usable_before:
            insort(self._later.setdefault(number, []), promise)
        free_s = future.free_s
        next_s = future.next_s
        for device in device_indices:
            if free_s[device] < end_s and not is_usable_before:
                free_s[device] = end_s
            if next_s[device] > start_s:
                next_s[device] = start_s
        self._mark_node_changed(number)

    def clear_reservations(self) -> None:
        """Drop all reservations of this pool."""
        if not self._promised:
            return
        for number in self._promised:
            self._futures.pop(number, None)
        self._promised.clear()
        self._later.clear()
        self._open_until_s.clear()
        self._when = self._unpromised
        self._unpromised = {}
        for times in self._when.values():
            times.unread |= self._changed_since
        self._changed_since.clear()

    def set_closed_windows(self, windows_by_node: Mapping[str, tuple[Window, ...]]) -> None:
        """Close the named nodes to attempts in these windows (begin, end), and open all other
        nodes.

        Times are in seconds since 1970. The begin is minus infinity for a node that is closed now.
        """
        before = self._closed
        self._closed = {
            number: windows_by_node[name]
            for name, number in self.numbers.items()
            if name in windows_by_node
        }
        for number in {*before, *self._closed}:
            self._drop_cached_times(number)

    # what can be

    def find_runnable_until_s(self, shape: GangShape) -> float:
        """Return until when a gang (all ranks of a job) of this shape could run if it started now.

        The time is in seconds since 1970; minus infinity if it cannot start now.
        """
        if self.idle < shape.devices:
            return -inf
        if shape not in self._open_until_s:
            self._open_until_s[shape] = max(
                self._find_idle_devices_usable_until_s(shape.devices // share, share)
                for share in shape.shares
            )
        return self._open_until_s[shape]

    def find_devices_now(
        self,
        shape: GangShape,
        free_until_s: float,
        least_bytes: int,
        open_until_s: float | None = None,
    ) -> Placement | None:
        """Return devices with `least_bytes` each that are free from now to `free_until_s`; None
        where there are too few.

        Their nodes stay open until `open_until_s`; None means `free_until_s`. A job that fits on
        one node gets the fullest such node. A larger one gets as few nodes as possible, and of
        these the ones in as few racks as possible.
        """
        crowded = not self.has_bytes_on_every_device(least_bytes)
        if open_until_s is None:
            open_until_s = free_until_s
        for share in shape.shares:
            wanted = shape.devices // share
            able = self._list_usable_nodes(
                share, free_until_s, least_bytes if crowded else 0, open_until_s
            )
            chosen = (
                self._choose_nodes_in_fewest_racks([*able], wanted)
                if wanted > 1 and self._has_racks
                else [*islice(able, wanted)]
            )
            if len(chosen) == wanted:
                return tuple(
                    NodeDevices(node=self.names[n], devices=devices)
                    for n, devices in sorted(chosen)
                )
        return None

    def find_devices_without_attempt(
        self, attempt_placement: Placement, shape: GangShape, free_until_s: float, least_bytes: int
    ) -> Placement | None:
        """Return devices as `find_devices_now` would if the attempt on `attempt_placement` had
        ended.
        """
        until = {part.node: self._until_s[self.numbers[part.node]][:] for part in attempt_placement}
        free_bytes = self._free_bytes
        self._free_bytes = [*self._free_bytes]
        for part in attempt_placement:
            number = self.numbers[part.node]
            memory = self.group.hardware.device.memory
            self._free_bytes[number] = tuple(
                memory if device in part.devices else free
                for device, free in enumerate(free_bytes[number])
            )
            # an attempt that stops on a device that the driver cannot read leaves it closed
            self.vacate(
                part.node,
                [device for device in part.devices if (part.node, device) not in self.unreadable],
            )
        placement = self.find_devices_now(shape, free_until_s, least_bytes)
        self._free_bytes = free_bytes
        for part in attempt_placement:
            for device in part.devices:
                self.occupy(part.node, (device,), until[part.node][device])
        return placement

    def has_enough_devices_when_idle(self, shape: GangShape, least_bytes: int) -> bool:
        """Return whether enough devices would have `least_bytes` free for this shape if none of our
        attempts ran.
        """
        if self.has_bytes_on_every_device(least_bytes):
            return True
        roomy = [
            sum(
                self.compute_usable_bytes(number, device) >= least_bytes
                for device in range(self.devices_per_node)
            )
            for number in range(len(self.names))
        ]
        return any(
            sum(count >= share for count in roomy) >= shape.devices // share
            for share in shape.shares
        )

    def find_earliest_slot(
        self,
        shape: GangShape,
        earliest_s: float,
        duration_s: float,
        least_bytes: int,
        open_duration_s: float | None = None,
    ) -> StartSlot | None:
        """Return the first slot, not before `earliest_s`, in which enough devices are free for
        `duration_s`; None for never.

        Its nodes stay open for `open_duration_s` seconds; None means `duration_s`. The slot lies
        before the closing of its nodes or a later reservation if there is time enough, else after
        it.
        """
        best: StartSlot | None = None
        if open_duration_s is None:
            open_duration_s = duration_s
        for share in shape.shares:
            wanted = shape.devices // share
            order = self._find_first_usable_times_and_nodes(
                share, wanted, earliest_s, duration_s, least_bytes, open_duration_s
            )
            if (
                len(order) < wanted or order[-1][0] == inf
            ):  # never: no time is known at which a lost node comes back
                continue
            start_s = max(order[-1][0], earliest_s)
            if best is None or start_s < best.start_s:
                best = StartSlot(start_s, duration_s, share, tuple([number for _, number in order]))
        return best

    def choose_slot_devices(self, slot: StartSlot, least_bytes: int) -> Placement:
        """Return the devices for the slot: on each of its nodes those that become free first."""
        placement = []
        has_room = self.has_bytes_on_every_device(least_bytes)
        for number in slot.nodes:
            able: Iterable[int] = range(self.devices_per_node)
            if not has_room:
                able = (
                    device
                    for device in able
                    if self.compute_usable_bytes(number, device) >= least_bytes
                )
            if number in self._later:
                begun = slot.start_s
                able = (
                    device
                    for device in able
                    if self._find_first_unreserved_s(number, device, begun, slot.seconds) == begun
                )
            free_from = self._list_device_free_times(number).__getitem__
            first = (
                [min(able, key=free_from)]
                if slot.share == 1
                else sorted(able, key=free_from)[: slot.share]
            )
            placement.append(NodeDevices(node=self.names[number], devices=tuple(sorted(first))))
        return tuple(placement)

    def list_closing_nodes(self, before_s: float) -> list[ClosingNode]:
        """Return the nodes with idle devices that are closed now or close before `before_s`."""
        return [
            ClosingNode(self.names[number], windows[0][0], self._idle[number])
            for number, windows in self._closed.items()
            if self._idle[number] and windows[0][0] < before_s
        ]

    def find_held_at_most_from_s(self, held_max: float) -> float:
        """Return when running attempts will hold no more than `held_max` devices, in seconds since
        1970.

        Minus infinity means that they hold no more now. Unreadable devices do not count.
        """
        others = len(self._ends_s) - self.idle_unreadable_count - max(0, int(held_max))
        return self._ends_s[others - 1] if others > 0 else -inf

    @property
    def has_closed_nodes(self) -> bool:
        """Whether any node of the pool is closed to attempts now, or will close at a known time."""
        return bool(self._closed)

    @property
    def idle_unreadable_count(self) -> int:
        """Number of devices that run no attempt but that the driver cannot read."""
        return sum(
            [self._until_s[self.numbers[name]][device] == inf for name, device in self.unreadable]
        )

    # how it is kept

    def _set_busy_until(
        self, node_name: str, device_indices: Iterable[int], until_s: float
    ) -> None:
        """Mark these devices of a node as busy until this time, or as idle for the time IDLE."""
        number = self.numbers.get(node_name)
        if number is None:
            return  # a node that is gone
        until = self._until_s[number]
        idle = self._idle[number]
        for device in device_indices:
            if device < len(until):
                self._idle[number] += (until_s == IDLE) - (until[device] == IDLE)
                if until[device] != IDLE:
                    del self._ends_s[bisect_left(self._ends_s, until[device])]
                if until_s != IDLE:
                    insort(self._ends_s, until_s)
                until[device] = until_s
        if self._idle[number] != idle:
            line = self._by_idle[idle]
            del line[bisect_left(line, number)]
            insort(self._by_idle[self._idle[number]], number)
            self.idle += self._idle[number] - idle
        self._room_bytes = None
        self._drop_cached_times(number)

    def _drop_cached_times(self, node_number: int) -> None:
        """Drop a node's cached times, since its attempts, closings or readable devices changed."""
        self._futures.pop(node_number, None)
        if self._promised:
            self._changed_since.add(node_number)
        self._open_until_s.clear()
        self._mark_node_changed(node_number)

    def _mark_node_changed(self, node_number: int) -> None:
        """Record that free times of a node have to be sorted anew before they are used."""
        if self._idle[node_number]:
            self._open_until_s.clear()
        for times in self._when.values():
            times.unread.add(node_number)

    def _sort_free_times_and_nodes(
        self, count_per_node: int, least_bytes: int
    ) -> list[tuple[float, int]]:
        """Return (time from which `count_per_node` devices of a node are free for good, node's
        number), earliest first.

        Nodes with too few devices that have `least_bytes` are left out.
        """
        if not self.has_bytes_on_every_device(least_bytes):
            return sorted(
                (free_s[count_per_node - 1], number)
                for number in range(len(self.names))
                if len(free_s := self._list_free_times_of_roomy_devices(number, least_bytes))
                >= count_per_node
            )
        times = self._when.get(count_per_node)
        if times is None:
            by_node = [
                sorted(self._list_device_free_times(number))[count_per_node - 1]
                for number in range(len(self.names))
            ]
            order = sorted((free_s, number) for number, free_s in enumerate(by_node))
            times = self._when[count_per_node] = _FreeTimes(by_node, order, set())
        order = times.order
        for number in times.unread:
            old_s = times.by_node[number]
            new_s = sorted(self._list_device_free_times(number))[count_per_node - 1]
            if old_s != new_s:
                del order[bisect_left(order, (old_s, number))]
                insort(order, (new_s, number))
                times.by_node[number] = new_s
        times.unread.clear()
        return order

    def _find_first_usable_times_and_nodes(
        self,
        count_per_node: int,
        node_count: int,
        earliest_s: float,
        duration_s: float,
        least_bytes: int,
        open_duration_s: float,
    ) -> Sequence[tuple[float, int]]:
        """Return (time, node's number) of `node_count` nodes that are the first to be usable at the
        same time.

        Each then has `count_per_node` unreserved devices for `duration_s` seconds, and stays open
        for `open_duration_s`. Fewer nodes are returned where there are too few.
        """
        order = self._sort_free_times_and_nodes(count_per_node, least_bytes)
        first = order[:node_count]
        if not self._closed and not self._later:
            return first

        def first_usable_time_and_node(
            free_s: float, number: int, start_s: float
        ) -> tuple[float, int]:
            start_s = max(free_s, start_s)
            return self._find_first_usable_s(
                number, count_per_node, start_s, duration_s, least_bytes, open_duration_s
            ), number

        while (
            len(first) == node_count
        ):  # ends: each turn begins where a node first_usable_time_and_node, or is free, after the one before
            start_s = max(earliest_s, first[-1][0])
            if start_s == inf:
                return ()
            if all(
                first_usable_time_and_node(free_s, number, start_s)[0] == start_s
                for free_s, number in first
            ):
                break
            first = []
            for free_s, number in order:
                if len(first) == node_count and first[-1][0] <= max(free_s, start_s):
                    break
                insort(first, first_usable_time_and_node(free_s, number, start_s))
                del first[node_count:]
        return first

    def _find_first_usable_s(
        self,
        node_number: int,
        count_per_node: int,
        earliest_s: float,
        duration_s: float,
        least_bytes: int,
        open_duration_s: float,
    ) -> float:
        """Return the first time from which a node stays open, and has enough unreserved devices,
        for long enough.

        It is in seconds since 1970, not before `earliest_s`; infinity for never.
        """
        while True:  # ends: each turn begins where a closing or a promise ends
            for closes_s, opens_s in self._closed.get(node_number, ()):
                if closes_s < earliest_s + open_duration_s and earliest_s < opens_s:
                    earliest_s = opens_s
            if node_number not in self._later:
                return earliest_s
            begins = (
                self._find_first_unreserved_s(node_number, device, earliest_s, duration_s)
                for device in range(self.devices_per_node)
                if self._has_usable_bytes(node_number, device, least_bytes)
            )
            opens_s = sorted(begins)[count_per_node - 1]
            if opens_s in (earliest_s, inf):
                return opens_s
            earliest_s = opens_s

    def _find_first_unreserved_s(
        self, node_number: int, device_index: int, earliest_s: float, duration_s: float
    ) -> float:
        """Return the first time, not before `earliest_s`, from which a device is unreserved for
        `duration_s` seconds.
        """
        earliest_s = max(earliest_s, self._list_device_free_times(node_number)[device_index])
        for promise in self._later.get(node_number, ()):
            if (
                device_index in promise.devices
                and promise.start_s < earliest_s + duration_s
                and earliest_s < promise.end_s
            ):
                earliest_s = promise.end_s
        return earliest_s

    def _list_free_times_of_roomy_devices(self, node_number: int, least_bytes: int) -> list[float]:
        """Return when each device of a node with `least_bytes` is free for good, earliest first."""
        free_s = self._list_device_free_times(node_number)
        return sorted(
            s
            for device, s in enumerate(free_s)
            if self._has_usable_bytes(node_number, device, least_bytes)
        )

    def _has_usable_bytes(self, node_number: int, device_index: int, least_bytes: int) -> bool:
        """Return whether a device has `least_bytes` for a new attempt once this service's attempt on it
        has ended. Memory of other processes stays taken.
        """
        return (
            self.has_bytes_on_every_device(least_bytes)
            or self.compute_usable_bytes(node_number, device_index) >= least_bytes
        )

    def _list_device_free_times(self, node_number: int) -> list[float]:
        """Return when each device of a node is free for good, by device index."""
        future = self._futures.get(node_number)
        if future is not None:
            return future.free_s
        if node_number in self._promised or node_number in self._closed:
            return self._find_device_times(node_number).free_s
        return self._until_s[node_number]

    def _find_device_times(self, node_number: int) -> _DeviceTimes:
        """Return when each device of a node is free for good and when it is reserved next, from the
        cache if possible.
        """
        future = self._futures.get(node_number)
        if future is None:
            closed = self._closed.get(node_number, ())
            opens_s = closed[0][1] if closed and closed[0][0] == -inf else -inf
            until = self._until_s[node_number]
            free_s = [max(until_s, opens_s) for until_s in until] if closed else until[:]
            next_s = [inf] * self.devices_per_node
            for start_s, end_s, devices, is_later in self._promised.get(node_number, ()):
                for device in devices:
                    if not is_later:
                        free_s[device] = max(free_s[device], end_s)
                    next_s[device] = min(next_s[device], start_s)
            future = self._futures[node_number] = _DeviceTimes(free_s, next_s)
        return future

    def _find_idle_devices_usable_until_s(self, node_count: int, count_per_node: int) -> float:
        """Return until when some `node_count` nodes stay open with `count_per_node` idle,
        unreserved devices each.

        Minus infinity where there are not so many nodes now.
        """
        promised_s = []
        unpromised = 0
        for idle in range(count_per_node, self.devices_per_node + 1):
            for number in self._by_idle[idle]:
                if number not in self._promised and number not in self._closed:
                    unpromised += 1
                    if unpromised == node_count:
                        return inf
                elif number not in self._promised:
                    promised_s.append(self._find_next_closing_s(number))
                else:
                    both = zip(
                        self._find_device_times(number).next_s, self._until_s[number], strict=True
                    )
                    next_s = sorted((next_s for next_s, until_s in both if until_s == IDLE))
                    promised_s.append(
                        min(next_s[-count_per_node], self._find_next_closing_s(number))
                    )
        missing = node_count - unpromised
        return nlargest(missing, promised_s)[-1] if len(promised_s) >= missing else -inf

    def _find_next_closing_s(self, node_number: int) -> float:
        """Return when a node closes next; minus infinity if it is closed now, infinity if no
        closing is known.
        """
        windows = self._closed.get(node_number)
        return windows[0][0] if windows else inf

    def _list_usable_nodes(
        self, count_per_node: int, free_until_s: float, least_bytes: int, open_until_s: float
    ) -> Iterator[_Able]:
        """Yield (node's number, `count_per_node` of its devices) for each node that has so many
        usable until `free_until_s`.

        The node with the fewest idle devices comes first.
        """
        for idle in range(count_per_node, self.devices_per_node + 1):
            for number in self._by_idle[idle]:
                if self._find_next_closing_s(number) < open_until_s:
                    continue
                devices = self._list_usable_devices(number, free_until_s, least_bytes)
                if len(devices) >= count_per_node:
                    yield number, devices[:count_per_node]

    def _choose_nodes_in_fewest_racks(
        self, usable_nodes: Sequence[_Able], node_count: int
    ) -> list[_Able]:
        """Return `node_count` of these nodes (number, devices), in as few racks as possible.

        The largest racks are filled first; the rest goes to the smallest rack that holds it.
        """
        racks = group_values((self.group.nodes[entry[0]].rack, entry) for entry in usable_nodes)
        chosen: list[_Able] = []
        largest = sorted(racks.values(), key=len)
        while largest and len(chosen) < node_count:
            missing = node_count - len(chosen)
            enough = next((rack for rack in largest if len(rack) >= missing), largest[-1])
            largest.remove(enough)
            chosen += enough[:missing]
        return chosen

    def _list_usable_devices(
        self, node_number: int, free_until_s: float, least_bytes: int
    ) -> tuple[int, ...]:
        """Return the indices of a node's idle devices with `least_bytes` free and no reservation
        before `free_until_s`.
        """
        until = self._until_s[node_number]
        if node_number not in self._promised and not least_bytes:
            return tuple(device for device, until_s in enumerate(until) if until_s == IDLE)
        next_s = self._find_device_times(node_number).next_s
        return tuple(
            device
            for device, until_s in enumerate(until)
            if until_s == IDLE
            and next_s[device] >= free_until_s
            and self._free_bytes[node_number][device] >= least_bytes
        )
