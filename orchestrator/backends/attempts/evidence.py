"""Collects the evidence (raw facts of its end) of an attempt from its folder and its script's output."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from orchestrator.backends.attempts.durable import read_json, write_durably
from orchestrator.backends.attempts.launch_request import started_ranks
from orchestrator.backends.attempts.left_files import (
    LINE_BYTES_MAX,
    Problems,
    Report,
    Reports,
    log_blocks,
    log_tail,
    read_exit_code,
    read_reports,
)
from orchestrator.backends.attempts.script_output import (
    OWN_ACCESS,
    Checkpoints,
    FileAccess,
    Results,
    find_checkpoints,
    find_results,
    list_lost,
    list_unmatched,
    output_folder,
    saved_step,
)
from orchestrator.backends.attempts.system_metrics import mean_busy_percent
from orchestrator.scheduling.failures.log_scan import FINDINGS_MAX, LogScan
from orchestrator.scheduling.failures.signatures import COMPLAINTS
from orchestrator.specs.attempt import (
    Attempt,
    Cause,
    ErrorReport,
    Evidence,
    Finding,
    Heartbeat,
    OomReport,
    Phase,
    RankEnd,
    device_count,
)
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.patterns import LinePattern, parse_count
from orchestrator.specs.replace import replace
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.guard import oom_report

# of a folder that are read without its job
RANKS_MAX = 4096
FILES_MAX = 65_536
WORKERS_MAX = 1024  # logs of dora's ranks that are read
WORKER_DIED = re.compile(r"Executor: Worker (\d+) died")
UNWATCHED_MAX = 4  # processes that are named
UNWATCHED_CHARACTERS_MAX = 300  # of the name of each

Part = TypeVar("Part")

log = logging.getLogger(__name__)


@frozen
class Ending:
    """Facts about an attempt's end that only its watcher saw, stored in its folder for a restarted service."""

    nodes_lost: tuple[str, ...] = ()
    first_ended_rank: int | None = None
    host_oom_kills: int = 0
    hung_for_s: float | None = None
    launch_error: str | None = None
    no_program: bool = False
    stopped: bool = False
    counts: tuple[int, int] | None = None  # (first, last) number of the job's `progress` in its log
    free_before_bytes: tuple[int, ...] = ()


def write_ending(folder: AttemptFolder, ending: Ending) -> None:
    """Store `ending` durably in the attempt's folder."""
    folder.path.mkdir(parents=True, exist_ok=True)
    write_durably(_ending_path(folder), json.dumps(dataclasses.asdict(ending)))


def read_ending(folder: AttemptFolder) -> Ending | None:
    """Return the stored ending; None without one, or for a file that this service did not write."""
    try:
        ending: Ending = _endings().validate_python(read_json(_ending_path(folder)))
    except (OSError, ValueError):
        return None
    return ending


@functools.cache
def _endings() -> TypeAdapter[Ending]:
    return TypeAdapter(Ending)


def _ending_path(folder: AttemptFolder) -> Path:
    return folder.path / "ending.json"


def collect(
    spec: JobSpec,
    attempt: Attempt,
    jobs: JobFolder,
    ending: Ending,
    access: FileAccess = OWN_ACCESS,
) -> Evidence:
    """Return the attempt's evidence (raw facts of its end), from its files and its watcher's facts.

    A part that cannot be read is left out and named in `unread`; the attempt then ends by what is left.
    """
    folder = jobs.attempt(attempt.number)
    world_size = device_count(attempt.placement)
    started = started_ranks(spec, attempt.placement)
    # a program may remove its log: the launcher writes the exit code all the same
    files = [*map(folder.log, started), *map(folder.exit_code, started)]
    began = any(file.exists() for file in files)
    parts = Parts(attempt.name)

    def read(kind: type[Report], path: Callable[[int], Path]) -> tuple[Report, ...]:
        reports = parts.read(
            kind.__name__, lambda: read_reports(kind, path, range(world_size)), Reports[Report]()
        )
        parts.problems.add(*reports.problems)
        return reports.reports

    beats = read(Heartbeat, folder.heartbeat)
    parts.problems.add(*_list_pattern_problems(spec))
    results = Results()
    checkpoints = Checkpoints()
    unmatched = tuple[str, ...]()
    if not attempt.probe:
        results = parts.read(
            "results", lambda: find_results(spec, jobs, folder, started, access), results
        )
        parts.problems.add(*results.problems)
    if not attempt.probe and spec.is_script:
        output = output_folder(spec, jobs)
        checkpoints = parts.read(
            "checkpoints", lambda: find_checkpoints(spec, output, access), checkpoints
        )
        parts.problems.add(*checkpoints.problems)
        if not checkpoints.has_matches:
            unmatched = parts.read("output", lambda: list_unmatched(spec, jobs), unmatched)
    step = None
    if not attempt.probe:
        step = parts.read("checkpoint", lambda: saved_step(spec, jobs, checkpoints), step)
    ranks = [
        parts.read(
            f"log of rank {rank}",
            partial(_end_of, spec, attempt, jobs, rank, beats, access),
            RankEnd(
                rank=rank,
                exit_code=read_exit_code(folder, rank),
                log_tail=log_tail(folder.log(rank)),
            ),
        )
        for rank in (started if began else ())
    ]
    lost = tuple[str, ...]()
    unwatched = tuple[str, ...]()
    lost = parts.read("restart", lambda: _list_lost(spec, folder, ending, jobs, attempt), lost)
    if began:
        unwatched = parts.read(
            "unwatched", lambda: _list_unwatched(folder, beats, ending), unwatched
        )
    return Evidence(
        ranks=tuple(ranks),
        ooms=read(OomReport, folder.oom),
        caught=read(OomReport, folder.caught),
        errors=read(ErrorReport, folder.error),
        heartbeats=beats,
        missing_artifacts=results.absent,
        finished=results.is_reported and not results.absent,
        lost=lost,
        checkpoint_step=step,
        unmatched=unmatched,
        unwatched=unwatched,
        busy_percent=parts.read("samples", lambda: mean_busy_percent(folder), None),
        virtual=_left_object(folder.guard).get("virtual_capacity_bytes") is not None,
        unread=tuple(parts.problems.sentences),
        **_watched(ending),
    )


