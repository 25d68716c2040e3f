"""Devices and nodes that take no new attempts for a while, after unexplained failures. Standard library only."""

from __future__ import annotations

from orchestrator.specs.attempt import Ending, Placement
from orchestrator.specs.frozen import frozen


@frozen
class UnexplainedEnd:
    """An attempt that ended for no known reason. Later unexplained ends are compared with it."""

    job: str  # Job.key
    family: str  # family of the job: its jobs share their mistakes
    ending: Ending
    placement: Placement
    at_s: float


@frozen
class Suspension:
    """A device or node that takes no new attempts until `until_s`, after failures that nothing else explains."""

    node: str
    device: int | None  # None: the whole node
    since_s: float
    until_s: float
    count: int  # consecutive suspensions of this place: each is twice as long as the one before
    reason: str
    jobs: tuple[str, ...]  # Job.key of the jobs that ended there

    @property
    def place(self) -> str:
        """The suspended node or device as text, such as `n0` or `device 3 of n0`."""
        return self.node if self.device is None else f"device {self.device} of {self.node}"
