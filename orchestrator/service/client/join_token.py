"""The token with which machines join: a secret, and the fingerprint of the service's certificate."""

from __future__ import annotations

import secrets
from pathlib import Path

from orchestrator.backends.attempts.durable import PRIVATE, write_durably
from orchestrator.service.client.endpoint import Endpoint
from orchestrator.specs.errors import SpecError

FILE = "join_token"  # in the home, mode 0600
PREFIX = "orcj_"
SECRET_BYTES = 32
FORM = "what `orc up --listen` or `orc token join` prints"


def make_join_token(home: Path, endpoint: Endpoint, *, renew: bool = False) -> str:
    """Return the home's token with which machines join; create it if it is missing.

    `renew` replaces the old token, which is then invalid.
    """
    secret = "" if renew else read_join_secret(home)
    secret = secret or PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    token = f"{secret}.{endpoint.compute_fingerprint().removeprefix('sha256:')}"
    write_durably(home / FILE, token, PRIVATE)
    return token


def read_join_secret(home: Path) -> str:
    """Return the secret part of the home's token with which machines join; "" if there is no token."""
    try:
        return (home / FILE).read_text().partition(".")[0]
    except OSError:
        return ""


def split_secret_and_fingerprint(token: str) -> tuple[str, str]:
    """Return (secret, certificate's fingerprint) of a token with which machines join.

    Raises SpecError for another text; the error does not contain the text.
    """
    secret, _, digest = token.strip().partition(".")
    if not secret.startswith(PREFIX) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise SpecError("not a token for joining", source="orc join", allowed=FORM)
    return secret, f"sha256:{digest}"
