"""The closed form against real engines on real ranks under a virtual device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.memory.deepspeed import CUDA_BUCKETS, VIRTUAL_BUCKETS
from orchestrator.planning.frontier import MARGIN
from orchestrator.specs.plan import Engine, Precision
from orchestrator.training import deepspeed_settings as engine
from tests.memory.matrix import DEEP, STAGES, WIDE, Row, full, plans, rows, table

MEAN_ERROR_MAX = 0.05
pytestmark = pytest.mark.timeout(600)  # 40 s of launches on two idle cores, several times that on busy ones


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """One launch per engine, and one of a lone rank whose embedding and head share a weight."""
    folder = tmp_path_factory.mktemp("peaks")
    found = [row for kind in STAGES for row in rows(DEEP, plans(kind, (2, 8), Precision.FP32), folder / kind)]
    lone = [plan for plan in plans(Engine.TORCH, (1, 4), Precision.FP32, ranks=1) if not plan.zero_stage]
    return found + rows(dataclasses.replace(WIDE, tie_word_embeddings=True), lone, folder / "lone")


def _mean_error(found: Sequence[Row]) -> float:
    return sum(abs(row.error) for row in found) / len(found)


def test_the_mean_error_over_engines_stages_micro_batches_and_checkpointing_is_within_5_percent(
    measured: list[Row],
) -> None:
    assert _mean_error(measured) <= MEAN_ERROR_MAX, table(measured)


def test_no_plan_called_fitting_needs_more_than_the_capacity(measured: list[Row]) -> None:
    short = [row for row in measured if row.measured_bytes > row.predicted_bytes * MARGIN]
    assert not short, table(short)


def test_the_model_of_deepspeed_knows_the_buckets_that_the_engine_sets() -> None:
    for modelled, used in ((VIRTUAL_BUCKETS, engine.CPU_BUCKETS), (CUDA_BUCKETS, engine.CUDA_BUCKETS)):
        assert (modelled.reduce, modelled.live, modelled.persistent) == (used.reduce, used.live, used.persistent)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_full_matrix_with_bf16_and_large_vocabularies_holds_the_same_bars(tmp_path: Path) -> None:
    found = full(tmp_path)
    assert _mean_error(found) <= MEAN_ERROR_MAX, table(found)
    assert not [row for row in found if row.measured_bytes > row.predicted_bytes * MARGIN], table(found)
