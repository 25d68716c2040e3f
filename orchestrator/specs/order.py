"""Names of the queue policies. The command line lists them, so this module loads nothing."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """The queue policy: which job starts next, which may overtake, and which is preempted. See scheduling/policies/."""

    ADAPTIVE = "adaptive"
    FIFO = "fifo"

    @classmethod
    def _missing_(cls, value: object) -> Order | None:
        """Return ADAPTIVE for an order of earlier versions, which journals still name."""
        return cls.ADAPTIVE if value in REMOVED else None


REMOVED = ("easy", "edf", "sjf", "tiresias")  # benchmarks/peers has them
