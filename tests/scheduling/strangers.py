"""Judges failures of foreign programs: `python -m tests.scheduling.strangers FILE...` prints a table.

Each case of a file has the text of its ranks' logs, their exit codes and what an operator wants. A case is

- right: the decision after its first attempt is among the wanted ones;
- bounded: the program is to blame, and it gets at most the few more starts of an unexplained end;
- dangerous: its job ends although an attempt was due, or its plan is refuted without trouble of memory;
- wrong: any other decision.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.scheduling.failures.log_scan import LogScan
from orchestrator.scheduling.failures.verdict import REFUSED_WAITS_S, add_verdict
from orchestrator.specs.attempt import Evidence, Failure, FailureKind, RankEnd
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.replace import replace
from tests.scheduling.factories import attempt, job, script_spec
from tests.scheduling.world import cluster, device

FINAL, CHANGED, WAIT, ELSEWHERE, LATER, AGAIN = (
    "final",
    "changed",
    "wait",
    "elsewhere",
    "later",
    "again",
)
NODES = make_idle_nodes(cluster(("a", 2, 2, device("large", "80GiB"))))
ELAPSED_S = 100.0


@dataclass(frozen=True)
class Judgement:
    """The decision on one case, and what an operator wanted."""

    case: str
    failure: Failure | None
    action: str
    wanted: tuple[str, ...]
    bounded: bool  # the next attempts use a budget of an unexplained end

    @property
    def grade(self) -> str:
        if self.action in self.wanted:
            return "right"
        # a wait for a service is another attempt, too
        if self.action == LATER and AGAIN in self.wanted:
            return "right"
        if self.action == FINAL:
            return "dangerous"
        if self.action in (CHANGED, WAIT) and self.wanted == (FINAL,):
            return "dangerous"
        return "bounded" if self.bounded else "wrong"


def ends_of(case: dict[str, Any]) -> tuple[RankEnd, ...]:
    """Return how the ranks of a case ended, as the reader of logs sees them."""
    texts = [case["text"]] if isinstance(case["text"], str) else case["text"]
    codes = case.get("codes") or [case.get("exit", 1)] * len(texts)
    ends = []
    for rank, (text, code) in enumerate(zip(texts, codes, strict=True)):
        scan = LogScan()
        offset = 0
        for line in text.splitlines():
            scan.read_line(line, offset)
            offset += len(line.encode()) + 1
        end = RankEnd(
            rank=rank,
            exit_code=code,
            log_tail=text,
            findings=scan.findings,
            root_rank=scan.root_rank,
            root_exit_code=scan.root_exit_code,
        )
        ends.append(end)
    return tuple(ends)


def failure_of(case: dict[str, Any]) -> Failure | None:
    """Return the failure of a case's first attempt with its verdict; None where it counts as a success."""
    evidence = Evidence(ranks=ends_of(case), host_oom_kills=case.get("oom_kills", 0))
    record, ended = job(script_spec()), replace(attempt(), ended_at_s=ELAPSED_S)
    failure = classify_end(record, ended, evidence, device_bytes=case.get("capacity"))
    if failure is None:
        return None
    return add_verdict(record, replace(ended, evidence=evidence), failure, (), NODES)


def action_after(failure: Failure | None) -> str:
    """Return what follows a failure, in the words of the cases."""
    if failure is None:
        return FINAL
    kind, verdict = failure.kind, failure.verdict
    if verdict is not None and verdict.wait_s is None:
        return FINAL
    if kind.shortage is not None:
        return WAIT
    if kind.restart is None:
        return FINAL
    if kind.restart.refutes_plan:
        return CHANGED
    if failure.broken is not None or (verdict is not None and verdict.elsewhere):
        return ELSEWHERE
    # an unexplained end waits so long where a service or a network refused something
    if verdict is not None and verdict.wait_s is not None and verdict.wait_s >= REFUSED_WAITS_S[0]:
        return LATER
    return AGAIN


def judge_case(case: dict[str, Any]) -> Judgement:
    """Return the decision on a case."""
    failure = failure_of(case)
    kinds = [case["expect"]] if isinstance(case["expect"], str) else case["expect"]
    wanted = tuple(case.get("action") or (_action_of_kind(FailureKind(kind)) for kind in kinds))
    action = action_after(failure)
    # a case that names kinds alone does not tell where another attempt starts
    if action == ELSEWHERE and "action" not in case:
        action = AGAIN
    bounded = failure is not None and failure.ending is not None and action != FINAL
    return Judgement(case["id"], failure, action, wanted, bounded)


def _action_of_kind(kind: FailureKind) -> str:
    if kind.shortage is not None:
        return WAIT
    if kind.restart is None:
        return FINAL
    return CHANGED if kind.restart.refutes_plan else AGAIN


def judge_file(path: Path) -> list[Judgement]:
    """Return the decisions on all cases of a file."""
    return [judge_case(case) for case in yaml.safe_load(path.read_text())]


def main(paths: list[str]) -> int:
    for path in paths:
        judgements = judge_file(Path(path))
        for entry in judgements:
            kind = "none" if entry.failure is None else entry.failure.kind.value
            reason = "" if entry.failure is None else entry.failure.reason.replace("\n", " | ")
            wanted = "/".join(entry.wanted)
            print(f"{entry.grade:9} {entry.action:9} ({wanted}) {kind:12} {entry.case}: {reason}")
        counts = Counter(entry.grade for entry in judgements)
        print(f"{path}: {len(judgements)} cases, {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
