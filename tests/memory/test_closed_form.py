"""The closed form against real engines on real ranks under a virtual device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.memory.deepspeed import CUDA_BUCKETS, VIRTUAL_BUCKETS
from orchestrator.memory.pipeline import layers_of
from orchestrator.memory.profiles import CHUNK_TOKENS
from orchestrator.planning.frontier import MARGIN
from orchestrator.specs.plan import ActivationCheckpointing, Engine, Precision
from orchestrator.training import cross_entropy
from orchestrator.training import deepspeed_settings as engine
from orchestrator.training.pipeline import layer_range
from tests.memory.matrix import ADAPTED, DEEP, WIDE, Row, adapted_plans, full, parallel_plans, plans, rows, table

MEAN_ERROR_MAX = 0.02
NONE, SELECTIVE, FULL = ActivationCheckpointing
pytestmark = pytest.mark.timeout(600)  # 60 s of launches on two idle cores, several times that on busy ones


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """One launch per engine, per number of ranks of other layouts, of adapters, and of a lone rank's shared weight."""
    folder = tmp_path_factory.mktemp("peaks")
    found = rows(DEEP, plans(Engine.TORCH, (2, 8), Precision.FP32), folder / "torch")
    found += rows(DEEP, plans(Engine.DEEPSPEED, (2,), Precision.FP32, modes=(NONE, FULL)), folder / "deepspeed")
    found += rows(DEEP, parallel_plans(2, (8,), Precision.FP32, (NONE, SELECTIVE)), folder / "two")
    found += rows(DEEP, parallel_plans(4, (2,), Precision.BF16, (NONE,)), folder / "four")
    found += rows(ADAPTED, adapted_plans(), folder / "adapted")
    lone = [plan for plan in plans(Engine.TORCH, (1, 4), Precision.FP32, ranks=1) if not plan.zero_stage]
    return found + rows(dataclasses.replace(WIDE, tie_word_embeddings=True), lone, folder / "lone")


def _mean_error(found: Sequence[Row]) -> float:
    return sum(abs(row.error) for row in found) / len(found)


def test_the_mean_error_over_engines_stages_micro_batches_and_checkpointing_is_within_2_percent(
    measured: list[Row],
) -> None:
    assert _mean_error(measured) <= MEAN_ERROR_MAX, table(measured)


def test_no_plan_called_fitting_needs_more_than_the_capacity(measured: list[Row]) -> None:
    short = [row for row in measured if row.measured_bytes > row.predicted_bytes * MARGIN]
    assert not short, table(short)


def test_the_model_of_deepspeed_knows_the_buckets_that_the_engine_sets() -> None:
    for modelled, used in ((VIRTUAL_BUCKETS, engine.CPU_BUCKETS), (CUDA_BUCKETS, engine.CUDA_BUCKETS)):
        assert (modelled.reduce, modelled.live, modelled.persistent) == (used.reduce, used.live, used.persistent)
        assert modelled.swapped == used.swapped


def test_the_model_knows_the_chunks_of_the_loss_and_the_cut_of_the_pipeline() -> None:
    assert CHUNK_TOKENS == cross_entropy.CHUNK_TOKENS
    for layers, count in ((4, 2), (7, 4), (80, 32)):
        cut = [len(layer_range(layers, stage, count)) for stage in range(count)]
        assert [layers_of(layers, stage, count) for stage in range(count)] == cut


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_full_matrix_with_bf16_and_large_vocabularies_holds_the_same_bars(tmp_path: Path) -> None:
    found = full(tmp_path)
    assert _mean_error(found) <= MEAN_ERROR_MAX, table(found)
    assert not [row for row in found if row.measured_bytes > row.predicted_bytes * MARGIN], table(found)
