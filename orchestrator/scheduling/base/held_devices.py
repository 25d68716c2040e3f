"""The devices that jobs occupy."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.specs.attempt import Device, list_devices_of
from orchestrator.specs.state import State


def map_held_device_to_job_id(state: State) -> Mapping[Device, str]:
    """Return {device: id of the job whose attempt occupies it}.

    A running attempt occupies its devices. An ended one does until their memory is reported free
    again.
    """
    return {
        device: job.id
        for job in state.jobs.values()
        for attempt in job.attempts
        if not attempt.released
        for device in list_devices_of(attempt.placement)
    }
