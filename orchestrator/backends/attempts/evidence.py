"""Collects the evidence (raw facts of its end) of an attempt from its folder and its script's output."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.backends.attempts.durable import open_left, write_durably
from orchestrator.backends.attempts.launch_request import started_ranks
from orchestrator.backends.attempts.script_output import list_lost, list_unmatched, missing_results, saved_step
from orchestrator.scheduling.failures.signatures import COMPLAINTS, FINDINGS_MAX, LogScan
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
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.guard import oom_report

LOG_TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 2**20
WORKERS_MAX = 1024  # logs of dora's ranks that are read
WORKER_DIED = re.compile(r"Executor: Worker (\d+) died")
LINE_BYTES_MAX = 16 * 1024  # of a line that are read: no cause stands further from its beginning
UNWATCHED_MAX = 4  # processes that are named
REPORT_BYTES_MAX = 4 * 2**20  # written inside the user's process: never trusted with our memory

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Return the stored ending; None without one."""
    data = _read_json(_ending_path(folder))
    if data is None:
        return None
    tuples = {name: tuple(data[name]) for name in ("nodes_lost", "free_before_bytes")}
    return Ending(**{**data, **tuples, "counts": tuple(data["counts"]) if data["counts"] else None})


def _ending_path(folder: AttemptFolder) -> Path:
    return folder.path / "ending.json"


def collect(spec: JobSpec, attempt: Attempt, jobs: JobFolder, ending: Ending) -> Evidence:
    """Return the attempt's evidence (raw facts of its end), from its files and its watcher's facts."""
    folder = jobs.attempt(attempt.number)
    world_size = sum(len(part.devices) for part in attempt.placement)
    ranks = range(world_size)
    started = started_ranks(spec, attempt.placement)
    began = any(folder.log(rank).exists() for rank in started)
    absent = () if attempt.probe else missing_results(spec, jobs, folder, started)
    beats = heartbeats(folder, world_size)
    return Evidence(
        ranks=tuple(_end_of(spec, attempt, jobs, rank, beats) for rank in (started if began else ())),
        ooms=_reports(OomReport, folder.oom, ranks),
        caught=_reports(OomReport, folder.caught, ranks),
        errors=_reports(ErrorReport, folder.error, ranks),
        heartbeats=beats,
        nodes_lost=ending.nodes_lost,
        first_ended_rank=ending.first_ended_rank,
        host_oom_kills=ending.host_oom_kills,
        hung_for_s=ending.hung_for_s,
        launch_error=ending.launch_error,
        no_program=ending.no_program,
        stopped=ending.stopped,
        missing_artifacts=absent,
        finished=spec.success.log is not None and not absent and not attempt.probe,
        lost=tuple(list_lost(spec, _resumed_from(folder), ending.counts, _highest_step(jobs, attempt))),
        checkpoint_step=None if attempt.probe else saved_step(spec, jobs),
        unmatched=() if attempt.probe else list_unmatched(spec, jobs),
        free_before_bytes=ending.free_before_bytes,
        unwatched=_list_unwatched(folder, beats, ending) if began else (),
        virtual=(_read_json(folder.guard) or {}).get("virtual_capacity_bytes") is not None,
    )


def _list_unwatched(folder: AttemptFolder, beats: tuple[Heartbeat, ...], ending: Ending) -> tuple[str, ...]:
    """Processes that trained without the guard, each with the reason; logged steps without a guarded process count."""
    processes = tuple(log_tail(folder.unwatched).splitlines()[:UNWATCHED_MAX])
    if processes or ending.counts is None or any(beat.torch_version for beat in beats):
        return processes
    return ("its log counts steps, and none of its processes has imported PyTorch under the guard",)


def _end_of(spec: JobSpec, attempt: Attempt, jobs: JobFolder, rank: int, beats: tuple[Heartbeat, ...]) -> RankEnd:
    folder = jobs.attempt(attempt.number)
    scan = scan_log(spec, folder.log(rank))
    findings = scan.findings
    if rank == 0 and spec.launch == "dora":
        findings = _with_workers(spec, attempt, jobs, findings)
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
    for offset, line in log_lines(path):
        scan.feed(line, offset)
    return scan


