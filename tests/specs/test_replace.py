"""`specs.replace` gives the result of `dataclasses.replace`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from tests.scheduling.factories import attempt, job

NOUNS: list[tuple[Any, dict[str, Any]]] = [
    (State(submitted=3), {"at_s": 7.0, "drained": ("a",)}),
    (job(), {"status": JobStatus.RUNNING, "reason": "runs"}),
    (attempt(), {"status": AttemptStatus.ENDED, "ended_at_s": 9.0, "released": True}),
    (attempt(), {}),
]


@pytest.mark.parametrize(("noun", "changes"), NOUNS)
def test_it_has_the_changes_and_all_else_as_it_was(noun: Any, changes: dict[str, Any]) -> None:
    before = dataclasses.replace(noun)
    assert replace(noun, **changes) == dataclasses.replace(noun, **changes)
    assert noun == before


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(State(), at_s=1.0).at_s = 2.0  # type: ignore[misc]


def test_an_unknown_field_is_our_bug() -> None:
    with pytest.raises(KeyError):
        replace(State(), when_s=1.0)  # type: ignore[call-arg]
