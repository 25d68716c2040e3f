"""Cost of jobs: device-seconds, and money where the cluster file gives prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.specs.attempt import count_devices
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State
from orchestrator.specs.units import format_seconds

SECONDS_AN_HOUR = 3600.0


@frozen
class JobCost:
    """Device-seconds that attempts used, and their price; None without prices."""

    device_s: float
    money: float | None  # None: a device that was used has no price

    @property
    def text(self) -> str:
        """The cost as text, such as `3.4 h of devices, cost 8.5`."""
        text = f"{format_seconds(self.device_s)} of devices"
        return text if self.money is None else f"{text}, cost {self.money:.4g}"


def list_hourly_price_by_device(state: State) -> Mapping[str, float]:
    """Return {device name: price per hour} of the devices whose prices the cluster file gives."""
    devices = (node.device for node in (*state.declared, *state.nodes))
    return {
        device.name: device.price_per_hour
        for device in devices
        if device.price_per_hour is not None
    }


def sum_job_cost(
    jobs: Iterable[Job],
    hourly_price_by_device: Mapping[str, float],
    until_s: float,
    since_s: float = 0.0,
) -> JobCost:
    """Return the cost of these jobs between `since_s` and `until_s`, in seconds since 1970.

    `hourly_price_by_device` is the hourly price by device name. Running attempts count until `until_s`.
    """
    by_device = dict[str, float]()  # by device
    for job in jobs:
        for attempt in job.attempts:
            lasted_s = min(until_s, attempt.end_or(until_s)) - max(since_s, attempt.launched_at_s)
            if lasted_s > 0:
                count = count_devices(attempt.placement)
                by_device[attempt.device] = by_device.get(attempt.device, 0.0) + count * lasted_s
    is_priced = bool(by_device) and all(device in hourly_price_by_device for device in by_device)
    money = (
        sum(hourly_price_by_device[device] * device_s for device, device_s in by_device.items())
        / SECONDS_AN_HOUR
        if is_priced
        else None
    )
    return JobCost(device_s=sum(by_device.values()), money=money)