def _with_workers(
    spec: JobSpec, attempt: Attempt, jobs: JobFolder, findings: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    """The findings with those in the logs of dora's workers (dora/executor.py); the worker that died first leads."""
    died = next((int(match[1]) for finding in findings if (match := WORKER_DIED.search(finding.line))), 0)
    merged = [replace(finding, rank=0) for finding in findings]
    for path in sorted(jobs.output.rglob("worker_*.log"))[:WORKERS_MAX]:
        rank = path.stem.removeprefix("worker_")
        if rank.isdecimal() and path.stat().st_mtime >= attempt.launched_at_s:  # not an earlier attempt's
            merged += [replace(finding, rank=int(rank)) for finding in scan_log(spec, path).findings]
    return tuple(sorted(merged, key=lambda finding: (finding.cause in COMPLAINTS, finding.rank != died)))


def log_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (byte offset, line) of a log. A carriage return ends a line too, as progress bars write only these."""
    try:
        with open_left(path) as log:
            begin, rest, dropped = 0, b"", 0
            while chunk := log.read(CHUNK_BYTES):
                *whole, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
                for line in whole:
                    yield begin, line[:LINE_BYTES_MAX].decode("utf-8", errors="replace")
                    begin += len(line) + 1 + dropped
                    dropped = 0
                if len(rest) > CHUNK_BYTES:  # a line without end
                    dropped += len(rest) - LINE_BYTES_MAX
                    rest = rest[:LINE_BYTES_MAX]
            yield begin, rest[:LINE_BYTES_MAX].decode("utf-8", errors="replace")
    except OSError:
        return


def _in_bytes(finding: Finding, rank: int, beats: tuple[Heartbeat, ...]) -> Finding:
    """Return the finding with an out-of-memory report, where its line gives byte counts."""
    live, capacity = oom_report.allocated_bytes(finding.line), oom_report.capacity_bytes(finding.line)
    if finding.cause is not Cause.DEVICE_OOM or live is None or capacity is None:
        return finding
    rank = rank if finding.rank is None else finding.rank
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


def heartbeats(folder: AttemptFolder, world_size: int) -> tuple[Heartbeat, ...]:
    """Return the last heartbeat (progress report) of each rank that wrote one."""
    return _reports(Heartbeat, folder.heartbeat, range(world_size))


def read_exit_code(folder: AttemptFolder, rank: int) -> int | None:
    """Return a rank's exit code, or minus the signal; None where none was written."""
    try:
        with open_left(folder.exit_code(rank)) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def first_ended(folder: AttemptFolder, ranks: Iterable[int]) -> int | None:
    """Return the rank whose failing exit code was written first; None without one.

    Used where no launcher reported which rank ended first.
    """
    failed = [rank for rank in ranks if read_exit_code(folder, rank)]
    return min(failed, key=lambda rank: folder.exit_code(rank).stat().st_mtime_ns, default=None)


def log_tail(path: Path, size: int = LOG_TAIL_BYTES) -> str:
    """Return the last `size` bytes of a log as text; "" where there is none."""
    try:
        with open_left(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - size))
            return log.read(size).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _reports(kind: Callable[..., Report], path: Callable[[int], Path], ranks: range) -> tuple[Report, ...]:
    """Reports that can be read; a killed rank or a user's program may leave others."""
    reports = []
    for rank in ranks:
        data = _read_json(path(rank))
        if data is not None:
            try:
                reports.append(kind(**data))
            except TypeError:
                continue
    return tuple(reports)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        with open_left(path) as file:
            data = json.loads(file.read(REPORT_BYTES_MAX + 1))  # what is longer is no JSON any more
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _resumed_from(folder: AttemptFolder) -> str | None:
    checkpoint = (_read_json(folder.resume) or {}).get("checkpoint")
    return checkpoint if isinstance(checkpoint, str) else None


def _highest_step(jobs: JobFolder, attempt: Attempt) -> int | None:
    """The highest number that the logs of earlier attempts counted."""
    endings = [read_ending(jobs.attempt(number)) for number in range(1, attempt.number)]
    return max((ending.counts[1] for ending in endings if ending is not None and ending.counts), default=None)
