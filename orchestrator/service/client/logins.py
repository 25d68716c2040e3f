"""Stored logins of this user at services of other machines, with their tokens, in one file of mode 0600."""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.backends.attempts.durable import PRIVATE, write_durably
from orchestrator.service.client.endpoint import compute_certificate_fingerprint
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject

CONNECT_S = 10.0


@frozen
class Login:
    """The address of a service, and the credentials with which this user logs in there."""

    url: str
    token: str
    # PEM that is trusted for this service alone; None: the system's authorities decide
    certificate: str | None


def get_logins_file() -> Path:
    """Return the path of the file with stored logins, below XDG_CONFIG_HOME or ~/.config."""
    return (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "orc" / "logins.json"
    )


def find_login(service_url: str) -> Login:
    """Return the stored login for a service. Raises SpecError for a text that is no URL,
    ServiceError without a login.
    """
    service_url = normalise_url(service_url)
    fields = _read_logins().get(service_url)
    if fields is None:
        raise ServiceError(
            f"no login is kept for {service_url}. `orc login {service_url}` keeps one"
        )
    return Login(**fields)


def store_login(login: Login) -> None:
    """Store a login; it replaces a login of the same URL."""
    _write_logins({**_read_logins(), login.url: asdict(login)})


def delete_login(service_url: str) -> bool:
    """Delete the stored login for this URL; return whether there was one. Raises SpecError for a
    text that is no URL.
    """
    logins = _read_logins()
    service_url = normalise_url(service_url)
    if service_url not in logins:
        return False
    _write_logins({name: login for name, login in logins.items() if name != service_url})
    return True


def normalise_url(url: str) -> str:
    """Return scheme, host and port of an https URL. Raises SpecError for anything else."""
    parts = urlsplit(url)
    try:
        port: int | None = parts.port or 443
    except ValueError:
        port = None
    if (
        port is None
        or parts.scheme != "https"
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.username is not None
    ):
        raise SpecError(
            "not the address of a service", source="--server", got=url, allowed="https://HOST:PORT"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"https://{host}:{port}"


def fetch_pinned_certificate(url: str, fingerprint: str) -> str:
    """Return the certificate that the service presents, as PEM, if it has this fingerprint.

    Raises ServiceError where the service presents another certificate, or none.
    """
    parts = urlsplit(normalise_url(url))
    assert parts.hostname is not None, url
    try:
        shown = ssl.get_server_certificate((parts.hostname, parts.port or 443), timeout=CONNECT_S)
    except OSError as error:
        raise ServiceError(f"{url} does not answer under TLS: {error}") from None
    if compute_certificate_fingerprint(shown) != fingerprint.lower():
        raise ServiceError(
            f"{url} shows the certificate {compute_certificate_fingerprint(shown)}, "
            f"not {fingerprint}. `orc up` prints the right one; "
            "another one may mean that somebody stands between"
        )
    return shown


def _read_logins() -> dict[str, JsonObject]:
    try:
        return dict(json.loads(get_logins_file().read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"{get_logins_file()} cannot be read ({error}). Remove it and log in again"
        ) from None


def _write_logins(logins: dict[str, JsonObject]) -> None:
    path = get_logins_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_durably(path, json.dumps(logins, indent=1), PRIVATE)
