"""The service reacts to the ends of foreign programs as an operator would want it to."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from orchestrator.scheduling.failures.classify import classify
from orchestrator.scheduling.failures.signatures import LogScan
from orchestrator.specs.attempt import Evidence, FailureKind, RankEnd
from tests.scheduling.corpus import STRANGERS
from tests.scheduling.factories import attempt, job, script_spec

RIGHT_SHARE_MIN = 0.9
FINAL = "final"
pytestmark = pytest.mark.skipif(
    not STRANGERS.is_file(), reason="logs of strangers are not beside this checkout"
)


def action_after(kind: FailureKind) -> str:
    if kind.restart is None:
        return FINAL if kind.shortage is None else "again"
    return "changed plan" if kind.restart.refutes_plan else "again"


def ends_of(case: dict[str, Any]) -> tuple[RankEnd, ...]:
    texts = [case["text"]] if isinstance(case["text"], str) else case["text"]
    codes = case.get("codes") or [case.get("exit", 1)] * len(texts)
    ends = []
    for rank, (text, code) in enumerate(zip(texts, codes, strict=True)):
        scan = LogScan()
        for offset, line in enumerate(text.splitlines()):
            scan.feed(line, offset)
        ends.append(
            RankEnd(
                rank=rank,
                exit_code=code,
                log_tail=text,
                findings=scan.findings,
                root_rank=scan.root_rank,
                root_exit_code=scan.root_exit_code,
            )
        )
    return tuple(ends)


def kind_of(case: dict[str, Any]) -> FailureKind:
    evidence = Evidence(ranks=ends_of(case), host_oom_kills=case.get("oom_kills", 0))
    failure = classify(job(script_spec()), attempt(), evidence, capacity_bytes=case.get("capacity"))
    assert failure is not None, case["id"]
    return failure.kind


def judged_cases() -> list[tuple[str, str, set[str]]]:
    """(id with kind, action, acceptable actions) of each case."""
    judged = []
    for case in yaml.safe_load(STRANGERS.read_text()):
        accepted = [case["expect"]] if isinstance(case["expect"], str) else case["expect"]
        kind = kind_of(case)
        judged.append(
            (
                f"{case['id']}: {kind.value}",
                action_after(kind),
                {action_after(FailureKind(name)) for name in accepted},
            )
        )
    return judged


def test_no_job_ends_for_good_that_another_attempt_would_have_saved() -> None:
    assert not [
        case
        for case, action, accepted in judged_cases()
        if action == FINAL and accepted == {"again"}
    ]


def test_nine_of_ten_ends_are_followed_by_what_an_operator_would_do() -> None:
    judged = judged_cases()
    wrong = [case for case, action, accepted in judged if action not in accepted]
    assert len(wrong) <= (1 - RIGHT_SHARE_MIN) * len(judged), wrong