def collect_folder(folder: AttemptFolder) -> Evidence:
    """Return the evidence in an attempt's folder without its job: which results it lacks is not known.

    Its ranks are those that left a log or an exit code, at most RANKS_MAX.
    """
    spec = JobSpec(name="elsewhere", global_batch_size=1, command=("elsewhere",))
    numbers = set[int]()
    for path in islice(folder.path.glob("rank*.*"), FILES_MAX):
        rank = parse_count(path.name.removeprefix("rank").partition(".")[0])
        if rank is not None and rank < RANKS_MAX:
            numbers.add(rank)
    ranks = sorted(numbers)
    beats = read_reports(Heartbeat, folder.heartbeat, ranks).reports
    ends = []
    for rank in ranks:
        if folder.log(rank).exists() or folder.exit_code(rank).exists():
            scan = scan_log(spec, folder.log(rank))
            code = read_exit_code(folder, rank)
            ends.append(end_of(folder.log(rank), rank, code, scan, scan.findings, beats))
    ending = read_ending(folder) or Ending()
    return Evidence(
        ranks=tuple(ends),
        ooms=read_reports(OomReport, folder.oom, ranks).reports,
        caught=read_reports(OomReport, folder.caught, ranks).reports,
        errors=read_reports(ErrorReport, folder.error, ranks).reports,
        heartbeats=beats,
        virtual=_left_object(folder.guard).get("virtual_capacity_bytes") is not None,
        **_watched(ending),
    )


def _watched(ending: Ending) -> JsonObject:
    """Return the evidence that only the watcher of an attempt saw, by field."""
    names = {entry.name for entry in dataclasses.fields(Evidence)}
    return {
        entry.name: getattr(ending, entry.name)
        for entry in dataclasses.fields(Ending)
        if entry.name in names
    }


def _list_pattern_problems(spec: JobSpec) -> list[str]:
    """Sentences on the patterns of progress and phases that the engine refuses."""
    patterns = [LinePattern(pattern) for _, pattern in spec.phases]
    if spec.progress is not None:
        patterns.append(LinePattern(spec.progress))
    return [pattern.problem for pattern in patterns if pattern.problem is not None]


@dataclass(slots=True)
class Parts:
    """Reads the parts of an attempt's evidence: one that raises is logged, and costs no other."""

    attempt: str
    problems: Problems = field(default_factory=Problems)

    def read(self, name: str, call: Callable[[], Part], default: Part) -> Part:
        """Return the part, or the default where the call raises."""
        try:
            return call()
        except (
            Exception
        ) as error:  # the edge: whatever a job left ends its attempt as its training ended
            log.exception("attempt %s: its %s cannot be read", self.attempt, name)
            self.problems.add(f"its {name} cannot be read: {type(error).__name__}: {error}")
            return default


def _list_unwatched(
    folder: AttemptFolder, beats: tuple[Heartbeat, ...], ending: Ending
) -> tuple[str, ...]:
    """Processes that trained without the guard, each with the reason; logged steps without a guarded process count."""
    processes = tuple(
        line[:UNWATCHED_CHARACTERS_MAX] for line in log_tail(folder.unwatched).splitlines()
    )
    if processes or ending.counts is None or any(beat.torch_version for beat in beats):
        return processes[:UNWATCHED_MAX]
    return ("its log counts steps, and none of its processes has imported PyTorch under the guard",)


