"""Failures that a person asks for, to see a job recover. Standard library only: `orc` lists them whenever it starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What `orc rehearse` can make happen."""

    OOM = "oom"
    KILL = "kill"
    NODE = "node"
    PREEMPT = "preempt"
    HANG = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure to raise for real in the first attempt: at this rank, before this optimizer step completes."""

    kind: FaultKind
    rank: int
    step: int
