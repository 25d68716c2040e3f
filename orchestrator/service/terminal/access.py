"""Commands for access to a service: logins on this machine; users, tokens and the audit log on the service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer
from orchestrator.specs.access import Role
from orchestrator.specs.errors import SpecError
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import DEFAULT_HOME
from orchestrator.specs.units import parse_seconds

if TYPE_CHECKING:
    from rich.table import Table

users = typer.Typer(no_args_is_help=True, help="Users of the service and their roles.")
tokens = typer.Typer(
    no_args_is_help=True, help="Tokens by which users of other machines reach the service."
)

Name = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.")]
Url = Annotated[
    str, typer.Argument(metavar="URL", help="Address of the service, as https://HOST:PORT.")
]


def login(
    url: Url,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            "--fingerprint", help="Of the service's own certificate, as `orc up` prints it."
        ),
    ] = None,
    authority: Annotated[
        Path | None, typer.Option("--ca", help="PEM file of the authority; default: the system's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Store a login for another service. The token is read from ORC_TOKEN, a prompt, or a pipe."""
    from orchestrator.service.client.client import Client
    from orchestrator.service.client.logins import (
        Login,
        fetch_pinned_certificate,
        get_logins_file,
        normalise_url,
        store_login,
    )

    url = normalise_url(url)
    if fingerprint is not None and authority is not None:
        raise SpecError("say one of them", source="--fingerprint", allowed="--fingerprint or --ca")
    certificate = _read_file(authority) if authority else None
    if fingerprint is not None:
        certificate = fetch_pinned_certificate(url, fingerprint)
    new_login = Login(url=url, token=_read_token(), certificate=certificate)
    with closing(Client(new_login)) as client:
        who = client.whoami()
    store_login(new_login)
    text = f"Logged in to {url} as {who['user']} ({who['role']}). `orc --server {url} queue` shows its queue."
    print_answer({"server": url, **who, "kept_in": str(get_logins_file())}, as_json, text)


def logout(url: Url, as_json: AsJson = False) -> None:
    """Delete the stored login for a service."""
    from orchestrator.service.client.logins import delete_login

    forgotten = delete_login(url)
    print_answer(
        {"forgotten": forgotten},
        as_json,
        "The login is forgotten." if forgotten else "No login was kept for it.",
    )


def whoami(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show the user and the role of this machine's token in the service."""
    who = connect_client(home).whoami()
    print_answer(dict(who), as_json, f"{who['user']} ({who['role']})")


def audit(
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1000, help="Rows to show, newest first.")
    ] = 100,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Show who changed what: every request that changes something, with its answer."""
    rows = connect_client(home).list_audit_rows(limit)
    print_answer(
        {"rows": rows},
        as_json,
        _make_table("audit", rows) if rows else "Nothing was changed over HTTP yet.",
    )


@users.command("set")
def set_user(
    name: Name,
    role: Annotated[Role, typer.Option("--role", help="What the user may do.")] = Role.MEMBER,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Add a user, or change a user's role."""
    connect_client(home).set_user(name, role)
    print_answer(
        {"user": name, "role": role},
        as_json,
        f"{name} is {role}. `orc token create {name}` makes a token.",
    )


@users.command("remove")
def remove_user(name: Name, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Remove a user and all tokens; the user's jobs stay."""
    connect_client(home).remove_user(name)
    print_answer({"removed": name}, as_json, f"{name} is removed, with all tokens.")


@users.command("list")
def list_users(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """List the users and their roles."""
    rows = connect_client(home).list_users()
    table = (
        _make_table("users", rows) if rows else "There are no users. `orc user set NAME` adds one."
    )
    print_answer({"users": rows}, as_json, table)


@tokens.command("create")
def create_token(
    name: Name,
    expires: Annotated[
        str, typer.Option("--expires", help="Lifetime, such as 12h or 90d; or `never`.")
    ] = "90d",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Make a token for a user and print it. It is shown once: the service keeps only its SHA-256."""
    try:
        lifetime_s = None if expires == "never" else parse_seconds(expires)
    except ValueError as error:
        raise SpecError(
            str(error), source="--expires", got=expires, allowed="a duration, or never"
        ) from None
    secret, token = connect_client(home).create_token(name, lifetime_s)
    print_answer({"secret": secret, "token": token}, as_json, secret)


@tokens.command("list")
def list_tokens(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """List the tokens: user, expiry and last use of each."""
    rows = connect_client(home).list_tokens()
    table = (
        _make_table("tokens", rows)
        if rows
        else "There are no tokens. `orc token create USER` makes one."
    )
    print_answer({"tokens": rows}, as_json, table)


@tokens.command("revoke")
def revoke_token(
    number: Annotated[int, typer.Argument(metavar="ID", help="As `orc token list` shows it.")],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Revoke a token, at once."""
    connect_client(home).revoke_token(number)
    print_answer({"revoked": number}, as_json, f"Token {number} is revoked.")


def _read_token() -> str:
    """Return the token from ORC_TOKEN, a hidden prompt, or a pipe, and never from the command line,
    which others can read.
    """
    token = os.environ.get("ORC_TOKEN")
    if token is None:
        token = (
            typer.prompt("Token", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
        )
    return str(token).strip()


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot be read as a PEM file: {error}", source=str(path)) from None


def _make_table(name: str, rows: Sequence[JsonObject]) -> Table:
    from orchestrator.service.terminal.tables import draw_table
    from orchestrator.service.views.columns import select_columns

    return draw_table(select_columns(name), rows, {})
