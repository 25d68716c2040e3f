"""Order: the queue policies by name. The command line shows them, so this module loads nothing."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """Which queued job starts next, which may overtake it, and which is stopped for it: scheduling/policies/."""

    ADAPTIVE = "adaptive"
    FIFO = "fifo"
    EASY = "easy"
    EDF = "edf"
    SJF = "sjf"
    TIRESIAS = "tiresias"
