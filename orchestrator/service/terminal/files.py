"""`orc init` and `orc schema`: how a job file is begun, and what it may hold."""

# Imports of heavy packages stand in the commands that need them.
from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.service.terminal.output import show_spinner


class SchemaName(StrEnum):
    """The kinds of file whose JSON Schema `orc schema` prints."""

    JOB = "job"
    CLUSTER = "cluster"


def init(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="Training command or script; read, never run."),
    ],
    run_help: Annotated[
        bool,
        typer.Option(
            "--run-help", help="Run the command with --help, up to 20 s, to read its flags."
        ),
    ] = False,
) -> None:
    """Print a job file for a training command, proposed from its files and options."""
    from orchestrator.service.commands.init.proposal import propose_job_file

    with show_spinner("reading the command's files"):
        job_file = propose_job_file(command, Path.cwd(), os.environ, run_help)
    sys.stdout.write(job_file)


def schema(
    name: Annotated[SchemaName, typer.Argument(help="Kind of file.")] = SchemaName.JOB,
) -> None:
    """Print the JSON Schema of job or cluster files, for editors."""
    from orchestrator.specs.cluster import make_cluster_json_schema
    from orchestrator.specs.job.spec import make_job_json_schema

    print(
        json.dumps(
            make_job_json_schema() if name is SchemaName.JOB else make_cluster_json_schema(),
            indent=2,
        )
    )
