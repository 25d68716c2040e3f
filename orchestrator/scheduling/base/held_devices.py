"""The devices that jobs occupy."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.specs.state import State

Device = tuple[str, int]  # node name, device index


def holders(state: State) -> Mapping[Device, str]:
    """Return the job id of each occupied device: an attempt runs there, or its memory is not yet reported free."""
    return {
        (part.node, index): job.id
        for job in state.jobs.values()
        for attempt in job.attempts
        if not attempt.released
        for part in attempt.placement
        for index in part.devices
    }
