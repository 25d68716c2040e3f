"""Pages hear of every change: a stream of server-sent events, whose ids are versions of the state."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

WAIT_S = 5.0  # at most so long a page that was closed, or whose session ended, keeps its stream
NEVER_SEEN = -1  # a version that no state has


class Changes:
    """Wakes any number of streams of any number of event loops from one thread, which ends with the last of them."""

    def __init__(self, wait_for_change: Callable[[int, float], int]) -> None:
        """`wait_for_change(version, timeout_s)` returns the newest version, as `Controller.wait_for_change`."""
        self._wait_for_change = wait_for_change
        self._lock = threading.Lock()
        self._streams: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._version = NEVER_SEEN
        self._is_watched = False

    async def stream(self, seen: int, is_signed_in: Callable[[], bool]) -> AsyncIterator[str]:
        """An event `changed` for each version after `seen` that the page could not skip, and `ended` at the end.

        A page that lost its connection gives the last id that it saw, and hears at once of what it missed.
        """
        woken = asyncio.Event()
        stream = asyncio.get_running_loop(), woken
        self._enter(stream)
        try:
            yield "retry: 1000\n\n"
            while await asyncio.to_thread(is_signed_in):
                woken.clear()
                if self._version not in (seen, NEVER_SEEN):
                    seen = self._version
                    yield f"id: {seen}\nevent: changed\ndata: {seen}\n\n"
                try:
                    await asyncio.wait_for(woken.wait(), WAIT_S)
                except TimeoutError:
                    yield ": still here\n\n"
            yield "event: ended\ndata: sign in\n\n"
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _enter(self, stream: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._streams.add(stream)
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="pages", daemon=True).start()

    def _watch(self) -> None:
        while True:
            version = self._wait_for_change(self._version, WAIT_S)
            with self._lock:
                if not self._streams:
                    self._is_watched = False
                    return
                if version == self._version:
                    continue
                self._version = version
                for loop, woken in self._streams:
                    if not loop.is_closed():
                        loop.call_soon_threadsafe(woken.set)
