"""Names of the queue policies. The command line lists them, so this module loads nothing."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """The queue policy: which job starts next, which may overtake, and which is preempted. See scheduling/policies/."""

    ADAPTIVE = "adaptive"
    FIFO = "fifo"
