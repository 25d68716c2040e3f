"""Which devices are held, and by which job?"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.specs.state import State

Device = tuple[str, int]  # node name, device index


def holders(state: State) -> Mapping[Device, str]:
    """Of every device of an attempt that runs, or whose memory is not reported free again, the id of the job."""
    return {
        (part.node, index): job.id
        for job in state.jobs.values()
        for attempt in job.attempts
        if not attempt.released
        for part in attempt.placement
        for index in part.devices
    }
