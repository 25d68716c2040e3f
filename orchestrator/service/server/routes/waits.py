"""Lets any number of requests wait for conditions, which one thread checks for all of them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

# at most so long after a file changed is it noticed; a change of the state is noticed at once
LOOK_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    is_met: Callable[[], bool]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Waits:
    """Lets async requests wait for conditions; a single thread checks all of these."""

    def __init__(self, wait_for_version: Callable[[int, float], int]) -> None:
        """Make the object. `wait_for_version(version, timeout_s)` returns the newest version, as
        `Controller.wait_for_change`.
        """
        self._wait_for_change = wait_for_version
        self._lock = threading.Lock()
        self._waiters: set[_Waiter] = set()
        self._is_watched = False

    async def wait_until(self, is_met: Callable[[], bool], timeout_s: float) -> None:
        """Return once `is_met` returns true, or after `timeout_s` seconds. Another thread calls
        `is_met`.
        """
        if await run_in_threadpool(is_met):
            return
        waiter = _Waiter(is_met)
        with self._lock:
            self._waiters.add(waiter)
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._run_checks, name="waits", daemon=True).start()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(waiter.woken.wait(), timeout_s)
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def _run_checks(self) -> None:
        try:
            self._check_waiters()
        except BaseException:  # re-raised: the next waiter starts another thread
            with self._lock:
                self._is_watched = False
            raise

    def _check_waiters(self) -> None:
        version = -1
        while True:
            with self._lock:
                waiters = [*self._waiters]
                if not waiters:
                    self._is_watched = False
                    return
            for waiter in waiters:
                if _is_met(waiter) and not waiter.loop.is_closed():
                    with suppress(RuntimeError):  # closed meanwhile
                        waiter.loop.call_soon_threadsafe(waiter.woken.set)
            version = self._wait_for_change(version, LOOK_S)


def _is_met(waiter: _Waiter) -> bool:
    try:
        return waiter.is_met()
    except Exception:  # the edge of a request: it asks again itself, and answers with the error
        log.exception("a condition cannot be evaluated")
        return True
