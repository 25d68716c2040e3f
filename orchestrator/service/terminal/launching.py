"""`orc launch`: one job in the foreground. `orchestrator.orc` starts it without what is imported here."""

from __future__ import annotations

from argparse import Namespace
from typing import Annotated

import typer

from orchestrator.specs.run import LAUNCH_GRACE_S


def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="Training command, or a job file.")
    ],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", help="Devices: 0,2, UUIDs, or 2xvirtual-256MiB; without it, all visible."
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds from SIGTERM to SIGKILL.")
    ] = LAUNCH_GRACE_S,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and change; start nothing.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Do nothing where this line has finished before.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on although the script has changed.")
    ] = False,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="After SIGTERM, have Slurm queue its job again.")
    ] = False,
) -> None:
    """Run one training to its end, here and now; after a failure go on from its checkpoint with the next plan."""
    options = Namespace(**locals())
    # the launcher's modules, which no other command needs
    from orchestrator.backends.local.watch import run_with_options

    raise typer.Exit(run_with_options(options))
