"""Expected starts and ends of jobs as JSON, as the service forecasts them."""

from __future__ import annotations

from typing_extensions import TypedDict

Range = tuple[float, float]  # its ends


class ExpectedJob(TypedDict):
    """Expected start and end of a job."""

    id: str
    status: str
    devices: int | None
    start_s: float | None  # None: not known
    end_s: float | None
    # it starts within this range with a probability of 80 %; None: unknown
    start_range_s: Range | None
    end_range_s: Range | None
    deadline_s: float | None
    says_length: (
        bool  # whether it says its steps; else its end is learned from others, or not known
    )
    why: str
