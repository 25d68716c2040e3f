"""The easy policy: FIFO with EASY backfill (Lifka 1995, The ANL/IBM SP Scheduling System, JSSPP, LNCS 949:295)."""

from __future__ import annotations

from orchestrator.scheduling.policies.rigid import RigidPolicy


class EasyPolicy(RigidPolicy):
    """Jobs start in order of submission. Later jobs may start early if that does not delay the first waiting one."""

    reservations_max = 1  # aggressive backfill: only the head of the queue has a reservation
