"""`orc diagnose`: finds in logs why a training ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.backends.attempts.evidence import (
    collect_folder_evidence,
    make_rank_end,
    scan_lines_of,
)
from orchestrator.backends.attempts.left_files import CHUNK_BYTES, LOG_TAIL_BYTES
from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.scheduling.failures.endings import read_exceptions
from orchestrator.scheduling.failures.log_scan import LINE_CHARACTERS_MAX, LogScan
from orchestrator.scheduling.failures.unexplained import join_lines
from orchestrator.scheduling.failures.verdict import add_verdict
from orchestrator.scheduling.reports.advice import ELSEWHERE, advise_after_failure
from orchestrator.specs.attempt import Attempt, Evidence, Failure, FailureKind, Phase, RankEnd
from orchestrator.specs.choices import Engine
from orchestrator.specs.errors import GIVEN_MAX, SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.sections import Retries
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.packaged import load_table
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.replace import replace
from orchestrator.specs.run import AttemptFolder

BINARY_BYTES = 8192  # at the begin of a file, in which text has no NUL
EXIT_CODE = 1  # where none is given


@frozen
class Diagnosis:
    """Why a training ended elsewhere: the cause and its log line, what the service would do, and
    what a person can do.
    """

    kind: str | None  # a FailureKind; None: nothing failed
    reason: str
    file: str | None  # that has the line; None where no line tells
    line_number: int | None  # from 1
    line: str
    rank: int | None
    orc_would: str
    you_can: str


def diagnose_training(
    logs: Sequence[Path], exit_codes: Sequence[int], oom_kill_count: int
) -> Diagnosis:
    """Return why a training ended, from its ranks' logs, rank 0 first, or from the folder of an
    attempt of this service.

    A single exit code is that of all ranks; several belong to the logs in order; without any it is
    EXIT_CODE. `oom_kill_count` is how often the kernel killed for memory meanwhile. Raises
    SpecError for a file that is no log, and for another number of exit codes.
    """
    try:
        if len(logs) == 1 and logs[0].is_dir() and (logs[0] / "guard.json").exists():
            return _diagnose_folder(logs[0])
        paths = [_resolve_log(path) for path in logs]
        if len(exit_codes) > 1 and len(exit_codes) != len(logs):
            raise SpecError(
                "not one exit code for each log",
                path="--exit-code",
                got=len(exit_codes),
                allowed=f"1 or {len(logs)}" if len(logs) > 1 else "1",
                hint="repeat it in the order of the logs",
            )
        codes = list(exit_codes) or [EXIT_CODE]
        if len(codes) == 1:
            codes *= len(logs)
        ends = tuple(_read_rank_end(path, rank, codes[rank]) for rank, path in enumerate(paths))
        return _make_diagnosis(logs, paths, Evidence(ranks=ends, host_oom_kills=oom_kill_count))
    except OSError as error:  # a file that went away meanwhile, or a disk that fails
        raise SpecError(
            f"cannot be read: {error.strerror}", path="LOG", got=str(error.filename or logs[0])
        ) from None


def _diagnose_folder(folder: Path) -> Diagnosis:
    files = AttemptFolder(folder)
    evidence = collect_folder_evidence(files)
    paths = [files.log(end.rank) for end in evidence.ranks]
    return _make_diagnosis(paths, paths, evidence)


def _find_failure_with_verdict(evidence: Evidence) -> Failure | None:
    """Return the failure that the service would find after a first attempt, with its decision to
    retry or not.

    None where the attempt succeeded. An exit with 0 is no success where the log shows what ended a
    rank: some programs always exit with 0.
    """
    job, attempt = _make_placeholder_job_and_attempt()
    failure = classify_end(job, attempt, evidence)
    if failure is None and any(_has_exception(end) for end in evidence.ranks):
        ends = tuple(replace(end, exit_code=EXIT_CODE) for end in evidence.ranks)
        failure = classify_end(job, attempt, replace(evidence, ranks=ends))
    if failure is None:
        return None
    return add_verdict(job, replace(attempt, evidence=evidence), failure, (), ())


def _has_exception(end: RankEnd) -> bool:
    return any(finding.is_exception for finding in end.findings[:1])


def _make_diagnosis(logs: Sequence[Path], paths: Sequence[Path], evidence: Evidence) -> Diagnosis:
    failure = _find_failure_with_verdict(evidence)
    ends = evidence.ranks
    if failure is None:
        return Diagnosis(
            kind=None, reason="exit code 0, and no log names a failure",
            file=None, line_number=None, line="", rank=None,
            orc_would="count it as succeeded", you_can="give the exit code, if it was another: `--exit-code`",
        )  # fmt: skip
    index, offset, line = _find_log_offset_and_line(failure, ends, paths)
    has_log = bool(paths) and paths[index].exists()
    return Diagnosis(
        kind=failure.kind.value,
        reason=failure.reason,
        file=str(logs[index]) if has_log else None,
        line_number=_count_line_number(paths[index], offset) if has_log else None,
        line=line.partition("\n")[0],
        rank=failure.rank,
        orc_would=_describe_next_action(failure),
        you_can=_suggest_help(failure, ends, paths),
    )


def _resolve_log(path: Path) -> Path:
    """Return the resolved path of a log. Raises SpecError where it is no text file."""
    hint = "give one log for each rank; of a job, `orc show JOB` tells the failure"
    try:
        real = path.expanduser().resolve()
        if not real.is_file():
            what = "not a file" if real.exists() else "no such file"
            raise SpecError(what, path="LOG", got=str(path), allowed="logs of ranks", hint=hint)
        with real.open("rb") as file:
            begin = file.read(BINARY_BYTES)
    except (
        OSError,
        RuntimeError,
    ) as error:  # a name that is too long, a loop of links, an unknown user's home
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(
            f"cannot be read: {why}", path="LOG", got=str(path)[:GIVEN_MAX], hint=hint
        ) from None
    if b"\0" in begin:
        raise SpecError(
            "a binary file, not a log", path="LOG", got=str(path), allowed="text", hint=hint
        )
    return real


@frozen
class Project:
    """A known training project: how its logs look, and how its memory use is reduced (a row of
    projects.yaml).
    """

    name: str
    job: str  # its job file, in `jobs/` of this project
    phases: Mapping[Phase, str]  # the pattern of the line that begins it
    levers: Mapping[Phase, str]  # what makes it take less memory


def find_project(log_path: Path) -> Project | None:
    """Return the known project whose mark is at the begin or the end of a log; None where no mark
    is found.
    """
    with log_path.open("rb") as file:
        text = file.read(LOG_TAIL_BYTES)
        file.seek(max(file.tell(), log_path.stat().st_size - LOG_TAIL_BYTES))
        text += file.read(LOG_TAIL_BYTES)
    log = text.decode("utf-8", errors="replace")
    for name, row in load_table(__package__, "projects").items():
        if re.search(row["sign"], log):
            phases = {Phase(phase): pattern for phase, pattern in row["phases"].items()}
            levers = {Phase(phase): lever for phase, lever in row["levers"].items()}
            return Project(name=name, job=row["job"], phases=phases, levers=levers)
    return None


def _suggest_help(failure: Failure, ends: Sequence[RankEnd], paths: Sequence[Path]) -> str:
    """Return what a person can do about the failure.

    After a lack of device memory in a known project, it is that project's own way to use less.
    """
    index, _, _ = _find_log_offset_and_line(failure, ends, paths)
    has_log = failure.kind is FailureKind.DEVICE_OOM and bool(paths) and paths[index].exists()
    project = find_project(paths[index]) if has_log else None
    if project is None:
        return advise_after_failure(failure, ELSEWHERE)
    phase = failure.phase or Phase.TRAINING
    if phase not in project.levers:
        phase = Phase.TRAINING
    plan = f"`orc plan jobs/{project.job} --gpu CARD` tells what fits"
    return f"{project.name}, in its {phase}: {project.levers[phase]}; {plan}"


def _read_rank_end(log_path: Path, rank: int, exit_code: int) -> RankEnd:
    project = find_project(log_path)
    scan = LogScan(
        log_name=log_path.name, pattern_by_phase=project.phases if project is not None else {}
    )
    scan_lines_of(scan, log_path)
    return make_rank_end(log_path, rank, exit_code, scan, scan.findings)


def _make_placeholder_job_and_attempt() -> tuple[Job, Attempt]:
    """Return an invented job and an ended attempt of it: logs alone do not tell the real ones."""
    spec = JobSpec(name="elsewhere", global_batch_size=1, command=("elsewhere",))
    nothing = MemoryEstimate(
        moment="", by_cause=(), allocated_bytes=0, reserved_bytes=0, device_bytes=0
    )
    attempt = Attempt(
        job_id="elsewhere", number=1, plan=Plan(engine=Engine.TORCH, micro_batch_size=1), placement=(), device="",
        estimate=nothing, correction=1.0, step_s=0.0, launched_at_s=0.0, ended_at_s=0.0,
    )  # fmt: skip
    return Job(id="elsewhere", spec=spec, order=1, submitted_at_s=0.0), attempt


def _find_log_offset_and_line(
    failure: Failure, ends: Sequence[RankEnd], paths: Sequence[Path]
) -> tuple[int, int, str]:
    """Return (index of the log, offset in bytes, line) that show the failure: a finding, an
    exception, or the log's end.
    """
    findings = [(index, end.findings[0]) for index, end in enumerate(ends) if end.findings]
    if not paths:
        return 0, 0, ""
    for rank, finding in findings:
        if join_lines(finding.line) in failure.reason or (finding.excerpt or finding.line).endswith(
            failure.excerpt or "\0"
        ):
            return rank, finding.offset, finding.line
    if failure.ending is None and findings and not failure.excerpt:
        return findings[0][0], findings[0][1].offset, findings[0][1].line
    of_rank = (index for index, end in enumerate(ends) if end.rank == failure.rank)
    rank = next(
        (
            index
            for index, end in enumerate(ends)
            if failure.excerpt and failure.excerpt in end.log_tail
        ),
        next(of_rank, 0),
    )
    exceptions = read_exceptions(failure.excerpt)
    return rank, *_find_offset_and_last_line(
        paths[rank], f"{exceptions[-1].type}: {exceptions[-1].message[:60]}" if exceptions else ""
    )


def _find_offset_and_last_line(log_path: Path, text: str) -> tuple[int, str]:
    """Return (offset in bytes, line) of the last line that contains the text; for "", of the last
    non-empty line.
    """
    if not log_path.exists():
        return 0, text
    size = log_path.stat().st_size
    with log_path.open("rb") as file:
        begin = max(0, size - LOG_TAIL_BYTES)
        file.seek(begin)
        offset = begin
        chosen = (begin, "")
        for raw in file.read(LOG_TAIL_BYTES).split(b"\n"):
            line = raw.decode("utf-8", errors="replace").strip()
            if line and text.strip().rstrip(":") in line:
                chosen = offset, line[:LINE_CHARACTERS_MAX]
            offset += len(raw) + 1
    return chosen


def _count_line_number(log_path: Path, offset: int) -> int:
    number = 1
    with log_path.open("rb") as file:
        while offset > 0 and (chunk := file.read(min(CHUNK_BYTES, offset))):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number


def _describe_next_action(failure: Failure) -> str:
    restart = failure.kind.restart
    shortage = failure.kind.shortage
    verdict = failure.verdict
    if verdict is not None and verdict.wait_s is None:
        return "end the job"
    if shortage is not None:
        waits = ", ".join(f"{shortage.first_s * 2**number / 60:g}" for number in range(3))
        longest = shortage.longest_s / 60
        total = shortage.total_s / 3600
        return f"start it again after {waits}, at most {longest:g} minutes, for {total:g} hours"
    if restart is None:
        return "end the job"
    budget = verdict.budget if verdict is not None and verdict.budget else restart.budget
    times = f"at most {getattr(Retries(), budget)} times (`retries.{budget}`)"
    if restart.refutes_plan:
        return f"go on with a plan that needs less memory, {times}"
    elsewhere = (
        ", elsewhere if other devices could hold it" if failure.broken or failure.ending else ""
    )
    wait = f" after {verdict.wait_s:.0f} s" if verdict is not None and verdict.wait_s else ""
    return f"start it again{wait}{elsewhere}, {times}"
