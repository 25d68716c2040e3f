"""The account of a finished job: prediction, measurement, the wrong term and its consequences."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.memory.calibration.correction import compute_activation_factor_of_peak
from orchestrator.planning.picture import Mark
from orchestrator.scheduling.reports.explain import explain_attempt, make_plan_chart
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.units import format_bytes
from tests.scheduling.factories import MIB, decoder_spec, script_spec
from tests.scheduling.test_step import (
    NODES,
    SUCCESS,
    finished,
    only_job,
    oom,
    released,
    run,
    submitted,
)


def test_a_failure_is_accounted_for_from_prediction_to_next_plan() -> None:
    state, _ = run(NODES, submitted(), finished(oom()), released())
    job = only_job(state)
    first, second = job.attempts
    predicted, measured, wrong, learned, following, ended = explain_attempt(state, job, first)
    assert first.failure is not None
    assert ended == f"ended by device_oom: {first.failure.reason}"
    assert format_bytes(first.estimate.allocated_bytes) in predicted
    assert "fits with" in predicted
    assert "258.00 MiB at the least" in measured
    assert wrong.startswith("wrong: activations at ")
    assert f"x{second.correction:.2f}" in learned
    assert "with 258.00 MiB or less this plan never runs again" in learned
    assert following.startswith("next: attempt 2, ")
    assert all(str(change) in following for change in second.change)
    assert "1 faster ran out of memory" in following


def test_plans_that_do_not_answer_to_the_optimizer_step_are_said_not_to() -> None:
    evidence = replace(oom(), ooms=(replace(oom().ooms[0], phase="optimizer", injected=True),))
    spec = decoder_spec(global_batch_size=64, gpus=2)
    state, _ = run(NODES, submitted(spec), finished(evidence), released())
    job = only_job(state)
    assert job.attempts[1].plan.zero_stage > job.attempts[0].plan.zero_stage
    (following,) = (
        sentence
        for sentence in explain_attempt(state, job, job.attempts[0])
        if sentence.startswith("next: ")
    )
    assert "faster no lighter in the optimizer step, where it ran out" in following
    assert "too big" not in following


def test_the_wrong_term_is_named_by_as_much_as_it_was_wrong() -> None:
    state, _ = run(NODES, submitted(), finished(oom()), released())
    job = only_job(state)
    (observation,) = state.observations
    wrong = explain_attempt(state, job, job.attempts[0])[2]
    factor = compute_activation_factor_of_peak(observation.moments, observation.measured_bytes)
    (moment,) = (
        moment
        for moment in observation.moments
        if abs(moment.counted_bytes + factor * moment.activation_bytes - observation.measured_bytes)
        <= moment.activation_bytes * 1e-6
    )
    assert moment.name in wrong
    assert f"x{factor:.2f}" in wrong


def test_a_prediction_that_held_says_no_more_than_that() -> None:
    sentences = explain_peak(-MIB)
    assert [sentence.partition(":")[0] for sentence in sentences] == ["predicted", "measured"]
    assert "0.99 x the prediction" in sentences[1]


def test_an_unknown_script_is_not_said_to_have_been_predicted() -> None:
    state, _ = run(NODES, submitted(script_spec(gpus=1)), finished(SUCCESS))
    job = only_job(state)
    assert explain_attempt(state, job, job.attempts[0])[0].startswith("predicted: nothing")
    assert make_plan_chart(state, job) is None


def test_the_picture_marks_what_ran_out_what_was_chosen_and_what_is_too_big() -> None:
    state, _ = run(NODES, submitted(), finished(oom()), released())
    job = only_job(state)
    picture = make_plan_chart(state, job)
    assert picture is not None
    by_label = {point.label: point.mark for point in picture.points if point.label}
    assert by_label == {"1": Mark.REFUTED, "2": Mark.CHOSEN}
    for point in picture.points:
        assert (point.mark is Mark.TOO_BIG) <= (point.needed_bytes > picture.capacity_bytes)
        assert (point.mark is Mark.FITS) <= (point.needed_bytes <= picture.capacity_bytes)


def test_a_plan_that_ran_stands_where_it_was_measured() -> None:
    state, _ = run(NODES, submitted(), finished(SUCCESS))
    picture = make_plan_chart(state, only_job(state))
    assert picture is not None
    (chosen,) = (point for point in picture.points if point.mark is Mark.CHOSEN)
    assert chosen.needed_bytes == 90 * MIB


def test_a_job_without_nodes_has_no_picture() -> None:
    state, _ = run(submitted())
    assert make_plan_chart(state, only_job(state)) is None


def test_a_measured_peak_above_the_prediction_is_a_lesson_although_it_fitted() -> None:
    for more_bytes, judged in ((MIB, "within the margin"), (30 * MIB, "wrong")):
        labels = [sentence.partition(":")[0] for sentence in explain_peak(more_bytes)]
        assert labels == ["predicted", "measured", judged, "learned"]


def test_what_was_not_wrong_is_not_called_wrong() -> None:
    for more_bytes in (-MIB, 0, 1, 1024):
        assert len(explain_peak(more_bytes)) == 2


def test_activations_more_than_ten_times_as_large_as_predicted_are_called_an_outlier() -> None:
    assert "outlier" in explain_peak(1000 * MIB)[2]
    assert "outlier" not in explain_peak(30 * MIB)[2]


def explain_peak(more_bytes: int) -> tuple[str, ...]:
    """Return the lessons of an attempt that succeeded with `more_bytes` more than predicted."""
    state, _ = run(NODES, submitted())
    peak_bytes = only_job(state).attempts[0].estimate.allocated_bytes + more_bytes
    beat = Heartbeat(
        rank=0, step=9, steps_done=9, step_s=0.1, peak_bytes=peak_bytes, phase="forward", at_s=9.0
    )
    state, _ = run(finished(replace(SUCCESS, heartbeats=(beat,))), state=state)
    return explain_attempt(state, only_job(state), only_job(state).attempts[0])
