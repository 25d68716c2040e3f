"""Advice to a person after a failure, by its kind and by the thing that it names as wrong."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.specs.attempt import Failure
from orchestrator.specs.packaged import load_table

_TEXTS = load_table(__package__, "advice")
BY_KIND: Mapping[str, str] = _TEXTS["by_kind"]
# where no service runs the training; for any other kind the service's own help
ELSEWHERE: Mapping[str, str] = _TEXTS["elsewhere"]
BY_ABOUT: Mapping[str, str] = _TEXTS["by_about"]


def advise_after_failure(failure: Failure | None, by_kind: Mapping[str, str] = BY_KIND) -> str:
    """Return what a person can do after a failure that ended a job, as a short text.

    Broken hardware comes first, then the thing that an exception names as wrong, then the kind in
    `by_kind`.
    """
    if failure is None:
        return "read its log"
    if failure.broken is not None:
        return f"have its {failure.broken.value} looked at: a driver, a restart or a new part may mend it"
    if failure.about is not None:
        return BY_ABOUT[failure.about]
    return by_kind.get(failure.kind) or BY_KIND.get(
        failure.kind, f"ended by {failure.kind.value}: read its log"
    )
