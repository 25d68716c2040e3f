"""Simulated cards that two jobs share: a card has a second place, a device that only one-device jobs can take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from orchestrator.backends.simulated.backend import SimulatedBackend
from orchestrator.backends.simulated.process import SimulatedProcess
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import Device, FailureKind
from orchestrator.specs.cluster import ClusterSpec, NodeSpec, make_idle_nodes
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.replace import replace

# The place of a guest is a node and a kind of device of its own. So no plan has two ranks on a card.
GUEST = "guest"
ROUNDING_S = 1e-6


@dataclass(slots=True)
class Course:
    """How far an attempt has trained, and at which rate of its full speed."""

    rate: float  # of its speed alone: below 1 beside another job on one of its cards
    trained_s: float  # at full speed, until the rate last changed
    changed_at_s: float  # when it did

    def compute_trained_s_until(self, now_s: float) -> float:
        """Return the seconds of training at full speed that the attempt has done by `now_s`."""
        return self.trained_s + self.rate * (now_s - self.changed_at_s)


class SharedBackend(SimulatedBackend):
    """Simulated cluster in which two jobs may share a card if their planned bytes fit, each then at
    `rate` of its speed.
    """

    def __init__(self, cluster: ClusterSpec, shared_card_rate: float) -> None:
        shared, self._cards = add_guests(cluster)
        super().__init__(shared)
        self._policy = shared.policy
        self._rate = shared_card_rate
        self._nodes = make_idle_nodes(shared)
        self._used_bytes = Counter[Device]()  # as planned, by place
        self._training = dict[str, tuple[SimulatedProcess, Course]]()  # by attempt
        self._outbox = []
        self._report_nodes()

    def find_physical_card(self, device: Device) -> Device:
        """Return the physical card of a device: the device itself, or the card of which it is the
        second device.
        """
        return self._cards.get(device, device)

    def _list_cards(self, process: SimulatedProcess) -> set[Device]:
        return set(map(self.find_physical_card, process.devices))

    def launch(self, action: Launch) -> None:
        """Start an attempt, which occupies its planned bytes."""
        super().launch(action)
        self._change_used_bytes(self.processes[action.attempt.name], 1)

    def _schedule_course(self, process: SimulatedProcess) -> None:
        """Schedule the start of an attempt; its end depends on the other attempts on its cards."""
        self._schedule(self._launch_s, partial(self._start_attempt, process))

    def _start_attempt(self, process: SimulatedProcess) -> None:
        super()._start_attempt(process)
        if process.evidence is None:
            self._training[process.attempt.name] = (process, Course(1.0, 0.0, self._now_s))
            self._update_rates(process)

    def _end_attempt(
        self, process: SimulatedProcess, ending: FailureKind | None, step: int
    ) -> None:
        super()._end_attempt(process, ending, step)
        if self._training.pop(process.attempt.name, None):
            self._update_rates(process)

    def _release_devices(self, process: SimulatedProcess) -> None:
        self._change_used_bytes(process, -1)
        super()._release_devices(process)

    def _compute_reached_step(self, process: SimulatedProcess) -> int:
        if process.attempt.name not in self._training:
            return process.first_step
        _, course = self._training[process.attempt.name]
        steps = int(course.compute_trained_s_until(self._now_s) / process.step_s)
        return min(process.first_step + steps, process.last_step - 1)

    def _update_rates(self, process: SimulatedProcess) -> None:
        """Update the rates and ends of all attempts that share a card with this one, which starts
        or ends.

        A rank waits for the slowest rank, so a plan of several cards is slowed as soon as one of
        them is shared.
        """
        crowd = Counter[Device]()
        for other, _ in self._training.values():
            crowd.update(self._list_cards(other))
        changed = self._list_cards(process)
        for other, course in self._training.values():
            cards = self._list_cards(other)
            if changed.isdisjoint(cards):
                continue
            course.trained_s = course.compute_trained_s_until(self._now_s)
            course.changed_at_s = self._now_s
            is_beside_another = any(crowd[card] > 1 for card in cards)
            course.rate = self._rate if is_beside_another else 1.0
            left_s = max(0.0, _compute_full_speed_s(other) - course.trained_s)
            self._schedule(left_s / course.rate, partial(self._end_if_trained, other))

    def _end_if_trained(self, process: SimulatedProcess) -> None:
        """End the attempt if it has trained enough by now; its rate may have changed since this
        call was scheduled.
        """
        if process.attempt.name not in self._training:
            return
        _, course = self._training[process.attempt.name]
        if (
            course.compute_trained_s_until(self._now_s)
            >= _compute_full_speed_s(process) - ROUNDING_S
        ):
            ending = FailureKind.PROBED if process.attempt.probe else None
            self._end_attempt(process, ending, process.last_step)

    def _change_used_bytes(self, process: SimulatedProcess, sign: int) -> None:
        """Add the attempt's planned bytes to its devices' used bytes (`sign` 1), or subtract them
        (-1).
        """
        held_bytes = sign * process.attempt.estimate.device_bytes
        self._used_bytes.update(dict.fromkeys(process.devices, held_bytes))
        self._report_nodes()

    def _report_nodes(self) -> None:
        """Emit an event with the bytes that a new job could take on each device."""
        nodes = []
        used = Counter[Device]()
        for place, held_bytes in self._used_bytes.items():
            used[self.find_physical_card(place)] += held_bytes
        for node in self._nodes:
            free_bytes = []
            for index, memory_bytes in enumerate(node.free_bytes):
                card = self.find_physical_card((node.name, index))
                is_guest = card != (node.name, index)
                # A guest comes to a card that somebody holds: an idle one is taken first.
                is_open = not is_guest or self._used_bytes[card] > 0
                free_bytes.append(max(0, memory_bytes - used[card]) if is_open else 0)
            nodes.append(replace(node, free_bytes=tuple(free_bytes)))
        event = NodesSeen(
            nodes=tuple(nodes), declared=self._nodes, policy=self._policy, at_s=self._now_s
        )
        self._emit(event)


def _compute_full_speed_s(process: SimulatedProcess) -> float:
    """Return the seconds of training at full speed that the attempt needs in all."""
    return (process.last_step - process.first_step) * process.step_s


def add_guests(cluster: ClusterSpec) -> tuple[ClusterSpec, Mapping[Device, Device]]:
    """Return (cluster with a second device on every card, physical card of each such second
    device).
    """
    guests = list[NodeSpec]()
    cards = dict[Device, Device]()
    for node in cluster.nodes:
        kind = node.device.model_copy(update={"name": f"{node.device.name} {GUEST}"})
        alone = {"count": 1, "devices": 1, "device_ids": (), "device": kind}
        for name in node.names:
            for index in range(node.devices):
                guest = f"{name}-{GUEST}{index}"
                cards[guest, 0] = (name, index)
                guests.append(node.model_copy(update={**alone, "name": guest}))
    return cluster.model_copy(update={"nodes": (*cluster.nodes, *guests)}), cards
