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
    """Return the home's token, created where missing; with `renew`, a new one that invalidates the old."""
    secret = "" if renew else secret_of(home)
    secret = secret or PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    token = f"{secret}.{endpoint.fingerprint().removeprefix('sha256:')}"
    write_durably(home / FILE, token, PRIVATE)
    return token


def secret_of(home: Path) -> str:
    """Return the secret that this home's service accepts; "" without one."""
    try:
        return (home / FILE).read_text().partition(".")[0]
    except OSError:
        return ""


def parts_of(token: str) -> tuple[str, str]:
    """Return (secret, fingerprint) of a token. Raises SpecError, which does not repeat the token."""
    secret, _, digest = token.strip().partition(".")
    if not secret.startswith(PREFIX) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise SpecError("not a token for joining", source="orc join", allowed=FORM)
    return secret, f"sha256:{digest}"
