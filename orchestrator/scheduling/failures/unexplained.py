"""The failure of an end that nothing explains: its exception or exit code, and how it looked."""

from __future__ import annotations

import re

from orchestrator.scheduling.failures.endings import make_ending
from orchestrator.scheduling.failures.exit_codes import describe_exit_code, find_exit_signal
from orchestrator.scheduling.failures.log_scan import (
    HEAD,
    extract_exception_type,
    extract_last_traceback,
)
from orchestrator.scheduling.failures.phases import GUARD_PHASES
from orchestrator.scheduling.failures.program_faults import (
    find_faulty_thing,
    find_faulty_thing_of_exit,
)
from orchestrator.specs.attempt import (
    Attempt,
    ErrorReport,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    RankEnd,
)
from orchestrator.specs.command_line import Argv
from orchestrator.specs.replace import replace

EXCERPT_CHARACTERS_MAX = 4000
MESSAGE_CHARACTERS_MAX = 200  # of an exception that stands in a reason
LINES_OF_END = 20  # of a log, in which the line stands that tells of its end
_LAUNCHER = "torch/distributed/elastic/"  # in each line of torchrun's own log
_ANYTHING = re.compile(r"\S")
# what a C++ program prints before it aborts
_TELLS_OF_ABORT = re.compile(
    r"(?i)\b(?:error|fatal|abort\w*|assert\w*|exception|check failed)\b|what\(\):|Hang\b"
)
_WANTS_CUDA = re.compile(r"(?i)\bcuda\b|\bgpus?\b|nvidia")


def make_unexplained_failure(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    report: ErrorReport | None,
    finding: Finding | None,
    command: Argv,
) -> Failure:
    """Return the failure of a rank's end that nothing explains, with the features to compare it by.

    `report` is the guard's report and `finding` the exception that ended the rank; None where there
    is none.
    """
    log_tail = end.log_tail
    # torchrun's own exit code is always 1
    if finding is None and end.exit_code == 1 and end.root_rank is not None:
        end = replace(
            end,
            rank=end.root_rank,
            exit_code=end.root_exit_code,
            log_tail=_cut_launcher_report(log_tail),
        )
    ending = make_ending(attempt, evidence, end, finding, report, command)
    rank = end.rank
    excerpt = extract_last_traceback(log_tail)
    if finding is None:
        reason = _describe_exit(evidence, end)
    else:
        if finding.rank is not None:
            rank = finding.rank
        excerpt = finding.excerpt if report is None else report.traceback
        reason = f"rank {rank} raised {_describe_exception(finding)}"
    if report is not None:
        reason += f" in {report.phase} after step {report.step}"
    kind = FailureKind.UNKNOWN
    if ending.step is None:
        kind = FailureKind.USER_ERROR if ending.is_own else FailureKind.STARTUP
    return Failure(
        kind=kind,
        rank=rank,
        phase=None if report is None else GUARD_PHASES.get(report.phase),
        reason=reason,
        excerpt=cut_excerpt(excerpt),
        ending=ending,
        about=find_faulty_thing_of_exit(end.exit_code)
        if finding is None
        else find_faulty_thing(finding.line),
    )


def _cut_launcher_report(log_tail: str) -> str:
    """Return what the ranks of torchrun wrote before the first traceback, and before torchrun's own
    report.
    """
    lines = log_tail.splitlines()
    for number, line in enumerate(lines):
        if HEAD in line or _LAUNCHER in line:
            return "\n".join(lines[:number])
    return log_tail


def join_lines(text: str) -> str:
    """Return a text of several lines as one line, with single spaces."""
    return " ".join(text.split())


def cut_excerpt(text: str) -> str:
    """Return the last EXCERPT_CHARACTERS_MAX characters of a text."""
    return text[-EXCERPT_CHARACTERS_MAX:]


def _describe_exception(finding: Finding) -> str:
    """Return the type and message of the exception in a log finding as one line of text."""
    message = join_lines(finding.line.partition(":")[2])
    return f"{extract_exception_type(finding.line)}: {message}"[:MESSAGE_CHARACTERS_MAX]


def _describe_exit(evidence: Evidence, end: RankEnd) -> str:
    """Return how a process ended that raised no exception, with the log line that best explains it."""
    if end.exit_code == 0 and any(other.exit_code != 0 for other in evidence.ranks):
        return f"rank {end.rank} exited with 0 while other ranks went on; it may have had fewer batches"
    if end.exit_code == 0 and evidence.missing_artifacts:
        return f"exited 0 without leaving {', '.join(evidence.missing_artifacts)}"
    if end.exit_code == 0:
        return "exited 0 before the last of its steps (`success.steps` is all)"
    is_crash = find_exit_signal(end.exit_code) is not None
    pattern = _TELLS_OF_ABORT if is_crash else _ANYTHING
    lines = end.log_tail.splitlines()[-LINES_OF_END:]
    line = next((line.strip() for line in reversed(lines) if pattern.search(line)), "")
    reason = f"rank {end.rank} {describe_exit_code(end.exit_code)}"
    if line:
        reason += f": {line[:MESSAGE_CHARACTERS_MAX]}"
    if evidence.virtual and _WANTS_CUDA.search(line):
        reason += "; its devices are virtual: they are no GPUs"
    return reason
