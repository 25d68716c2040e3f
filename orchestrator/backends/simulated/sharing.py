"""Simulated cards that two jobs share: a card has a second place, a device that only one-device jobs can take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from orchestrator.backends.simulated.backend import SimulatedBackend
from orchestrator.backends.simulated.process import Process
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
    """How far an attempt has trained."""

    rate: float  # of its speed alone: below 1 beside another job on one of its cards
    trained_s: float  # at full speed, until the rate last changed
    changed_at_s: float  # when it did

    def trained_until(self, now_s: float) -> float:
        """Return the seconds at full speed that it has trained."""
        return self.trained_s + self.rate * (now_s - self.changed_at_s)


class SharedBackend(SimulatedBackend):
    """Simulated cluster on whose cards two jobs fit where their planned bytes do, each then at `rate` of its speed."""

    def __init__(self, cluster: ClusterSpec, rate: float) -> None:
        shared, self._cards = add_guests(cluster)
        super().__init__(shared)
        self._policy = shared.policy
        self._rate = rate
        self._nodes = make_idle_nodes(shared)
        self._used_bytes = Counter[Device]()  # as planned, by place
        self._training = dict[str, tuple[Process, Course]]()  # by attempt
        self._outbox = []
        self._tell_nodes()

    def card_of(self, place: Device) -> Device:
        """Return the card of a place: itself, or that of a guest."""
        return self._cards.get(place, place)

    def _cards_of(self, process: Process) -> set[Device]:
        return set(map(self.card_of, process.devices))

    def launch(self, action: Launch) -> None:
        """Start an attempt, which holds its planned bytes."""
        super().launch(action)
        self._hold(self.processes[action.attempt.name], 1)

    def _decide(self, process: Process) -> None:
        """Schedule the start of an attempt; its end follows from what it meets on its cards."""
        self._after(self._launch_s, partial(self._start, process))

    def _start(self, process: Process) -> None:
        super()._start(process)
        if process.evidence is None:
            self._training[process.attempt.name] = (process, Course(1.0, 0.0, self._now_s))
            self._share(process)

    def _end(self, process: Process, ending: FailureKind | None, step: int) -> None:
        super()._end(process, ending, step)
        if self._training.pop(process.attempt.name, None):
            self._share(process)

    def _release(self, process: Process) -> None:
        self._hold(process, -1)
        super()._release(process)

    def _step_of(self, process: Process) -> int:
        if process.attempt.name not in self._training:
            return process.first_step
        _, course = self._training[process.attempt.name]
        steps = int(course.trained_until(self._now_s) / process.step_s)
        return min(process.first_step + steps, process.last_step - 1)

    def _share(self, process: Process) -> None:
        """Set anew the rates and the ends of all that train on the cards of an attempt that starts or ends.

        A rank waits for the slowest one, so a plan of several cards is slowed as soon as one of them is shared.
        """
        crowd = Counter[Device]()
        for other, _ in self._training.values():
            crowd.update(self._cards_of(other))
        changed = self._cards_of(process)
        for other, course in self._training.values():
            cards = self._cards_of(other)
            if changed.isdisjoint(cards):
                continue
            course.trained_s = course.trained_until(self._now_s)
            course.changed_at_s = self._now_s
            is_beside_another = any(crowd[card] > 1 for card in cards)
            course.rate = self._rate if is_beside_another else 1.0
            left_s = max(0.0, _needed_s(other) - course.trained_s)
            self._after(left_s / course.rate, partial(self._meet, other))

    def _meet(self, process: Process) -> None:
        """End an attempt that has trained enough; its rate may have changed since this was set."""
        if process.attempt.name not in self._training:
            return
        _, course = self._training[process.attempt.name]
        if course.trained_until(self._now_s) >= _needed_s(process) - ROUNDING_S:
            ending = FailureKind.PROBED if process.attempt.probe else None
            self._end(process, ending, process.last_step)

    def _hold(self, process: Process, sign: int) -> None:
        """Account for the planned bytes that an attempt takes of its devices, or gives back."""
        held_bytes = sign * process.attempt.estimate.device_bytes
        self._used_bytes.update(dict.fromkeys(process.devices, held_bytes))
        self._tell_nodes()

    def _tell_nodes(self) -> None:
        """Tell what a newcomer could take of each place."""
        nodes = []
        used = Counter[Device]()
        for place, held_bytes in self._used_bytes.items():
            used[self.card_of(place)] += held_bytes
        for node in self._nodes:
            free_bytes = []
            for index, memory_bytes in enumerate(node.free_bytes):
                card = self.card_of((node.name, index))
                is_guest = card != (node.name, index)
                # A guest comes to a card that somebody holds: an idle one is taken first.
                is_open = not is_guest or self._used_bytes[card] > 0
                free_bytes.append(max(0, memory_bytes - used[card]) if is_open else 0)
            nodes.append(replace(node, free_bytes=tuple(free_bytes)))
        event = NodesSeen(
            nodes=tuple(nodes), declared=self._nodes, policy=self._policy, at_s=self._now_s
        )
        self._tell(event)


def _needed_s(process: Process) -> float:
    """Return the seconds that an attempt trains at full speed."""
    return (process.last_step - process.first_step) * process.step_s


def add_guests(cluster: ClusterSpec) -> tuple[ClusterSpec, Mapping[Device, Device]]:
    """Return the cluster with a second place on every card, and the card of each such place."""
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
