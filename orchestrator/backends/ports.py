"""The narrow door between the core and the world. The simulated world stands behind the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.state import Event, Job, Launch, Stop


class Backend(Protocol):
    """Where attempts run. Every call returns at once; what becomes of it arrives as an event."""

    def launch(self, action: Launch) -> None:
        """Start an attempt, or take it up again where it runs already (after a restart of the service)."""

    def stop(self, action: Stop) -> None:
        """End an attempt. Unknown and ended attempts are no error."""

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Take up an attempt that the journal calls live: watch it, report its end, or start it if it never began."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What happened since the last call; waits at most `timeout_s` for the first."""

    def close(self) -> None:
        """Let go of everything; running attempts go on."""
