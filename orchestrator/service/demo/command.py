"""`orc demo`: see out-of-memory failures and recoveries on this machine, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

FOLDER = Path("orc-demo")


def demo(
    every: Annotated[bool, typer.Option("--all", help="Run all five jobs, not two.")] = False,
    folder: Annotated[
        Path, typer.Option("--folder", help="Where its job files and its home go.")
    ] = FOLDER,
    home: Annotated[
        Path | None,
        typer.Option("--home", help="Home folder of its service; default: below the folder."),
    ] = None,
) -> None:
    """Run jobs on two virtual devices of 256 MiB: one runs out of memory and recovers. Needs no GPU."""
    from orchestrator.service.demo.run import HOME, run_demo
    from orchestrator.service.terminal.output import make_console

    folder = folder.expanduser().absolute()
    home = folder / HOME if home is None else home.expanduser().absolute()
    raise typer.Exit(run_demo(folder, home, make_console(sys.stdout), all_jobs=every))
