"""Options that commands share, and the service that they select."""

from __future__ import annotations

from contextvars import ContextVar
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.completion import complete_job_id

if TYPE_CHECKING:
    from orchestrator.service.client.client import Client
    from orchestrator.service.client.logins import Login

SERVER: ContextVar[str | None] = ContextVar(
    "SERVER", default=None
)  # of `orc --server URL`, for one command

Home = Annotated[
    Path,
    typer.Option(
        "--home", envvar="ORC_HOME", help="Home folder of the service: queue, logs, records."
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="Cluster file (YAML); without it, the hardware of the service or of this machine.",
    ),
]
JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="Job file (YAML).")]
JobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Id of the job, as `orc queue` shows it.",
        autocompletion=complete_job_id,
    ),
]
JobOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="JOB|FOLDER",
        help="Id of the job, or a folder in which `orc launch` ran.",
        autocompletion=complete_job_id,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key of the job file, by its dotted path; repeatable.",
    ),
]
Pinned = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="SETTING=VALUE,...",
        help="Pin settings of the plan, as `plan:` of the job file does.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def check_finite(value: float | None) -> float | None:
    """Return an option's number unchanged. Raises typer.BadParameter for `nan` and infinity, which
    ranges do not exclude.
    """
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def select_login_or_home(home: Path) -> Path | Login:
    """Return the login for `orc --server URL` if that option is used, else the home folder.

    Raises SpecError for a text that is no URL, ServiceError without a stored login.
    """
    url = SERVER.get()
    if url is None:
        return home.expanduser()
    from orchestrator.service.client.logins import find_login

    return find_login(url)


def connect_client(home: Path) -> Client:
    """Return a client of the service that `orc --server URL` names; without that option, of the
    home's service.
    """
    from orchestrator.service.client.client import Client

    return Client(select_login_or_home(home))
