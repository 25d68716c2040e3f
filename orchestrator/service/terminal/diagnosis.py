"""`orc diagnose`: why a training ended, by its logs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import AsJson
from orchestrator.service.terminal.output import print_answer

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator.service.commands.diagnose import Diagnosis


def diagnose(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...",
            help="Log of each rank, rank 0 first, or the folder of an attempt.",
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
    as_json: AsJson = False,
) -> None:
    """Say why a training ended that ran elsewhere: its first cause, and what to do. Needs no service."""
    from orchestrator.service.commands import diagnose as work

    diagnosis = work.diagnose_training([Path(log) for log in logs], exit_codes or (), oom_kills)
    print_answer(asdict(diagnosis), as_json, _make_diagnosis_table(diagnosis))


def _make_diagnosis_table(diagnosis: Diagnosis) -> Table:
    from rich.text import Text

    from orchestrator.service.terminal.plain_tables import make_plain_grid

    table = make_plain_grid()
    place = f"{diagnosis.file}:{diagnosis.line_number}: {diagnosis.line}" if diagnosis.file else ""
    rows = {"kind": diagnosis.kind or "none", "why": diagnosis.reason, "where": place}
    rows |= {"orc would": diagnosis.orc_would, "you can": diagnosis.you_can}
    for name, text in rows.items():
        if text:
            table.add_row(Text(name, style="bold"), Text(text))
    return table
