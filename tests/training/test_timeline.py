"""Laws of the linear extrapolation from two recorded micro-batches."""

from __future__ import annotations

import pytest
from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.job.model import TrainingSpec
from orchestrator.specs.profile import ModelProfile
from orchestrator.training.tracing.model_builder import Arithmetic, Request
from orchestrator.training.tracing.op_recorder import LEAF_MODULES
from orchestrator.training.tracing.timeline import (
    Event,
    ModelPlace,
    PlaceVisit,
    RecordedSteps,
    make_timeline,
)
from orchestrator.training.tracing.trace import trace_arithmetics
from tests.memory.matrix import MIXED, job


def events(*lived: tuple[int, int]) -> list[Event]:
    """Events from (live bytes, existing gradients)."""
    return [Event(live_bytes, gradients, 0, 0, 0) for live_bytes, gradients in lived]


def test_if_the_micro_batch_changes_the_operations_moments_of_equal_gradients_are_matched() -> None:
    single = events((0, 0), (100, 1), (90, 1), (50, 3))
    two = events((0, 0), (200, 1), (190, 2), (100, 3))
    steps = RecordedSteps(
        mode=ActivationCheckpointing.NONE,
        sharded=False,
        zero3=False,
        samples=(1, 2),
        phases=([PlaceVisit(0, 0, True, single)], [PlaceVisit(0, 0, True, two)]),
    )
    line = make_timeline([ModelPlace(name="layer", is_layer=True, parameters=3)], [steps])
    lines = {
        moment.own: (moment.fixed_bytes, moment.sample_bytes)
        for stretch in line.stretches
        for moment in stretch
    }
    assert lines == {0: (0, 0), 1: (0, 100), 3: (0, 50)}


@pytest.fixture(scope="module")
def mixtures() -> tuple[ModelProfile, ModelProfile]:
    """The trace of a mixture of experts, and its closed form."""
    request = Request(
        model=MIXED,
        training=TrainingSpec(),
        family="mixture",
        sequence_length=16,
        arithmetics=(Arithmetic(precision=Precision.FP32, autocast=False),),
    )
    (traced,) = trace_arithmetics(request)
    closed = find_rank_profile(
        read_model_request(job(MIXED)), RankShare(precision=Precision.FP32, sequence_length=16)
    )
    assert closed is not None
    return traced, closed


def test_a_trace_knows_the_weights_of_experts_whose_views_are_saved(
    mixtures: tuple[ModelProfile, ModelProfile],
) -> None:
    down, router = 6 * 192 * 128, 6 * 128
    assert [profile.segments[1].viewed for profile in mixtures] == [3 * down] * 2
    assert [profile.segments[1].side_by_side for profile in mixtures] == [3 * down + router] * 2


def test_a_trace_knows_the_leaf_whose_gradients_wait_for_each_other(
    mixtures: tuple[ModelProfile, ModelProfile],
) -> None:
    layer = mixtures[0].segments[1]
    down, router = 6 * 192 * 128, 6 * 128
    assert layer.leaf == (router, 2 * down, down)
    assert layer.leaf_until == sum(layer.leaf)


def test_experts_are_products_of_their_rows_as_in_closed_form(
    mixtures: tuple[ModelProfile, ModelProfile],
) -> None:
    traced, closed = (profile.segments[1] for profile in mixtures)
    assert traced.forward_flops == closed.forward_flops
    assert sorted(traced.matmuls) == sorted(closed.matmuls)


def test_gradients_made_in_the_forward_pass_are_not_its_products(
    mixtures: tuple[ModelProfile, ModelProfile],
) -> None:
    heads = [profile.segments[-1] for profile in mixtures]
    assert [head.matmuls for head in heads] == [((16, 128, 512),)] * 2
    assert [head.forward_flops for head in heads] == [2 * 16 * 128 * 512] * 2


def test_leaf_modules_are_those_of_deepspeed() -> None:
    assert set(LEAF_MODULES) == set(DEFAULT_LEAF_MODULE_CLASSES)
