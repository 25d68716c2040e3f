"""URLs of MLflow pages, looked up in a thread: MLflow may be away, and its client takes seconds to import."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

KNOWN_MAX = 1000  # addresses in memory

Page = tuple[str, str, int]  # address, key, and number of jobs
Look = Callable[[str, str, int], str | None]


class Links:
    """Cache of URLs. A request for an unknown one starts its look-up, and does not wait."""

    def __init__(self, look: Look) -> None:
        """`look(address, key, jobs)` may take seconds, and returns None before there is a page."""
        self._look = look
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="links")
        self._lock = threading.Lock()
        self._known: dict[Page, str] = {}
        self._pending: dict[Page, Future[None]] = {}

    def of(self, address: str, key: str, jobs: int) -> str | None:
        """Return the URL of the page that compares the runs with this key; None until it is looked up."""
        page = (address, key, jobs)
        with self._lock:
            if (
                page not in self._known
                and page not in self._pending
                and len(self._pending) < KNOWN_MAX
            ):
                self._pending[page] = self._worker.submit(self._find, page)
            return self._known.get(page)

    def _find(self, page: Page) -> None:
        try:
            link = self._look(*page)
        finally:
            with self._lock:
                del self._pending[page]
        if link is not None:
            with self._lock:
                self._known = dict([*self._known.items(), (page, link)][-KNOWN_MAX:])
