"""Failures that a person injects, to see a job recover. Standard library only: `orc` lists them whenever it starts."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.specs.frozen import frozen


class FaultKind(StrEnum):
    """The failures that `orc rehearse` can inject."""

    OOM = "oom"
    KILL = "kill"
    NODE = "node"
    PREEMPT = "preempt"
    HANG = "hang"


@frozen
class Fault:
    """A real failure to inject into the first attempt: on this rank, before this optimizer step completes."""

    kind: FaultKind
    rank: int
    step: int
