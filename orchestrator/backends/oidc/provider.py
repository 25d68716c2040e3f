"""OpenID sign-in: authorization code with PKCE. The cryptography is Authlib's and joserfc's.

OpenID Connect Core 1.0, section 3.1; Discovery 1.0, section 4; RFC 7636 (PKCE); RFC 9207 (issuer in the answer).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from authlib.integrations.httpx_client import OAuth2Client
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.oidc import OidcSpec, SignInError, require_safe_url

ALGORITHMS = [
    "RS256",
    "PS256",
    "ES256",
    "EdDSA",
]  # signatures alone: no `none`, and no key that the client knows
TIMEOUT_S = 10.0
LEEWAY_S = 60  # by which clocks differ
KEEP_S = 3600.0  # discovery and keys
REFETCH_S = 60.0  # at most so often are keys asked for again because one is unknown
BODY_BYTES_MAX = 2**20
AGE_S_MAX = 600  # of a token that has just been made


@frozen
class SignIn:
    """A pending sign-in; `url` is the provider's page to which the browser is sent."""

    url: str
    state: str
    nonce: str
    verifier: str


class Provider:
    """An OpenID issuer. Every method is thread-safe and may raise SignInError."""

    def __init__(
        self, spec: OidcSpec, secret: str | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.spec = spec
        self._secret = secret
        self._clock = clock
        self._lock = threading.Lock()
        self._discovery: tuple[JsonObject, float] = (
            {},
            0.0,
        )  # discovery, and until when it counts
        self._keys: tuple[KeySet | None, float] = (None, 0.0)  # and since when they are known

    def begin_sign_in(self, redirect_uri: str) -> SignIn:
        """Return a new pending sign-in with fresh state, nonce and verifier."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        with self._make_client(redirect_uri) as client:
            url, _ = client.create_authorization_url(
                self._find_endpoint("authorization_endpoint"),
                state=state,
                code_verifier=verifier,
                nonce=nonce,
            )
        return SignIn(url=url, state=state, nonce=nonce, verifier=verifier)

    def fetch_claims(
        self, redirect_uri: str, code: str, nonce: str, verifier: str
    ) -> Mapping[str, Any]:
        """Exchange the authorization code for the provider's token; return the validated token's
        claims about the user.
        """
        try:
            with self._make_client(redirect_uri) as client:
                token = client.fetch_token(
                    self._find_endpoint("token_endpoint"), code=code, code_verifier=verifier
                )
        except SignInError:
            raise
        except Exception as error:  # the library's many: their messages may quote the answer
            raise SignInError(
                f"the provider did not take the code: {type(error).__name__}"
            ) from None
        if not isinstance(token, dict) or not isinstance(token.get("id_token"), str):
            raise SignInError("the provider sent no id token")
        return self._check_token(token["id_token"], nonce)

    def _check_token(self, token: str, nonce: str) -> Mapping[str, Any]:
        now_s = int(self._clock())
        registry = jwt.JWTClaimsRegistry(
            now=now_s,
            leeway=LEEWAY_S,
            iss={"essential": True, "value": self.spec.issuer},
            aud={"essential": True, "value": self.spec.client_id},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            claims = jwt.decode(token, self._fetch_keys_for(token), algorithms=ALGORITHMS).claims
            registry.validate(claims)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise SignInError(f"the id token is refused: {type(error).__name__} {error}") from None
        if claims["iat"] < now_s - AGE_S_MAX:
            raise SignInError("the id token is refused: it was not made just now")
        if claims.get("azp", self.spec.client_id) != self.spec.client_id:
            raise SignInError("the id token is refused: it was made for another client")
        if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and "azp" not in claims:
            raise SignInError(
                "the id token is refused: it was made for several clients, and says not for which"
            )
        return claims

    def _fetch_keys_for(self, token: str) -> KeySet:
        """Return the provider's keys; fetch them again if they lack the token's key."""
        key_id = jws.extract_compact(token.encode()).headers().get("kid")
        with self._lock:
            keys, since_s = self._keys
            is_known = keys is not None and (
                key_id is None or any(key.kid == key_id for key in keys.keys)
            )
            age_s = self._clock() - since_s
            if keys is None or age_s > KEEP_S or (not is_known and age_s > REFETCH_S):
                keys = KeySet.import_key_set(self._fetch_json(self._find_endpoint("jwks_uri")))  # type: ignore[arg-type]
                self._keys = keys, self._clock()
        return keys

    def _find_endpoint(self, endpoint_name: str) -> str:
        """Return this endpoint's URL from the discovery document, which must name the trusted
        issuer.
        """
        discovery, until_s = self._discovery
        if self._clock() >= until_s:
            discovery = self._fetch_json(
                f"{self.spec.issuer.rstrip('/')}/.well-known/openid-configuration"
            )
            if discovery.get("issuer") != self.spec.issuer:
                raise SignInError("the provider's discovery document is of another issuer")
            self._discovery = discovery, self._clock() + KEEP_S
        try:
            return require_safe_url(str(discovery.get(endpoint_name, "")))
        except ValueError as error:
            raise SignInError(f"the provider's {endpoint_name} cannot be used: {error}") from None

    def _fetch_json(self, url: str) -> JsonObject:
        try:
            with httpx.Client(timeout=TIMEOUT_S) as client, client.stream("GET", url) as answer:
                answer.raise_for_status()
                body = b""
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > BODY_BYTES_MAX:
                        raise SignInError(f"{url} is too long")
            document = httpx.Response(200, content=body).json()
        except (httpx.HTTPError, ValueError) as error:
            raise SignInError(
                f"the provider does not answer at {url}: {type(error).__name__}"
            ) from None
        if not isinstance(document, dict):
            raise SignInError(f"{url} is no JSON object")
        return document

    def _make_client(self, redirect_uri: str) -> OAuth2Client:
        return OAuth2Client(
            client_id=self.spec.client_id,
            client_secret=self._secret,
            token_endpoint_auth_method="none" if self._secret is None else "client_secret_basic",
            scope=" ".join(dict.fromkeys(("openid", *self.spec.scopes))),
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            timeout=TIMEOUT_S,
            follow_redirects=False,
        )
