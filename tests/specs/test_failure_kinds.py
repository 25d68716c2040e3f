"""Laws of the kinds of failures: each says how its job goes on, by a budget of the job file, and survives JSON."""

from __future__ import annotations

import pickle

import pytest
from pydantic import TypeAdapter

from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.job.sections import Retries
from tests.scheduling.laws_of_attempts import BUDGET_OF


@pytest.mark.parametrize("kind", FailureKind)
def test_a_kind_names_a_budget_of_the_job_file_or_waits_for_a_while_or_is_final(
    kind: FailureKind,
) -> None:
    assert kind.restart is None or kind.restart.budget in Retries.model_fields
    assert (
        kind.shortage is None
        or 0 < kind.shortage.first_s <= kind.shortage.longest_s < kind.shortage.total_s
    )


def test_every_budget_of_the_job_file_is_used_up_by_a_kind() -> None:
    of_the_user = {"on_error", "exit_codes"}
    assert {kind.restart.budget for kind in FailureKind if kind.restart} == set(
        Retries.model_fields
    ) - of_the_user


def test_the_laws_of_simulated_nights_say_the_budget_of_every_kind_once_more() -> None:
    """BUDGET_OF in tests/scheduling/laws_of_attempts.py is written by hand: a new kind is added there."""
    assert {kind: kind.restart.budget for kind in FailureKind if kind.restart} == BUDGET_OF


@pytest.mark.parametrize("kind", FailureKind)
def test_a_kind_is_its_word_in_json_and_between_processes(kind: FailureKind) -> None:
    adapter = TypeAdapter(FailureKind)
    assert adapter.validate_json(adapter.dump_json(kind)) is kind
    assert adapter.dump_json(kind) == f'"{kind}"'.encode()
    assert pickle.loads(pickle.dumps(kind)) is kind
