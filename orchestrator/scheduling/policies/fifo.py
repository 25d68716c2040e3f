"""The fifo policy: first come, first served. A job that has to wait for devices holds up all later jobs."""

from __future__ import annotations

from orchestrator.scheduling.policies.rigid import RigidPolicy


class FifoPolicy(RigidPolicy):
    """First come, first served: jobs start strictly in the order of submission, whatever their
    duration.
    """
