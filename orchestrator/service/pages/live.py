"""Live updates of pages by server-sent events, whose ids are versions of the state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

from orchestrator.service.server.routes.waits import Waits

WAIT_S = 5.0  # at most so long a page that was closed, or whose session ended, keeps its stream


async def stream_changes(
    seen_version: int,
    current_version: Callable[[], int],
    waits: Waits,
    is_signed_in: Callable[[], bool],
) -> AsyncIterator[str]:
    """Yield a server-sent event `changed` for each version of the state after `seen_version`, and
    `ended` at the end.

    Versions that follow quickly are merged. A page that reconnects sends the last version that it
    got, and gets newer versions at once.
    """
    yield "retry: 1000\n\n"
    while await asyncio.to_thread(is_signed_in):
        await waits.wait_until(partial(_is_other_version, current_version, seen_version), WAIT_S)
        if current_version() == seen_version:
            yield ": still here\n\n"
        else:
            seen_version = current_version()
            yield f"id: {seen_version}\nevent: changed\ndata: {seen_version}\n\n"
    yield "event: ended\ndata: sign in\n\n"


def _is_other_version(current_version: Callable[[], int], seen_version: int) -> bool:
    return current_version() != seen_version
