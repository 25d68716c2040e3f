"""Live updates of pages by server-sent events, whose ids are versions of the state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

from orchestrator.service.server.routes.waits import Waits

WAIT_S = 5.0  # at most so long a page that was closed, or whose session ended, keeps its stream


async def stream_changes(
    version_seen: int,
    current_version: Callable[[], int],
    waits: Waits,
    is_signed_in: Callable[[], bool],
) -> AsyncIterator[str]:
    """Yield a server-sent event `changed` for each version of the state after `version_seen`, and
    `ended` at the end.

    Versions that follow quickly are merged. A page that reconnects sends its last version, and gets
    newer versions at once.
    """
    yield "retry: 1000\n\n"
    while await asyncio.to_thread(is_signed_in):
        await waits.wait_until(partial(_is_other_version, current_version, version_seen), WAIT_S)
        if current_version() == version_seen:
            yield ": still here\n\n"
        else:
            version_seen = current_version()
            yield f"id: {version_seen}\nevent: changed\ndata: {version_seen}\n\n"
    yield "event: ended\ndata: sign in\n\n"


def _is_other_version(current_version: Callable[[], int], version_seen: int) -> bool:
    return current_version() != version_seen
