"""fifo: first come, first served. A job that has to wait for devices holds up all later jobs."""

from __future__ import annotations

from orchestrator.scheduling.policies.rigid import RigidPolicy


class FifoPolicy(RigidPolicy):
    """Jobs start strictly in the order of submission. It needs no length of any job."""
