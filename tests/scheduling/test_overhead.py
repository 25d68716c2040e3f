"""Measured device memory beside the allocator, as the queue uses it."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.memory.engines.overhead import STEP_BYTES
from orchestrator.scheduling.reports.explain import explain_attempt
from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.units import format_bytes
from tests.scheduling.test_heterogeneous import GIB, decoder, mixed
from tests.scheduling.test_step import (
    SUCCESS,
    finished,
    launches,
    only_job,
    released,
    run,
    submitted,
)

ONE_4090 = """
name: home
nodes:
  - {name: home, devices: 1, device: rtx4090-24gb, host_memory: 64GiB}
"""
FREE_BYTES = 24 * GIB
SPEC = decoder(1280, 1)
OTHER = submitted(SPEC.model_copy(update={"family": "another"}), "other-2", at_s=2.0)
BEGUN = (NodesSeen(nodes=mixed(ONE_4090), at_s=0.0), submitted(SPEC))


def overhead_bytes(attempt: Attempt) -> int:
    return attempt.estimate.device_bytes - attempt.estimate.reserved_bytes


def first_attempt() -> Attempt:
    return launches(run(*BEGUN)[1])[0]


def too_much() -> int:
    """More than the first plan leaves of its device."""
    first = first_attempt()
    assert first.needed_bytes is not None
    return (
        overhead_bytes(first) + FREE_BYTES - first.needed_bytes
    ) // STEP_BYTES * STEP_BYTES + STEP_BYTES


def measured(overhead: int) -> Evidence:
    beat = replace(SUCCESS.heartbeats[0], allocator_room_bytes=FREE_BYTES - overhead)
    return replace(SUCCESS, heartbeats=(beat,), free_before_bytes=(FREE_BYTES,))


def test_what_a_device_was_seen_to_hold_is_counted_for_jobs_of_every_family_there() -> None:
    state, _ = run(*BEGUN, finished(measured(too_much())), released())
    (second,) = launches(run(OTHER, state=state)[1])
    assert overhead_bytes(second) == too_much()
    assert second.plan != first_attempt().plan, "the plan that leaves too little room is not taken"
    assert second.needed_bytes is not None
    assert second.needed_bytes <= FREE_BYTES
    silent, _ = run(
        *BEGUN, finished(measured(-1)), released()
    )  # others went away meanwhile: nothing is known
    assert launches(run(OTHER, state=silent)[1])[0].plan == first_attempt().plan


def test_jobs_that_wait_are_judged_anew_by_it() -> None:
    (second,) = launches(run(*BEGUN, OTHER, finished(measured(too_much())), released())[1])
    assert (second.job_id, overhead_bytes(second)) == ("other-2", too_much())
    assert second.plan != first_attempt().plan


def test_what_pytorch_held_stands_beside_what_was_predicted() -> None:
    evidence = replace(
        SUCCESS, heartbeats=(replace(SUCCESS.heartbeats[0], reserved_bytes=4 * GIB),)
    )
    state, _ = run(*BEGUN, finished(evidence), released())
    predicted = format_bytes(first_attempt().estimate.reserved_bytes)
    sentence = explain_attempt(state, only_job(state), only_job(state).attempts[0])[1]
    assert sentence.endswith(
        f"; PyTorch held up to 4.00 GiB, {predicted} predicted as the least that it needs"
    )


def test_it_is_told_what_was_measured_beside_what_was_predicted_and_learned() -> None:
    state, _ = run(*BEGUN, finished(measured(3 * GIB)), released())
    predicted = format_bytes(overhead_bytes(first_attempt()))
    (sentence,) = (
        sentence
        for sentence in explain_attempt(state, only_job(state), only_job(state).attempts[0])
        if "communicators" in sentence
    )
    assert sentence == (
        f"measured: 3.00 GiB of context and communicators, {predicted} predicted; "
        f"learned: {predicted} -> 3.00 GiB on rtx4090-24gb"
    )
