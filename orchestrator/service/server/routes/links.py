"""URLs of MLflow pages, looked up in a thread: MLflow may be away, and its client takes seconds to import."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

KNOWN_MAX = 1000  # addresses in memory

Page = tuple[str, str, int]  # address, key, and number of jobs
Look = Callable[[str, str, int], str | None]


class MlflowLinks:
    """Cache of the URLs of MLflow pages. A request for an unknown URL starts a look-up in a thread,
    and does not wait.
    """

    def __init__(self, find_url: Look) -> None:
        """Make the cache. `find_url(address, key, jobs)` looks a URL up; it may take seconds, and
        returns None without a page.
        """
        self._look = find_url
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="links")
        self._lock = threading.Lock()
        self._known: dict[Page, str] = {}
        self._pending: dict[Page, Future[None]] = {}

    def find_cached_url(self, address: str, comparison_key: str, job_count: int) -> str | None:
        """Return the URL of MLflow's page for the runs with this key; None until it is looked up,
        or if there is no page.
        """
        page = (address, comparison_key, job_count)
        with self._lock:
            if (
                page not in self._known
                and page not in self._pending
                and len(self._pending) < KNOWN_MAX
            ):
                self._pending[page] = self._worker.submit(self._look_up, page)
            return self._known.get(page)

    def _look_up(self, page: Page) -> None:
        try:
            link = self._look(*page)
        finally:
            with self._lock:
                del self._pending[page]
        if link is not None:
            with self._lock:
                self._known = dict([*self._known.items(), (page, link)][-KNOWN_MAX:])
