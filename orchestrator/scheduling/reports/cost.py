"""What did jobs cost? Seconds of devices, and money where the cluster file has their prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State
from orchestrator.specs.units import format_seconds

SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Devices that attempts held."""

    device_s: float
    money: float | None  # None: a device that was held has no price

    @property
    def said(self) -> str:
        """`3.4 h of devices, cost 8.5`."""
        words = f"{format_seconds(self.device_s)} of devices"
        return words if self.money is None else f"{words}, cost {self.money:.4g}"


def prices(state: State) -> Mapping[str, float]:
    """Price of one device for an hour, by its name, where one is known."""
    devices = (node.device for node in (*state.declared, *state.nodes))
    return {one.name: one.price_per_hour for one in devices if one.price_per_hour is not None}


def spent(jobs: Iterable[Job], price: Mapping[str, float], until_s: float, since_s: float = 0.0) -> Spent:
    """What the attempts of these jobs held between two moments; one that has not ended counts until the last."""
    held = dict[str, float]()  # by device
    for job in jobs:
        for one in job.attempts:
            lasted_s = min(until_s, one.end_or(until_s)) - max(since_s, one.launched_at_s)
            if lasted_s > 0:
                count = sum(len(part.devices) for part in one.placement)
                held[one.device] = held.get(one.device, 0.0) + count * lasted_s
    is_priced = bool(held) and all(device in price for device in held)
    money = sum(price[device] * device_s for device, device_s in held.items()) / SECONDS_AN_HOUR if is_priced else None
    return Spent(device_s=sum(held.values()), money=money)
