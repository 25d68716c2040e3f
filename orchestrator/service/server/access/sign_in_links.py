"""One-time links that sign a browser in, as the user who requested them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LIFETIME_S = 300.0
LINKS_MAX = 100  # unused ones: the oldest goes first


@dataclass(frozen=True, slots=True)
class SignInLinks:
    """Sessions that wait for a browser to open the link with their secret code. They are in memory
    only.
    """

    clock: Callable[[], float] = time.monotonic
    _sessions: dict[str, tuple[float, str]] = field(
        default_factory=dict
    )  # until when, and the cookie
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_session_and_make_code(self, cookie: str) -> str:
        """Store a session's cookie, and return a new code for `claim_session_cookie`, valid once and for
        LIFETIME_S seconds.
        """
        code = secrets.token_urlsafe(32)
        with self._lock:
            while len(self._sessions) >= LINKS_MAX:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[code] = (self.clock() + LIFETIME_S, cookie)
        return code

    def claim_session_cookie(self, code: str) -> str | None:
        """Return the session's cookie for this code and forget it; None for an unknown, used or
        expired code.
        """
        with self._lock:
            until_s, cookie = self._sessions.pop(code, (0.0, ""))
        return cookie if self.clock() < until_s else None
