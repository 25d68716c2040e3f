"""The part of published step times that no model can predict."""

from __future__ import annotations

import pytest

from benchmarks.cost import contradicts_itself, knowing_layouts, off_a_line
from benchmarks.step_times import DATA, Measured, sources
from orchestrator.specs.choices import Engine, ParallelLayout, Precision
from orchestrator.specs.plan import Plan


def row(micro: int, steps: int, measured_s: float, tp: int = 1) -> Measured:
    plan = Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(dp=1, tp=tp),
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        precision=Precision.FP16,
    )
    return Measured(group=(), plan=plan, predicted_s=1.0, measured_s=measured_s)


def test_a_group_contradicts_itself_whose_fastest_plan_computed_more_samples_in_less_time() -> None:
    assert contradicts_itself([row(1, 4, 4.0), row(2, 2, 1.9)])


def test_a_group_whose_larger_micro_batches_take_longer_is_consistent() -> None:
    assert not contradicts_itself([row(1, 4, 4.0), row(2, 2, 2.1)])


def test_other_layouts_and_slower_plans_contradict_nothing() -> None:
    assert not contradicts_itself([row(1, 4, 4.0), row(2, 2, 1.9, tp=2)])
    assert not contradicts_itself([row(1, 4, 4.0), row(2, 2, 1.9), row(4, 1, 1.8, tp=2)])


def test_who_knows_the_layouts_still_errs_where_their_micro_batches_differ() -> None:
    """The prediction is 1 s for each plan: half too little for the first layout, a quarter for the other."""
    group = [row(1, 4, 1.0), row(2, 2, 3.0), row(1, 4, 4.0, tp=2)]
    assert [row.ratio for row in knowing_layouts(group)] == [1.5, 0.5, 1.0]


def test_steps_that_were_added_up_are_on_a_line_and_those_that_were_timed_are_not() -> None:
    added_up = {steps: 0.2 + 0.1 * steps for steps in (2, 4, 8, 16)}
    assert off_a_line(added_up) < 1e-12
    assert off_a_line(added_up | {8: 1.02}) > 0.01


@pytest.mark.skipif(not DATA.exists(), reason=f"the published step times are not in {DATA.name}")
def test_every_published_step_has_a_prediction_though_no_engine_of_ours_runs_its_layout() -> None:
    rows = [row for source in sources().values() for row in source]
    assert len(rows) > 1000
    assert all(0 < row.predicted_s < 1e6 for row in rows)
