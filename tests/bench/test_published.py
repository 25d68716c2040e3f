"""What a published row that ran out of memory is set beside, and rows that were explained once stay explained."""

from __future__ import annotations

import csv
import statistics

import pytest

from orchestrator.memory.foreign.row import COLUMNS
from tests.bench.published import COLLECTED, RESERVED, SETTINGS, beside_what_ran, compared_rows


def row(name: str, layers: int, fits: str, used: str = "", **more: str) -> dict[str, str]:
    said = {
        "id": name,
        "model": "GPT",
        "arch": f"h8192 L{layers} a64 ffn4x V50257",
        "framework": "Megatron-LM",
        "gpu": "A100 80GB",
        "n_gpus": "8",
        "tp": "8",
        "micro_batch": "1",
        "seq_len": "2048",
        "precision": "bf16",
        "act_ckpt": "full",
    }
    measured = {"fits": fits, "mem": used, "mem_unit": "GB", "gpu_mem_GB": "80"}
    return dict.fromkeys((*COLUMNS, *SETTINGS), "") | said | measured | more


def test_it_is_the_nearest_that_ran_under_the_same_settings() -> None:
    rows = [
        row("far", 20, "OK", "40"),
        row("near", 30, "OK", "60"),
        row("other", 32, "OK", "50", micro_batch="2"),
        row("short", 32, "OOM"),
        row("unmeasured", 32, "OK"),
    ]
    told = beside_what_ran("short", rows)
    assert "near (GPT" in told
    assert "has to take 19 GiB" in told


def test_nothing_is_told_where_nothing_ran_so() -> None:
    assert "nothing ran" in beside_what_ran("short", [row("short", 32, "OOM"), row("other", 32, "OK", "50", tp="4")])


@pytest.mark.parametrize(
    ("source", "percent"),
    [("fms-acceleration", 4), ("litgpt", 5), ("torchtitan", 8), ("Megatron-LM", 8), ("axolotl", 6)],
)
def test_rows_that_were_explained_stay_explained(source: str, percent: float) -> None:
    with COLLECTED.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if source in row["source_repo"] and row["quality"] == "A"]
    errors = [abs(one.error) for one in compared_rows(rows)[0]]
    assert len(errors) > 10
    assert 100 * statistics.mean(errors) < percent


def test_what_came_on_top_while_a_training_ran_is_compared_with_what_the_allocator_holds() -> None:
    with COLLECTED.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source_repo"] == "Stone-ResearchLife/xMem"]
    found = compared_rows(rows)[0]
    assert found
    assert all(one.kind is RESERVED for one in found)
    assert all(one.measured_bytes % (2 * 2**20) == 0 for one in found)  # whole segments
    assert 100 * statistics.mean(abs(one.error) for one in found) < 8
