"""Which devices are held?"""

from __future__ import annotations

from orchestrator.specs.state import State

Device = tuple[str, int]  # node name, device index


def busy_devices(state: State) -> frozenset[Device]:
    """Devices of every attempt that runs, or whose memory is not reported free again."""
    return frozenset(
        (part.node, index)
        for job in state.jobs.values()
        for attempt in job.attempts
        if not attempt.released
        for part in attempt.placement
        for index in part.devices
    )
