"""When will each job start and end, as far as can be known now? The queue played on, with nothing more submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.scheduling.decide import expected, price_of
from orchestrator.scheduling.desk import Desk
from orchestrator.specs.state import State

FORECAST_MAX = 2000  # queued jobs, first come first: what comes after them nobody can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """From when to when a job is expected to run, and on how many devices."""

    start_s: float
    end_s: float
    devices: int


def forecast(state: State) -> Mapping[str, Expected]:
    """Of every job that runs, and of those that wait, in the order of the queue, as far as FORECAST_MAX of them."""
    desk = Desk(state)
    found: dict[str, Expected] = {}
    for job in desk.running.values():
        attempt = job.last
        if attempt is not None and attempt.ended_at_s is None:
            end_s = max(desk.end_of(job, attempt), state.at_s)
            found[job.id] = Expected(start_s=attempt.launched_at_s, end_s=end_s, devices=attempt.plan.world_size)
    desk.forget_promises()
    price = price_of(desk)
    for waiting, _ in zip(desk.in_order(), range(FORECAST_MAX), strict=False):
        reservation = expected(state.at_s, desk, waiting, price)
        if reservation is not None:
            desk.promise((reservation,))
            devices = sum(len(part.devices) for part in reservation.placement)
            found[waiting.job.id] = Expected(start_s=reservation.start_s, end_s=reservation.end_s, devices=devices)
    return found
