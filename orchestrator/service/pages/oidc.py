"""Sign-in through an OpenID provider: redirects, handles the callback, and opens a session of the service."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from orchestrator.service.pages.frame import render_page
from orchestrator.service.server.access.gate import OIDC, OIDC_BACK, PAGES, Gate
from orchestrator.service.server.access.sessions import set_cookie
from orchestrator.specs.access import Role
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.oidc import SignInError

if TYPE_CHECKING:
    from orchestrator.backends.oidc.provider import Provider

BEGUN_S = 600.0  # in which somebody signs in at the provider
USED_MAX = 10_000  # states of the last BEGUN_S that were answered
REFUSED = "This sign in was refused. The service's log says why."

log = logging.getLogger(__name__)


class OidcSignIn:
    """The two routes by which a browser signs in at an OpenID provider.

    The state of a pending sign-in is in a signed cookie, so it uses no memory here.
    """

    def __init__(self, provider: Provider, gate: Gate) -> None:
        self._provider = provider
        self._accounts = gate.accounts
        self._gate = gate
        self._used: OrderedDict[str, float] = OrderedDict()
        self._lock = Lock()

    def begin_sign_in(self, request: Request, return_path: str) -> Response:
        """Return a redirect to the provider's page; after the sign-in the browser goes to the page
        `return_path`.
        """
        if self._gate.has_sent_too_many_wrong_tokens(request, adds_wrong_token=False):
            return self._refuse(request, "too many wrong answers", 429)
        try:
            begun = self._provider.begin_sign_in(_make_callback_url(request))
        except SignInError as error:
            return self._refuse(request, str(error), 502)
        sign_in = {
            "state": begun.state,
            "nonce": begun.nonce,
            "verifier": begun.verifier,
            "next": return_path,
            "until_s": time.time() + BEGUN_S,
        }
        text = json.dumps(sign_in).encode()
        answer = RedirectResponse(begun.url, 303)
        answer.set_cookie(
            _get_cookie_name(request),
            self._gate.sessions.sign_text(base64.urlsafe_b64encode(text).decode()),
            max_age=int(BEGUN_S),
            path=OIDC,
            httponly=True,
            samesite="lax",  # the provider's page leads back here
            secure=request.url.scheme == "https",
        )
        return answer

    def finish_sign_in(self, request: Request) -> Response:
        """Return the answer to the provider's callback: a redirect with a session, or a refusal.

        The callback is accepted once, in the browser that began the sign-in, within BEGUN_S
        seconds.
        """
        if self._gate.has_sent_too_many_wrong_tokens(request, adds_wrong_token=False):
            return self._refuse(request, "too many wrong answers", 429)
        try:
            begun = self._read_pending_sign_in(request)
            query = request.query_params
            if query.get("iss", self._provider.spec.issuer) != self._provider.spec.issuer:
                raise SignInError("another issuer answered")
            if "error" in query or not query.get("code"):
                raise SignInError("the provider sent no code")
            claims = self._provider.fetch_claims(
                _make_callback_url(request), query["code"], begun["nonce"], begun["verifier"]
            )
            user = self._provider.spec.get_user_name(claims)
            role = self._find_role(user, claims)
        except SignInError as error:
            self._gate.has_sent_too_many_wrong_tokens(request)
            return self._refuse(request, str(error), 403)
        cookie = self._gate.sessions.open_session(user, role, self._provider.spec.session)
        log.info("signed in user=%s role=%s by=%s", user, role, self._provider.spec.issuer)
        # a page, and no redirect: browsers send a SameSite=Strict cookie only where a page of ours
        # leads on
        answer = render_page(request, "signed_in", came_from=begun["next"])
        answer.delete_cookie(_get_cookie_name(request), path=OIDC)
        set_cookie(request, answer, cookie)
        return answer

    def _read_pending_sign_in(self, request: Request) -> JsonObject:
        text = self._gate.sessions.find_verified_text(
            request.cookies.get(_get_cookie_name(request), "")
        )
        if text is None:
            raise SignInError("the browser has begun no sign in")
        begun: JsonObject = json.loads(base64.urlsafe_b64decode(text))
        if not hmac.compare_digest(
            begun["state"].encode(), request.query_params.get("state", "").encode()
        ):
            raise SignInError("the state is not the one of this browser")
        now_s = time.time()
        with self._lock:
            while self._used and next(iter(self._used.values())) < now_s:
                self._used.popitem(last=False)
            if (
                now_s >= begun["until_s"]
                or begun["state"] in self._used
                or len(self._used) >= USED_MAX
            ):
                raise SignInError("the state was used before, or is too old")
            self._used[begun["state"]] = now_s + BEGUN_S
        return begun

    def _find_role(self, user: str, claims: Mapping[str, Any]) -> Role:
        role_by_claims = self._provider.spec.find_highest_role(claims)
        role_by_account = next(
            (account.role for account in self._accounts.list_users() if account.name == user), None
        )
        role = role_by_claims or role_by_account
        if role is None:
            raise SignInError(
                f"{user} has no role: `orc user set` gives one, or `roles` of the cluster file"
            )
        return role

    def _refuse(self, request: Request, reason: str, status: int) -> Response:
        log.warning("sign in refused: %s", reason)
        return render_page(
            request,
            "login",
            status=status,
            message=REFUSED,
            came_from=PAGES,
            is_from_elsewhere=False,
            oidc=OIDC,
        )


def _make_callback_url(request: Request) -> str:
    """Return the URL to which the provider leads the browser back. The gate has checked the
    request's Host.
    """
    return f"{request.url.scheme}://{request.headers['host']}{OIDC_BACK}"


def _get_cookie_name(request: Request) -> str:
    return f"orc-oidc-{request.url.port or 443}"
