"""`orc diagnose`: why a training ended, by its logs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer
from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.errors import SpecError
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator.service.commands.diagnose import Diagnosis


def diagnose(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...",
            help="Log of each rank, rank 0 first, or the folder of an attempt; with --should-be, a job's id.",
        ),
    ],
    exit_codes: Annotated[
        list[int] | None,
        typer.Option(
            "--exit-code",
            min=-64,
            max=255,
            help="Exit code, or minus the signal; default: 1. Repeat it for each log.",
        ),
    ] = None,
    oom_kills: Annotated[
        int,
        typer.Option(
            "--oom-kills", min=0, help="How far the kernel's `oom_kill` counter rose meanwhile."
        ),
    ] = 0,
    should_be: Annotated[
        FailureKind | None,
        typer.Option(
            "--should-be",
            metavar="KIND",
            help="Print the job's last failure as a case of this kind, redacted.",
        ),
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Say why a training ended that ran elsewhere: its first cause, and what to do. Needs no service."""
    from orchestrator.service.commands import diagnose as work

    if should_be is None:
        diagnosis = work.diagnose_training([Path(log) for log in logs], exit_codes or (), oom_kills)
        print_answer(asdict(diagnosis), as_json, _diagnosis_table(diagnosis))
        return
    if len(logs) != 1 or os.path.isfile(logs[0]):
        raise SpecError(
            "a case is made of one job",
            path="JOB",
            got=" ".join(logs),
            allowed="an id of `orc queue`",
        )
    print(work.export_test_case(connect_client(home), logs[0], should_be), end="")


def _diagnosis_table(diagnosis: Diagnosis) -> Table:
    from rich.text import Text

    from orchestrator.service.terminal.plain_tables import plain_grid

    table = plain_grid()
    place = f"{diagnosis.file}:{diagnosis.line_number}: {diagnosis.line}" if diagnosis.file else ""
    rows = {"kind": diagnosis.kind or "none", "why": diagnosis.reason, "where": place}
    rows |= {"orc would": diagnosis.orc_would, "you can": diagnosis.you_can}
    for name, text in rows.items():
        if text:
            table.add_row(Text(name, style="bold"), Text(text))
    return table
