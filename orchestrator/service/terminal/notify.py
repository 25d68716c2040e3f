"""Commands about notifications."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer
from orchestrator.specs.run import DEFAULT_HOME

notify = typer.Typer(
    no_args_is_help=True, help="Notifications of failed and late jobs, and the morning report."
)


@notify.command("test")
def try_targets(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET...]", help="Targets of the cluster file; without any, all."
        ),
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Send a notice to targets now, and say what came of it. Exits with 1 where one could not be reached."""
    problems = connect_client(home).send_test_notices(targets or ())
    lines = [f"{name}: {problem or 'delivered'}" for name, problem in problems.items()]
    print_answer(
        {"problems": problems},
        as_json,
        "\n".join(lines) or "The cluster file names no target under `notify`.",
    )
    raise typer.Exit(any(problems.values()))


@notify.callback()
def _group() -> None:
    """Notifications of failed and late jobs, and the morning report."""
