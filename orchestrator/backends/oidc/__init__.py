"""Sign-in through an OpenID provider. Needs the extra `oidc`; imported where a cluster file has `oidc`."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from orchestrator.specs.errors import SpecError
from orchestrator.specs.oidc import OidcSpec

if TYPE_CHECKING:
    from orchestrator.backends.oidc.provider import Provider


def make_provider(spec: OidcSpec | None, environment: MutableMapping[str, str]) -> Provider | None:
    """Return the OpenID provider of a cluster file's `oidc`; None without that entry.

    Its secret is removed from the environment. Raises SpecError where the extra `oidc` or the
    variable is missing.
    """
    if spec is None:
        return None
    if find_spec("authlib") is None:
        raise SpecError("Authlib is missing", path="oidc", hint="pip install 'orchestrator[oidc]'")
    secret = None if spec.client_secret is None else environment.pop(spec.client_secret, "").strip()
    if secret == "":
        raise SpecError(
            "the variable is missing",
            path="oidc.client_secret",
            got=spec.client_secret,
            hint="set it where you start the service",
        )
    from orchestrator.backends.oidc.provider import Provider

    return Provider(spec, secret)