def _end_of(
    spec: JobSpec,
    attempt: Attempt,
    jobs: JobFolder,
    rank: int,
    beats: tuple[Heartbeat, ...],
    access: FileAccess,
) -> RankEnd:
    folder = jobs.attempt(attempt.number)
    scan = scan_log(spec, folder.log(rank))
    findings = scan.findings
    if rank == 0 and spec.launch == "dora":
        findings = _with_workers(spec, attempt, jobs, findings, access)
    return end_of(folder.log(rank), rank, read_exit_code(folder, rank), scan, findings, beats)


def end_of(
    path: Path,
    rank: int,
    exit_code: int | None,
    scan: LogScan,
    findings: tuple[Finding, ...],
    beats: tuple[Heartbeat, ...] = (),
) -> RankEnd:
    """Return how a rank ended, from its exit code and its log, which `scan` has fully read."""
    return RankEnd(
        rank=rank,
        exit_code=exit_code,
        log_tail=log_tail(path),
        findings=tuple(_in_bytes(finding, rank, beats) for finding in findings[:FINDINGS_MAX]),
        root_rank=scan.root_rank,
        root_exit_code=scan.root_exit_code,
    )


def scan_log(spec: JobSpec, path: Path) -> LogScan:
    """Return the analysis of a whole log, read in chunks; empty where there is no log."""
    markers = {Phase(phase): pattern for phase, pattern in spec.phases}
    scan = LogScan(log=path.name, command=spec.command or (), markers=markers)
    feed_log(scan, path)
    return scan


def feed_log(scan: LogScan, path: Path) -> None:
    """Feed a whole log to its analysis: ordinary lines block by block, others one by one."""
    for offset, block in log_blocks(path):
        if scan.skip_ordinary_lines(block.decode("utf-8", errors="replace")):
            continue
        for line in block[:-1].split(b"\n"):
            scan.read_line(line[:LINE_BYTES_MAX].decode("utf-8", errors="replace"), offset)
            offset += len(line) + 1


def _with_workers(
    spec: JobSpec,
    attempt: Attempt,
    jobs: JobFolder,
    findings: tuple[Finding, ...],
    access: FileAccess,
) -> tuple[Finding, ...]:
    """The findings with those in the logs of dora's workers (dora/executor.py); the worker that died first leads."""
    died = next(
        (
            parse_count(match[1])
            for finding in findings
            if (match := WORKER_DIED.search(finding.line))
        ),
        0,
    )
    merged = [replace(finding, rank=0) for finding in findings]
    logs = access.search(jobs.output, ("**/worker_*.log",)).matches
    for entry in sorted(logs, key=lambda entry: entry.path)[:WORKERS_MAX]:
        path = Path(entry.path)
        rank = parse_count(path.stem.removeprefix("worker_"))
        if (
            rank is not None and entry.mtime_ns >= attempt.launched_at_s * 1e9
        ):  # not an earlier attempt's
            merged += [replace(finding, rank=rank) for finding in scan_log(spec, path).findings]
    return tuple(
        sorted(merged, key=lambda finding: (finding.cause in COMPLAINTS, finding.rank != died))
    )


def _in_bytes(finding: Finding, rank: int, beats: tuple[Heartbeat, ...]) -> Finding:
    """Return the finding with an out-of-memory report, where its line gives byte counts."""
    live = oom_report.allocated_bytes(finding.line)
    capacity = oom_report.capacity_bytes(finding.line)
    if finding.cause is not Cause.DEVICE_OOM or live is None or capacity is None:
        return finding
    if finding.rank is not None:
        rank = finding.rank
    report = OomReport(
        rank=rank,
        step=next((beat.step for beat in beats if beat.rank == rank), 0),
        phase=finding.phase or "",
        requested_bytes=oom_report.requested_bytes(finding.line),
        live_bytes=live,
        capacity_bytes=capacity,
        foreign_bytes=oom_report.foreign_bytes(finding.line),
        message=finding.line,
    )
    return replace(finding, oom=report)


def first_ended(folder: AttemptFolder, ranks: Iterable[int]) -> int | None:
    """Return the rank whose failing exit code was written first; None without one.

    Used where no launcher reported which rank ended first.
    """
    failed = [rank for rank in ranks if read_exit_code(folder, rank)]
    return min(failed, key=lambda rank: folder.exit_code(rank).stat().st_mtime_ns, default=None)


def _list_lost(
    spec: JobSpec, folder: AttemptFolder, ending: Ending, jobs: JobFolder, attempt: Attempt
) -> tuple[str, ...]:
    """The state that the script did not restore; earlier attempts tell the highest step that it had reached."""
    checkpoint = _left_object(folder.resume).get("checkpoint")
    earlier = [read_ending(jobs.attempt(number)) for number in range(1, attempt.number)]
    highest = max(
        (end.counts[1] for end in earlier if end is not None and end.counts), default=None
    )
    return tuple(
        list_lost(spec, checkpoint if isinstance(checkpoint, str) else None, ending.counts, highest)
    )


def _left_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; {} where there is none."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
