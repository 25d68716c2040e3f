"""A wait of tests for a relay."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.backends.outbox_relay import OutboxRelay


def wait_delivered(relay: OutboxRelay[Any], timeout_s: float) -> bool:
    """Return True once the receiver has every row; False after `timeout_s`.

    It looks twice: the relay's thread may deliver the row that the first look has read.
    """
    deadline_s = time.monotonic() + timeout_s
    while any(relay._outbox.list_pending(relay._name, 1) for _ in range(2)):
        if time.monotonic() > deadline_s:
            return False
        relay.wake()
        time.sleep(0.05)
    return True
