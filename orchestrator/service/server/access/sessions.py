"""Browser sessions: a signed cookie that names a token's record, never the token itself."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from fastapi import Request, Response

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.frozen import frozen

LIFETIME_S = 24 * 3600.0
OWNER = 0  # stands for the home folder's own token, which has no record; records count from 1


@frozen
class Sessions:
    """Opens and reads the sessions of browsers, which are signed cookies.

    A session ends with its token: by expiry, revocation, or its user's removal. The key of the
    signature is derived from the home folder's token, so a replaced home ends every session.
    """

    owner_token: str
    owner: str  # name of the user who holds it
    accounts: Accounts
    clock: Callable[[], float] = time.time

    def make_session_cookie(self, token: str) -> str | None:
        """Return the cookie of a new session for the user with this token; None for an invalid
        token.
        """
        if hmac.compare_digest(token.encode(), self.owner_token.encode()):
            number: int | None = OWNER
        else:
            number = self.accounts.find_token_number(token)
        return (
            None
            if number is None
            else self._sign_payload(f"{number}.{int(self.clock() + LIFETIME_S)}")
        )

    def open_session(self, user: str, role: Role, lifetime_s: float) -> str:
        """Open a session for a user of an OpenID provider, and return its cookie."""
        number = self.accounts.open_session(user, role, lifetime_s)
        return self._sign_payload(f"{number}.{int(self.clock() + lifetime_s)}")

    def close_session(self, request: Request) -> None:
        """End the request's session if an OpenID provider opened it.

        A session from a token stays valid with any copy of its cookie.
        """
        if self.find_principal(request) is not None:
            self.accounts.close_session(
                int(request.cookies[get_cookie_name(request)].partition(".")[0])
            )

    def sign_text(self, text: str) -> str:
        """Return the text with a signature, for `find_verified_text`. It is no session."""
        return self._sign_payload(text, "on its way")

    def find_verified_text(self, signed_text: str) -> str | None:
        """Return the text that `sign_text` signed; None where the signature is invalid."""
        text = signed_text.rpartition(".")[0]
        return (
            text
            if hmac.compare_digest(signed_text.encode(), self.sign_text(text).encode())
            else None
        )

    def find_principal(self, request: Request) -> Principal | None:
        """Return the user of the request's session; None without a valid session."""
        payload, _, _ = (cookie := request.cookies.get(get_cookie_name(request), "")).rpartition(
            "."
        )
        number, _, until_s = payload.partition(".")
        if not hmac.compare_digest(cookie.encode(), self._sign_payload(payload).encode()):
            return None
        if self.clock() >= int(until_s):
            return None
        if int(number) == OWNER:
            return Principal(name=self.owner, role=Role.ADMIN, is_owner=True)
        return self.accounts.find_principal_by_number(int(number))

    def _sign_payload(self, payload: str, purpose: str = "session of a browser") -> str:
        key = hashlib.sha256(f"{purpose} {self.owner_token}".encode()).digest()
        return f"{payload}.{hmac.new(key, payload.encode(), hashlib.sha256).hexdigest()}"


def set_cookie(request: Request, answer: Response, cookie: str) -> None:
    """Add the session's cookie to the answer: only for this service, hidden from scripts, and
    TLS-only if the request used TLS.
    """
    answer.set_cookie(
        get_cookie_name(request),
        cookie,
        max_age=int(LIFETIME_S),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def delete_cookie(request: Request, answer: Response) -> None:
    """Add a header to the answer by which the browser deletes the session's cookie."""
    answer.delete_cookie(
        get_cookie_name(request),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def get_cookie_name(request: Request) -> str:
    """Return the name of the session's cookie. It contains the port: browsers send a cookie to all
    ports of a host.
    """
    return f"orc-{request.url.port or 443}"


def is_same_origin(request: Request) -> bool:
    """Return whether the browser says that a page of this service sent the request; False if it
    does not say that.
    """
    site = request.headers.get(
        "sec-fetch-site"
    )  # browsers send it to TLS and the loopback alone, and forge it nowhere
    if site is not None:
        return site == "same-origin"
    parts = urlsplit(request.headers.get("origin", ""))
    return (parts.scheme, parts.netloc.lower()) == (
        request.url.scheme,
        request.headers.get("host", "").lower(),
    )
