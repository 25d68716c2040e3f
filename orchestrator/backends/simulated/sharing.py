"""Simulated cards that two jobs share: a card has a second place, a device that only one-device jobs can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.specs.attempt import Device
from orchestrator.specs.cluster import ClusterSpec, NodeSpec

# The place of a guest is a node and a kind of device of its own. So no plan has two ranks on a card.
GUEST = "guest"
NOWHERE: Device = ("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How two jobs share a card."""

    rate: float  # of its speed alone, for each of two jobs on a card
    cards: Mapping[Device, Device]  # of each place of a guest
    guests: Mapping[Device, Device]  # the place of a guest on each card

    def card_of(self, device: Device) -> Device:
        """Return the card of a device: itself, or that of a guest's place."""
        return self.cards.get(device, device)

    def guest_of(self, card: Device) -> Device:
        """Return the place of a guest on a card; one that nobody takes where no card is shared."""
        return self.guests.get(card, NOWHERE)


NO_SHARING = Sharing(rate=1.0, cards={}, guests={})


def add_guests(cluster: ClusterSpec, rate: float) -> tuple[ClusterSpec, Sharing]:
    """Return the cluster with a second place on every card, and which card each place is of."""
    guests = list[NodeSpec]()
    cards = dict[Device, Device]()
    for node in cluster.nodes:
        kind = node.device.model_copy(update={"name": f"{node.device.name} {GUEST}"})
        for name in node.names:
            for index in range(node.devices):
                guest = f"{name}-{GUEST}{index}"
                cards[guest, 0] = (name, index)
                guests.append(
                    node.model_copy(
                        update={
                            "name": guest,
                            "count": 1,
                            "devices": 1,
                            "device_ids": (),
                            "device": kind,
                        }
                    )
                )
    shared = cluster.model_copy(update={"nodes": (*cluster.nodes, *guests)})
    places = {card: guest for guest, card in cards.items()}
    return shared, Sharing(rate=rate, cards=cards, guests=places)
