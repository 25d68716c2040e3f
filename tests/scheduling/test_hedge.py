"""Laws of what is believed of a job after it ran out of memory, and of the plan that follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.calibration.belief import believe_activation_factor
from orchestrator.scheduling.options.hedge import pick_first_plan_to_try
from tests.memory.test_calibration import observation

BURST = replace(
    observation(correction=4.0, job="mine", ran_out=True), steps_left=0
)  # no later pass needs more


def test_an_out_of_memory_error_is_a_lower_bound() -> None:
    alone = believe_activation_factor([BURST], [], [])
    assert alone.compute_probability_within(3.99) == 0.0
    assert alone.compute_probability_within(8.0) == pytest.approx(0.5, abs=0.02), (
        "Pareto's law of index 1"
    )


def test_the_share_of_the_forward_pass_that_was_done_tells_the_rest() -> None:
    for done in (0.1, 0.25, 0.5, 0.9):
        posterior = believe_activation_factor(
            [replace(BURST, phase="forward", pass_done=done)], [], []
        )
        assert posterior.compute_quantile(0.5) == pytest.approx(4.0 / done, rel=0.25)


def test_a_backward_pass_is_past_the_peak_of_its_forward_pass() -> None:
    assert (
        believe_activation_factor([replace(BURST, phase="backward")], [], []).compute_quantile(0.9)
        < 1.3 * 4.0
    )


def test_what_the_job_or_its_family_measured_narrows_what_is_believed() -> None:
    trained = observation(correction=6.0, job="mine")
    assert believe_activation_factor([BURST], [trained], []).compute_quantile(0.9) < 1.4 * 6.0
    spread = [
        believe_activation_factor([BURST], [], others)
        for others in ([], [replace(trained, job="other")])
    ]
    near = [
        distribution.compute_probability_within(7.5) - distribution.compute_probability_within(5.0)
        for distribution in spread
    ]
    assert near[1] > 1.5 * near[0]


def test_the_more_passes_are_still_to_come_the_more_of_them_needs_more() -> None:
    """A failure at step 8 of 200 tells that samples differ; one in the first step may be a wrong profile alone."""
    by_left = [
        believe_activation_factor(
            [replace(BURST, phase="backward", steps_done=7, steps_left=left)], [], []
        ).compute_quantile(0.9)
        for left in (0, 10, 200, 10_000)
    ]
    assert by_left == sorted(set(by_left))
    by_done = [
        believe_activation_factor(
            [replace(BURST, phase="backward", steps_done=done, steps_left=200)], [], []
        ).compute_quantile(0.9)
        for done in (1, 20, 150)
    ]
    assert by_done == sorted(set(by_done), reverse=True), (
        "the rarer the failure, the less is still to come"
    )
    at_once = believe_activation_factor(
        [replace(BURST, phase="backward", steps_done=0, steps_left=200)], [], []
    )
    assert by_left[0] < at_once.compute_quantile(0.9) < by_done[0]


def test_every_further_failure_raises_the_bound() -> None:
    both = believe_activation_factor(
        [BURST, replace(BURST, measured_bytes=2 * BURST.measured_bytes)], [], []
    )
    assert both.least > 4.0


@pytest.mark.parametrize(
    ("plans", "restart_s", "first"),
    [
        ([(100.0, 0.5), (110.0, 0.9)], 60.0, 1),  # a restart costs more than the speed
        ([(100.0, 0.5), (1000.0, 0.9)], 60.0, 0),  # the speed is worth the odds
        ([(100.0, 0.9), (101.0, 0.9)], 60.0, 0),  # equal odds: the faster
        ([(100.0, 0.0), (500.0, 0.6), (510.0, 0.99)], 60.0, 2),
        ([(10_000.0, 0.3)], 60.0, 0),
    ],
)
def test_the_plan_that_comes_first_is_that_of_the_soonest_expected_end(
    plans: list[tuple[float, float]], restart_s: float, first: int
) -> None:
    assert pick_first_plan_to_try(plans, restart_s) == first
