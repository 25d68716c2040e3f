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
    """The times from which `share` devices of a node are free for good: one per node, and the same
    sorted.
    """

    by_node: list[float]
    order: list[tuple[float, int]]
    unread: set[int]  # nodes that have changed since

    def copy(self) -> _FreeTimes:
        return _FreeTimes(self.by_node[:], self.order[:], set(self.unread))


@dataclass(slots=True, eq=False)
class _DeviceTimes:
    """When each device of a node becomes free, and when it is reserved next."""

    free_s: list[float]  # when it is free for good, but for what is promised for later
    next_s: list[float]  # when it is promised next


class _Promise(NamedTuple):
    """A reservation of devices of one node."""

    start_s: float
    end_s: float
    devices: tuple[int, ...]
    is_later: bool  # they are idle before, and may be promised to others


class StartSlot(NamedTuple):
    """A start time from which `share` devices on each of these nodes are free for `seconds`
    seconds.
    """

    start_s: float
    seconds: float
    share: int
    nodes: tuple[int, ...]  # numbers in the pool


class ClosingNode(NamedTuple):
    """A node with idle devices that closes for a maintenance or a drain."""

    name: str
    closes_s: float  # minus infinity: it is closed
    idle_devices: int


class AvailabilityProfile:
    """The pool of devices of equal nodes, with the times at which each device is free.

    A device is free for good after its running attempt and its reservations. Later reservations
    leave it free before them. All nodes are searched at once in sorted lists, which each change
    keeps up to date.
    """

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        self.names = [node.name for node in group.nodes]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.devices_per_node = group.hardware.devices_per_node
        self.launch_cost_s = max(node.launch_cost_s for node in group.nodes)
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
        self._has_racks = len({node.rack for node in group.nodes}) > 1
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
        self.update_nodes(group.nodes)

    # what is

    def has_bytes_on_every_device(self, least_bytes: int) -> bool:
        """Return whether every device would have `least_bytes` free if our own attempts had ended."""
        if least_bytes <= self._least_free_bytes:
            return True
        if self._room_bytes is None:
            self._room_bytes = min(
                self.usable_bytes(number, device)
                for number in range(len(self.names))
                for device in range(self.devices_per_node)
            )
        return least_bytes <= self._room_bytes

    def usable_bytes(self, number: int, device: int) -> int:
        """Return the bytes that a new attempt could use on one device, as if our own attempt there
        had ended.

        `number` is the node's position in the pool.
        """
        if self._until_s[number][device] != IDLE:
            return self.group.hardware.device.memory
        return self._free_bytes[number][device]

    def free_bytes(self, name: str, device: int) -> int:
        """Return the free bytes that were last reported for one device of the node `name`."""
        return self._free_bytes[self.numbers[name]][device]

    # what changes

    def update_nodes(self, nodes: Sequence[Node]) -> None:
        """Take over the free bytes of the same nodes, and which devices the driver cannot read."""
        self.unreadable_nodes = [node for node in nodes if node.unreadable]
        self.unreadable = {
            (node.name, device) for node in self.unreadable_nodes for device in node.unreadable
        }
        self._free_bytes = [node.free_bytes for node in nodes]
        self._least_free_bytes = min(min(free_bytes) for free_bytes in self._free_bytes)
        self._room_bytes = None

    def occupy(self, name: str, devices: Iterable[int], until_s: float) -> None:
        """Mark these devices of a node as busy until `until_s`, the expected end of their attempt."""
        self._set_busy_until(name, devices, until_s)

    def vacate(self, name: str, devices: Iterable[int]) -> None:
        """Mark these devices of a node as idle."""
        self._set_busy_until(name, devices, IDLE)

    def count_free_before(self, name: str, devices: Iterable[int], at_s: float) -> int:
        """Return how many of these devices are free before `at_s`; reservations for later are
        ignored.
        """
        number = self.numbers.get(name)
        if number is None:
            return 0
        free_s = self._device_free_times(number)
        return sum([free_s[device] < at_s for device in devices])

    def count_idle_devices(self, node: str) -> int:
        """Return the number of idle devices of one node."""
        return self._idle[self.numbers[node]]

    def attempts_end_at_s(self, name: str, devices: Iterable[int]) -> float:
        """Return when the attempts that run on these devices will all have ended, in seconds since
        1970.
        """
        return max([self._until_s[self.numbers[name]][device] for device in devices])

    def reserve(
        self, name: str, devices: tuple[int, ...], start_s: float, end_s: float, *, is_later: bool
    ) -> None:
        """Reserve these devices of a node from `start_s` to `end_s`, so that nothing else runs
        there then.

        With `is_later`, other jobs may still use the devices before `start_s`.
        """
        number = self.numbers.get(name)
        if number is None:
            return
        if not self._promised:
            self._unpromised = {share: times.copy() for share, times in self._when.items()}
        future = self._device_times(number)
        promise = _Promise(start_s, end_s, devices, is_later)
        self._promised.setdefault(number, []).append(promise)
        if is_later:
            insort(self._later.setdefault(number, []), promise)
        free_s = future.free_s
        next_s = future.next_s
        for device in devices:
            if free_s[device] < end_s and not is_later:
                free_s[device] = end_s
            if next_s[device] > start_s:
                next_s[device] = start_s
        self._mark_changed(number)

    def clear_reservations(self) -> None:
        """Drop all reservations."""
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

    def set_closed_windows(self, windows: Mapping[str, tuple[Window, ...]]) -> None:
        """Close the named nodes in these windows (begin, end), and open all other nodes.

        The begin is minus infinity for a node that is closed now.
        """
        before = self._closed
        self._closed = {
            number: windows[name] for name, number in self.numbers.items() if name in windows
        }
        for number in {*before, *self._closed}:
            self._forget_future(number)

    # what can be

    def could_run_until_s(self, shape: GangShape) -> float:
        """Return until when a gang of this shape could run if it started now; minus infinity if it
        cannot start.
        """
        if self.idle < shape.devices:
            return -inf
        if shape not in self._open_until_s:
            self._open_until_s[shape] = max(
                self._shares_open_until_s(shape.devices // share, share) for share in shape.shares
            )
        return self._open_until_s[shape]

    def find_devices_now(
        self, shape: GangShape, end_s: float, least_bytes: int, open_until_s: float | None = None
    ) -> Placement | None:
        """Return devices with `least_bytes` each that are free from now to `end_s`; None where
        there are too few.

        Their nodes stay open until `open_until_s`; None means `end_s`. A gang that fits one node
        goes to the fullest such node; a larger one to as few nodes as possible, and of these to as
        few racks as possible.
        """
        crowded = not self.has_bytes_on_every_device(least_bytes)
        if open_until_s is None:
            open_until_s = end_s
        for share in shape.shares:
            wanted = shape.devices // share
            able = self._able_nodes(share, end_s, least_bytes if crowded else 0, open_until_s)
            chosen = (
                self._in_fewest_racks([*able], wanted)
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
        self, attempt_placement: Placement, shape: GangShape, end_s: float, least_bytes: int
    ) -> Placement | None:
        """Return devices as `find_devices_now` does, as if the attempt on `attempt_placement` had
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
        placement = self.find_devices_now(shape, end_s, least_bytes)
        self._free_bytes = free_bytes
        for part in attempt_placement:
            for device in part.devices:
                self.occupy(part.node, (device,), until[part.node][device])
        return placement

    def can_ever_hold(self, shape: GangShape, least_bytes: int) -> bool:
        """Return whether enough devices would have `least_bytes` free if our own attempts had
        ended.
        """
        if self.has_bytes_on_every_device(least_bytes):
            return True
        roomy = [
            sum(
                self.usable_bytes(number, device) >= least_bytes
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
        from_s: float,
        seconds: float,
        least_bytes: int,
        open_s: float | None = None,
    ) -> StartSlot | None:
        """Return the first slot from `from_s` on in which enough devices are free for `seconds`;
        None if never.

        Its nodes stay open for `open_s` seconds; None means `seconds`. The slot ends before a node
        closes or a later reservation begins where there is time enough, and otherwise comes after
        it.
        """
        best: StartSlot | None = None
        if open_s is None:
            open_s = seconds
        for share in shape.shares:
            wanted = shape.devices // share
            order = self._find_open_nodes(share, wanted, from_s, seconds, least_bytes, open_s)
            if (
                len(order) < wanted or order[-1][0] == inf
            ):  # never: no time is known at which a lost node comes back
                continue
            start_s = max(order[-1][0], from_s)
            if best is None or start_s < best.start_s:
                best = StartSlot(start_s, seconds, share, tuple([number for _, number in order]))
        return best

    def choose_slot_devices(self, slot: StartSlot, least_bytes: int) -> Placement:
        """Return, for each node of the slot, the devices that become free first."""
        placement = []
        has_room = self.has_bytes_on_every_device(least_bytes)
        for number in slot.nodes:
            able: Iterable[int] = range(self.devices_per_node)
            if not has_room:
                able = (
                    device for device in able if self.usable_bytes(number, device) >= least_bytes
                )
            if number in self._later:
                begun = slot.start_s
                able = (
                    device
                    for device in able
                    if self._unreserved_from_s(number, device, begun, slot.seconds) == begun
                )
            free_from = self._device_free_times(number).__getitem__
            first = (
                [min(able, key=free_from)]
                if slot.share == 1
                else sorted(able, key=free_from)[: slot.share]
            )
            placement.append(NodeDevices(node=self.names[number], devices=tuple(sorted(first))))
        return tuple(placement)

    def list_closing_nodes(self, end_s: float) -> list[ClosingNode]:
        """Return the nodes with idle devices that are closed or will close before `end_s`."""
        return [
            ClosingNode(self.names[number], windows[0][0], self._idle[number])
            for number, windows in self._closed.items()
            if self._idle[number] and windows[0][0] < end_s
        ]

    def held_at_most_from_s(self, devices: float) -> float:
        """Return when running attempts will hold at most `devices` devices, in seconds since 1970.

        Minus infinity means that they hold no more now. Unreadable devices do not count.
        """
        others = len(self._ends_s) - self.idle_unreadable - max(0, int(devices))
        return self._ends_s[others - 1] if others > 0 else -inf

    @property
    def has_closed_nodes(self) -> bool:
        """Whether any node of the pool is closed or will close."""
        return bool(self._closed)

    @property
    def idle_unreadable(self) -> int:
        """Number of devices that the driver cannot read and on which no attempt runs."""
        return sum(
            [self._until_s[self.numbers[name]][device] == inf for name, device in self.unreadable]
        )

    # how it is kept

    def _set_busy_until(self, name: str, devices: Iterable[int], until_s: float) -> None:
        number = self.numbers.get(name)
        if number is None:
            return  # a node that is gone
        until = self._until_s[number]
        idle = self._idle[number]
        for device in devices:
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
        self._forget_future(number)

    def _forget_future(self, number: int) -> None:
        """Drop a node's cached times, since its attempts, closings or readable devices changed."""
        self._futures.pop(number, None)
        if self._promised:
            self._changed_since.add(number)
        self._open_until_s.clear()
        self._mark_changed(number)

    def _mark_changed(self, number: int) -> None:
        if self._idle[number]:
            self._open_until_s.clear()
        for times in self._when.values():
            times.unread.add(number)

    def _sort_by_free_time(self, share: int, least_bytes: int) -> list[tuple[float, int]]:
        """Return (time, node) from which `share` devices of a node are free for good, earliest
        first.

        Nodes with too few roomy devices are left out.
        """
        if not self.has_bytes_on_every_device(least_bytes):
            return sorted(
                (free_s[share - 1], number)
                for number in range(len(self.names))
                if len(free_s := self._free_times_with_bytes(number, least_bytes)) >= share
            )
        times = self._when.get(share)
        if times is None:
            by_node = [
                sorted(self._device_free_times(number))[share - 1]
                for number in range(len(self.names))
            ]
            order = sorted((free_s, number) for number, free_s in enumerate(by_node))
            times = self._when[share] = _FreeTimes(by_node, order, set())
        order = times.order
        for number in times.unread:
            old_s = times.by_node[number]
            new_s = sorted(self._device_free_times(number))[share - 1]
            if old_s != new_s:
                del order[bisect_left(order, (old_s, number))]
                insort(order, (new_s, number))
                times.by_node[number] = new_s
        times.unread.clear()
        return order

    def _find_open_nodes(
        self,
        share: int,
        wanted: int,
        from_s: float,
        seconds: float,
        least_bytes: int,
        open_s: float,
    ) -> Sequence[tuple[float, int]]:
        """Return (time, node) of the first `wanted` nodes that have `share` devices free for
        `seconds` together.
        """
        order = self._sort_by_free_time(share, least_bytes)
        first = order[:wanted]
        if not self._closed and not self._later:
            return first

        def opens(free_s: float, number: int, start_s: float) -> tuple[float, int]:
            start_s = max(free_s, start_s)
            return self._usable_from_s(number, share, start_s, seconds, least_bytes, open_s), number

        while (
            len(first) == wanted
        ):  # ends: each turn begins where a node opens, or is free, after the one before
            start_s = max(from_s, first[-1][0])
            if start_s == inf:
                return ()
            if all(opens(free_s, number, start_s)[0] == start_s for free_s, number in first):
                break
            first = []
            for free_s, number in order:
                if len(first) == wanted and first[-1][0] <= max(free_s, start_s):
                    break
                insort(first, opens(free_s, number, start_s))
                del first[wanted:]
        return first

    def _usable_from_s(
        self,
        number: int,
        share: int,
        start_s: float,
        seconds: float,
        least_bytes: int,
        open_s: float,
    ) -> float:
        """Return from when on a node stays open and has `share` unreserved devices for long enough;
        infinity if never.
        """
        while True:  # ends: each turn begins where a closing or a promise ends
            for closes_s, opens_s in self._closed.get(number, ()):
                if closes_s < start_s + open_s and start_s < opens_s:
                    start_s = opens_s
            if number not in self._later:
                return start_s
            begins = (
                self._unreserved_from_s(number, device, start_s, seconds)
                for device in range(self.devices_per_node)
                if self._has_bytes(number, device, least_bytes)
            )
            opens_s = sorted(begins)[share - 1]
            if opens_s in (start_s, inf):
                return opens_s
            start_s = opens_s

    def _unreserved_from_s(
        self, node_number: int, device: int, start_s: float, duration_s: float
    ) -> float:
        """Return from when on, after `start_s`, a device is unreserved for `duration_s` seconds."""
        start_s = max(start_s, self._device_free_times(node_number)[device])
        for promise in self._later.get(node_number, ()):
            if (
                device in promise.devices
                and promise.start_s < start_s + duration_s
                and start_s < promise.end_s
            ):
                start_s = promise.end_s
        return start_s

    def _free_times_with_bytes(self, number: int, least_bytes: int) -> list[float]:
        free_s = self._device_free_times(number)
        return sorted(
            s for device, s in enumerate(free_s) if self._has_bytes(number, device, least_bytes)
        )

    def _has_bytes(self, number: int, device: int, least_bytes: int) -> bool:
        return (
            self.has_bytes_on_every_device(least_bytes)
            or self.usable_bytes(number, device) >= least_bytes
        )

    def _device_free_times(self, number: int) -> list[float]:
        """Return when each device of a node is free for good, by index."""
        future = self._futures.get(number)
        if future is not None:
            return future.free_s
        if number in self._promised or number in self._closed:
            return self._device_times(number).free_s
        return self._until_s[number]

    def _device_times(self, number: int) -> _DeviceTimes:
        future = self._futures.get(number)
        if future is None:
            closed = self._closed.get(number, ())
            opens_s = closed[0][1] if closed and closed[0][0] == -inf else -inf
            until = self._until_s[number]
            free_s = [max(until_s, opens_s) for until_s in until] if closed else until[:]
            next_s = [inf] * self.devices_per_node
            for start_s, end_s, devices, is_later in self._promised.get(number, ()):
                for device in devices:
                    if not is_later:
                        free_s[device] = max(free_s[device], end_s)
                    next_s[device] = min(next_s[device], start_s)
            future = self._futures[number] = _DeviceTimes(free_s, next_s)
        return future

    def _shares_open_until_s(self, nodes: int, share: int) -> float:
        """Return until when `share` idle devices on each of `nodes` nodes stay unreserved and open."""
        promised_s = []
        unpromised = 0
        for idle in range(share, self.devices_per_node + 1):
            for number in self._by_idle[idle]:
                if number not in self._promised and number not in self._closed:
                    unpromised += 1
                    if unpromised == nodes:
                        return inf
                elif number not in self._promised:
                    promised_s.append(self._closes_s(number))
                else:
                    both = zip(
                        self._device_times(number).next_s, self._until_s[number], strict=True
                    )
                    next_s = sorted((next_s for next_s, until_s in both if until_s == IDLE))
                    promised_s.append(min(next_s[-share], self._closes_s(number)))
        missing = nodes - unpromised
        return nlargest(missing, promised_s)[-1] if len(promised_s) >= missing else -inf

    def _closes_s(self, number: int) -> float:
        """Return when a node closes next; minus infinity if it is closed now."""
        windows = self._closed.get(number)
        return windows[0][0] if windows else inf

    def _able_nodes(
        self, share: int, end_s: float, least_bytes: int, open_until_s: float
    ) -> Iterator[_Able]:
        """Yield (node's number, `share` of its devices) for nodes where these are usable until `end_s`.

        The node with the fewest idle devices comes first.
        """
        for idle in range(share, self.devices_per_node + 1):
            for number in self._by_idle[idle]:
                if self._closes_s(number) < open_until_s:
                    continue
                devices = self._usable_devices(number, end_s, least_bytes)
                if len(devices) >= share:
                    yield number, devices[:share]

    def _in_fewest_racks(self, able: Sequence[_Able], wanted: int) -> list[_Able]:
        """Return `wanted` of these nodes in as few racks as possible.

        The largest racks are filled first; the rest goes to the smallest rack that holds it.
        """
        racks = group_values((self.group.nodes[entry[0]].rack, entry) for entry in able)
        chosen: list[_Able] = []
        largest = sorted(racks.values(), key=len)
        while largest and len(chosen) < wanted:
            missing = wanted - len(chosen)
            enough = next((rack for rack in largest if len(rack) >= missing), largest[-1])
            largest.remove(enough)
            chosen += enough[:missing]
        return chosen

    def _usable_devices(self, number: int, end_s: float, least_bytes: int) -> tuple[int, ...]:
        """Return the idle devices of a node with `least_bytes` free that are not reserved before
        `end_s`.
        """
        until = self._until_s[number]
        if number not in self._promised and not least_bytes:
            return tuple(device for device, until_s in enumerate(until) if until_s == IDLE)
        next_s = self._device_times(number).next_s
        return tuple(
            device
            for device, until_s in enumerate(until)
            if until_s == IDLE
            and next_s[device] >= end_s
            and self._free_bytes[number][device] >= least_bytes
        )
