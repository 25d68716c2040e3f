"""`orc estimate ROWS.csv`: every row has its bytes or a reason, and a file that is none is refused once, completely."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.memory.foreign.row import COLUMNS
from orchestrator.service.published import capacity_bytes_of, estimated_row, read_rows, rows_table
from orchestrator.specs.errors import SpecError

HEADER = "id,model,arch,gpu_mem_GB,n_gpus,framework,micro_batch,seq_len,precision,act_ckpt,peft,mem\n"
ROWS = HEADER + (
    "a1,Llama-2 7B,,24,1,HF Trainer,1,512,bf16,True,QLoRA r8 all linear,99\n"
    "a2,Stable Diffusion 1.5,,24,1,PyTorch,32,512x512,fp32,none,,99\n"
    "a3,Llama 3.1 70B,,24,1,HF Trainer,1,512,bf16,True,LoRA r8,99\n"
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text(ROWS)
    return file


def test_every_row_has_its_bytes_or_the_reason_why_not(rows: Path) -> None:
    fitting, convolutional, large = (estimated_row(row) for row in read_rows(rows))
    assert (fitting["fits"], convolutional["fits"], large["fits"]) == (True, None, False)
    assert "convolutional" in convolutional["reason"]
    assert convolutional["device_gib"] is None
    assert fitting["reason"] == ""
    assert fitting["allocated_gib"] == pytest.approx(sum(fitting["by_cause_gib"].values()), abs=0.01)


def test_a_lower_bound_never_says_that_something_fits(rows: Path) -> None:
    row = {**read_rows(rows)[0], "micro_batch": ""}
    assert estimated_row(row)["is_lower_bound"]
    assert estimated_row(row)["fits"] is None
    assert estimated_row({**row, "model": "Llama 3.1 405B"})["fits"] is False


@pytest.mark.parametrize(
    ("gpu", "size", "gib"),
    [
        ("", "80", 79.2),
        ("A100 80GB", "80", 79.15),
        ("NVIDIA T4", "16", 14.58),
        ("A10G", "24", 21.99),
        ("X1", "16", 15.84),
    ],
)
def test_a_device_has_what_its_driver_shows(gpu: str, size: str, gib: float) -> None:
    assert capacity_bytes_of(size, gpu) == pytest.approx(gib * 2**30, rel=1e-6)


def test_the_command_answers_as_json_and_as_a_table(rows: Path) -> None:
    answered = CliRunner().invoke(app, ["estimate", str(rows), "--json"])
    assert answered.exit_code == 0
    assert [row["id"] for row in json.loads(answered.stdout)["rows"]] == ["a1", "a2", "a3"]
    shown = CliRunner().invoke(app, ["estimate", str(rows)])
    assert "convolutional" in shown.stdout


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("name,value\nx,1\n")
    with pytest.raises(SpecError, match="no column model"):
        read_rows(file)
    with pytest.raises(SpecError, match="cannot be read"):
        read_rows(tmp_path / "absent.csv")
    file.write_text("")
    with pytest.raises(SpecError, match="no column model"):
        read_rows(file)
    file.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(SpecError, match="no rows"):
        read_rows(file)


def test_rows_without_an_id_are_numbered(rows: Path) -> None:
    rows.write_text("\n".join(line.partition(",")[2] for line in ROWS.splitlines()))
    assert [row["id"] for row in read_rows(rows)] == ["1", "2", "3"]


def test_the_table_is_readable_in_80_columns(rows: Path) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(rows_table([estimated_row(row) for row in read_rows(rows)]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert "RESERVED" in shown


def test_settings_beside_a_csv_file_are_refused(rows: Path) -> None:
    answered = CliRunner().invoke(app, ["estimate", str(rows), "--set", "dp=2"])
    assert isinstance(answered.exception, SpecError)
