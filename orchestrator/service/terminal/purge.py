"""The command that removes files of ended jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import DEFAULT_HOME
from orchestrator.specs.units import SECOND_UNITS, format_bytes

if TYPE_CHECKING:
    from rich.console import Group

DAY_S = SECOND_UNITS["d"]


def purge(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing, and show what would go.")
    ] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Remove files of ended jobs as `keep` of the cluster file says. Exits with 1 where some cannot be removed."""
    answer = connect_client(home).purge_files(dry_run=dry_run)
    print_answer(answer, as_json, _make_purge_tables(answer))
    raise typer.Exit(bool(answer["failed"] or answer["beyond_bytes"]))


def _make_purge_tables(answer: JsonObject) -> Group:
    """Return tables of what is removed, with age and reason, of what stays and why, and of the
    sums.
    """
    from rich.console import Group
    from rich.text import Text

    from orchestrator.service.terminal.plain_tables import make_plain_grid

    goes = make_plain_grid()
    stays = make_plain_grid()
    for part in answer["goes"]:
        age = f"ended {(time.time() - part['ended_at_s']) / DAY_S:.1f} d ago"
        goes.add_row(
            Text(part["job"]), Text(part["part"]), format_bytes(part["bytes"]), age, part["why"]
        )
    for part, why in answer["failed"].items():
        goes.add_row(Text(part), "cannot be removed", "", "", Text(why))
    for reason in answer["stays"]:
        stays.add_row(
            "stays", str(reason["count"]), format_bytes(reason["bytes"]), Text(reason["reason"])
        )
    removed_text = format_bytes(sum(part["bytes"] for part in answer["goes"]))
    verb = "would go" if answer["dry_run"] else "go; the service deletes them now"
    more = f", and {answer['more']} parts the next time" if answer["more"] else ""
    beyond = (
        f" It stays {format_bytes(answer['beyond_bytes'])} above its budget."
        if answer["beyond_bytes"]
        else ""
    )
    return Group(
        goes, stays, f"{removed_text} of {format_bytes(answer['home_bytes'])} {verb}{more}.{beyond}"
    )
