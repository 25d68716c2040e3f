"""OidcSpec: the OpenID provider for the web pages, and how claims become users and roles. It holds no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from orchestrator.specs.access import Role
from orchestrator.specs.fields import USER_NAME, Seconds
from orchestrator.specs.notify import Variable
from orchestrator.specs.spec_model import SpecModel

SAFE_URL = re.compile(
    r"(?:https://[^\s/?#@\\]+|http://(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?)(?:[/?][^\s#\\]*)?"
)


def require_safe_url(text: str) -> str:
    """Return the URL unchanged. Raises ValueError unless it uses TLS or a loopback address."""
    if not SAFE_URL.fullmatch(text):
        raise ValueError("expected a URL that begins with https://")
    return text


class SignInError(Exception):
    """A refused sign-in. Its message may be logged: it holds no token, code or secret."""


class OidcSpec(SpecModel):
    """An OpenID provider, and the mapping from its claims to users and roles. Users without a role are refused."""

    issuer: Annotated[str, AfterValidator(require_safe_url)]
    client_id: str = Field(min_length=1)
    client_secret: Variable | None = None
    scopes: tuple[str, ...] = ("profile", "email")
    user_claim: str = Field(min_length=1)
    roles_claim: str | None = None
    roles: dict[str, Role] = Field(default={})
    session: Annotated[Seconds, Field(gt=0, le=86_400)] = 8 * 3600.0

    def find_highest_role(self, claims: Mapping[str, Any]) -> Role | None:
        """Return the highest role that the claims grant; None where they grant none."""
        claim = claims.get(self.roles_claim) if self.roles_claim else None
        if isinstance(claim, str):
            groups = [claim]
        elif isinstance(claim, list):
            groups = claim
        else:
            groups = []
        roles = [
            self.roles[word] for word in groups if isinstance(word, str) and word in self.roles
        ]
        return max(roles, key=list(Role).index, default=None)

    def get_user_name(self, claims: Mapping[str, Any]) -> str:
        """Return the user name in the claims. Raises SignInError where they have no valid one."""
        if self.user_claim == "email" and claims.get("email_verified") is not True:
            raise SignInError("the address is not verified")
        claim = claims.get(self.user_claim)
        if not isinstance(claim, str) or not re.fullmatch(USER_NAME, claim):
            raise SignInError(f"the claim {self.user_claim} is no user's name")
        return claim
