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
from orchestrator.backends.attempts.launch_request import list_started_ranks
from orchestrator.backends.attempts.left_files import (
    LINE_BYTES_MAX,
    Problems,
    Report,
    Reports,
    iterate_log_blocks,
    read_exit_code,
    read_log_tail,
    read_reports,
)
from orchestrator.backends.attempts.script_output import (
    OWN_ACCESS,
    Checkpoints,
    FileAccess,
    Results,
    find_checkpoints,
    find_results,
    find_saved_step,
    get_output_folder,
    iterate_lost_state,
    list_unmatched_files,
)
from orchestrator.backends.attempts.system_metrics import compute_mean_busy_percent
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
    count_devices,
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
    """Facts about an attempt's end that only its watcher saw. They are stored in the attempt's
    folder, for a restarted service.
    """

    nodes_lost: tuple[str, ...] = ()
    first_ended_rank: int | None = None
    host_oom_kills: int = 0
    disk_full: bool = False
    hung_for_s: float | None = None
    launch_error: str | None = None
    no_program: bool = False
    stopped: bool = False
    counts: tuple[int, int] | None = None  # (first, last) number of the job's `progress` in its log
    free_before_bytes: tuple[int, ...] = ()


def write_ending(folder: AttemptFolder, ending: Ending) -> None:
    """Store `ending` durably in the attempt's folder."""
    folder.path.mkdir(parents=True, exist_ok=True)
    write_durably(_get_ending_path(folder), json.dumps(dataclasses.asdict(ending)))


def read_ending(folder: AttemptFolder) -> Ending | None:
    """Return the ending that the watcher stored in the attempt's folder.

    None where there is none, or where this service cannot read the file.
    """
    try:
        ending: Ending = _make_ending_adapter().validate_python(read_json(_get_ending_path(folder)))
    except (OSError, ValueError):
        return None
    return ending


@functools.cache
def _make_ending_adapter() -> TypeAdapter[Ending]:
    return TypeAdapter(Ending)


def _get_ending_path(folder: AttemptFolder) -> Path:
    return folder.path / "ending.json"


def collect_evidence(
    spec: JobSpec,
    attempt: Attempt,
    job_folder: JobFolder,
    ending: Ending,
    file_access: FileAccess = OWN_ACCESS,
) -> Evidence:
    """Return the attempt's evidence (raw facts of its end), from its files and from its watcher's
    facts.

    A part that cannot be read is left out and named in the evidence's field `unread`.
    """
    folder = job_folder.attempt(attempt.number)
    world_size = count_devices(attempt.placement)
    started = list_started_ranks(spec, attempt.placement)
    # a program may remove its log: the launcher writes the exit code all the same
    files = [*map(folder.log, started), *map(folder.exit_code, started)]
    began = any(file.exists() for file in files)
    parts = Parts(attempt.name)

    def read(kind: type[Report], path: Callable[[int], Path]) -> tuple[Report, ...]:
        reports = parts.read_part(
            kind.__name__, lambda: read_reports(kind, path, range(world_size)), Reports[Report]()
        )
        parts.problems.add_sentences(*reports.problems)
        return reports.reports

    beats = read(Heartbeat, folder.heartbeat)
    # of what stood still, a file that was saved before the last step is none of the whole training
    last_step_s = 0.0
    if ending.hung_for_s is not None:
        last_step_s = min((beat.step_at_s for beat in beats), default=0.0)
    parts.problems.add_sentences(*_list_refused_patterns(spec))
    results = Results()
    checkpoints = Checkpoints()
    unmatched = tuple[str, ...]()
    if not attempt.probe:
        results = parts.read_part(
            "results",
            lambda: find_results(spec, job_folder, folder, started, file_access, last_step_s),
            results,
        )
        parts.problems.add_sentences(*results.problems)
    if not attempt.probe and spec.is_script:
        output = get_output_folder(spec, job_folder)
        checkpoints = parts.read_part(
            "checkpoints", lambda: find_checkpoints(spec, output, file_access), checkpoints
        )
        parts.problems.add_sentences(*checkpoints.problems)
        if not checkpoints.has_matches:
            unmatched = parts.read_part(
                "output", lambda: list_unmatched_files(spec, job_folder), unmatched
            )
    step = None
    if not attempt.probe:
        step = parts.read_part(
            "checkpoint", lambda: find_saved_step(spec, job_folder, checkpoints), step
        )
    ranks = [
        parts.read_part(
            f"log of rank {rank}",
            partial(_read_rank_end, spec, attempt, job_folder, rank, beats, file_access),
            RankEnd(
                rank=rank,
                exit_code=read_exit_code(folder, rank),
                log_tail=read_log_tail(folder.log(rank)),
            ),
        )
        for rank in (started if began else ())
    ]
    lost = tuple[str, ...]()
    unwatched = tuple[str, ...]()
    checkpoint = _read_resumed_checkpoint(folder)
    lost = parts.read_part(
        "restart",
        lambda: _list_lost_state(spec, checkpoint, ending, job_folder, attempt),
        lost,
    )
    if began:
        unwatched = parts.read_part(
            "unwatched", lambda: _describe_unwatched_processes(folder, beats, ending), unwatched
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
        resumed=checkpoint is not None,
        unmatched=unmatched,
        unwatched=unwatched,
        busy_percent=parts.read_part("samples", lambda: compute_mean_busy_percent(folder), None),
        virtual=_read_json_or_empty(folder.guard).get("virtual_capacity_bytes") is not None,
        unread=tuple(parts.problems.sentences),
        **_make_watcher_fields(ending),
    )


def collect_folder_evidence(folder: AttemptFolder) -> Evidence:
    """Return the evidence (raw facts of its end) from an attempt's folder alone, without its job.

    Results that the script lacks are then unknown. The ranks are those that left a log or an exit
    code, at most RANKS_MAX.
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
            ends.append(make_rank_end(folder.log(rank), rank, code, scan, scan.findings, beats))
    ending = read_ending(folder) or Ending()
    return Evidence(
        ranks=tuple(ends),
        ooms=read_reports(OomReport, folder.oom, ranks).reports,
        caught=read_reports(OomReport, folder.caught, ranks).reports,
        errors=read_reports(ErrorReport, folder.error, ranks).reports,
        heartbeats=beats,
        virtual=_read_json_or_empty(folder.guard).get("virtual_capacity_bytes") is not None,
        **_make_watcher_fields(ending),
    )


def _make_watcher_fields(ending: Ending) -> JsonObject:
    """Return the fields of Evidence that only the attempt's watcher saw, from its ending: {field
    name: value}.
    """
    names = {entry.name for entry in dataclasses.fields(Evidence)}
    return {
        entry.name: getattr(ending, entry.name)
        for entry in dataclasses.fields(Ending)
        if entry.name in names
    }


def _list_refused_patterns(spec: JobSpec) -> list[str]:
    """Return a sentence for each log pattern of the job that the pattern engine refuses: those of
    `progress` and phases.
    """
    patterns = [LinePattern(pattern) for _, pattern in spec.phases]
    if spec.progress is not None:
        patterns.append(LinePattern(spec.progress))
    return [pattern.problem for pattern in patterns if pattern.problem is not None]


@dataclass(slots=True)
class Parts:
    """Reads the parts of an attempt's evidence. A part whose reading raises is logged; the other
    parts are still read.
    """

    attempt: str
    problems: Problems = field(default_factory=Problems)

    def read_part(self, part_name: str, read: Callable[[], Part], default: Part) -> Part:
        """Return the result of `read`. Where `read` raises, log the error under `part_name`, and
        return `default`.
        """
        try:
            return read()
        except (
            Exception
        ) as error:  # the edge: whatever a job left ends its attempt as its training ended
            log.exception("attempt %s: its %s cannot be read", self.attempt, part_name)
            self.problems.add_sentences(
                f"its {part_name} cannot be read: {type(error).__name__}: {error}"
            )
            return default


def _describe_unwatched_processes(
    folder: AttemptFolder, heartbeats: tuple[Heartbeat, ...], ending: Ending
) -> tuple[str, ...]:
    """Return a text for each process that trained without our guard, with the reason.

    Where the log counts training steps but no process imported PyTorch under the guard, one text
    says so.
    """
    processes = tuple(
        line[:UNWATCHED_CHARACTERS_MAX] for line in read_log_tail(folder.unwatched).splitlines()
    )
    if processes or ending.counts is None or any(beat.torch_version for beat in heartbeats):
        return processes[:UNWATCHED_MAX]
    return ("its log counts steps, and none of its processes has imported PyTorch under the guard",)


def _read_rank_end(
    spec: JobSpec,
    attempt: Attempt,
    job_folder: JobFolder,
    rank: int,
    heartbeats: tuple[Heartbeat, ...],
    file_access: FileAccess,
) -> RankEnd:
    folder = job_folder.attempt(attempt.number)
    scan = scan_log(spec, folder.log(rank))
    findings = scan.findings
    if rank == 0 and spec.launch == "dora":
        findings = _add_worker_findings(spec, attempt, job_folder, findings, file_access)
    return make_rank_end(
        folder.log(rank), rank, read_exit_code(folder, rank), scan, findings, heartbeats
    )


def make_rank_end(
    log_path: Path,
    rank: int,
    exit_code: int | None,
    log_scan: LogScan,
    findings: tuple[Finding, ...],
    heartbeats: tuple[Heartbeat, ...] = (),
) -> RankEnd:
    """Return how a rank ended, from its exit code and the analysis of its log.

    `log_scan` has already read the whole log at `log_path`.
    """
    return RankEnd(
        rank=rank,
        exit_code=exit_code,
        log_tail=read_log_tail(log_path),
        findings=tuple(
            _add_oom_report(finding, rank, heartbeats) for finding in findings[:FINDINGS_MAX]
        ),
        root_rank=log_scan.root_rank,
        root_exit_code=log_scan.root_exit_code,
    )


def scan_log(spec: JobSpec, log_path: Path) -> LogScan:
    """Return the analysis of a whole log, read in chunks; an empty analysis where there is no
    log.
    """
    markers = {Phase(phase): pattern for phase, pattern in spec.phases}
    scan = LogScan(log_name=log_path.name, command=spec.command or (), pattern_by_phase=markers)
    scan_lines_of(scan, log_path)
    return scan


def scan_lines_of(log_scan: LogScan, log_path: Path) -> None:
    """Pass the lines of a whole log to its analysis: ordinary lines block by block, lines of
    interest one by one.
    """
    for offset, block in iterate_log_blocks(log_path):
        if log_scan.skip_ordinary_lines(block.decode("utf-8", errors="replace")):
            continue
        for line in block[:-1].split(b"\n"):
            log_scan.read_line(line[:LINE_BYTES_MAX].decode("utf-8", errors="replace"), offset)
            offset += len(line) + 1


def _add_worker_findings(
    spec: JobSpec,
    attempt: Attempt,
    job_folder: JobFolder,
    findings: tuple[Finding, ...],
    file_access: FileAccess,
) -> tuple[Finding, ...]:
    """Return these findings together with those in the logs of dora's workers (dora/executor.py).

    The findings of the worker that died first stand first.
    """
    died = next(
        (
            parse_count(match[1])
            for finding in findings
            if (match := WORKER_DIED.search(finding.line))
        ),
        0,
    )
    merged = [replace(finding, rank=0) for finding in findings]
    logs = file_access.search(job_folder.output, ("**/worker_*.log",)).matches
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


def _add_oom_report(finding: Finding, rank: int, heartbeats: tuple[Heartbeat, ...]) -> Finding:
    """Return the finding with an out-of-memory report where its line gives byte counts; else
    unchanged.
    """
    live = oom_report.parse_allocated_bytes(finding.line)
    capacity = oom_report.parse_capacity_bytes(finding.line)
    if finding.cause is not Cause.DEVICE_OOM or live is None or capacity is None:
        return finding
    if finding.rank is not None:
        rank = finding.rank
    report = OomReport(
        rank=rank,
        step=next((beat.step for beat in heartbeats if beat.rank == rank), 0),
        phase=finding.phase or "",
        requested_bytes=oom_report.parse_requested_bytes(finding.line),
        live_bytes=live,
        capacity_bytes=capacity,
        foreign_bytes=oom_report.parse_foreign_bytes(finding.line),
        message=finding.line,
    )
    return replace(finding, oom=report)


def find_first_failed_rank(folder: AttemptFolder, ranks: Iterable[int]) -> int | None:
    """Return the rank whose failing exit code was written first; None where no rank failed.

    This order is used where no launcher reported which rank ended first.
    """
    failed = [rank for rank in ranks if read_exit_code(folder, rank)]
    return min(failed, key=lambda rank: folder.exit_code(rank).stat().st_mtime_ns, default=None)


def _read_resumed_checkpoint(folder: AttemptFolder) -> str | None:
    """Return the path of the checkpoint from which a script was to go on; None without one."""
    path = _read_json_or_empty(folder.resume).get("checkpoint")
    return path if isinstance(path, str) else None


def _list_lost_state(
    spec: JobSpec,
    checkpoint: str | None,
    ending: Ending,
    job_folder: JobFolder,
    attempt: Attempt,
) -> tuple[str, ...]:
    """Return the names of the state (such as the optimizer) that the script did not restore from
    its checkpoint.

    The highest step of earlier attempts shows how far the script had come.
    """
    earlier = [read_ending(job_folder.attempt(number)) for number in range(1, attempt.number)]
    highest = max(
        (end.counts[1] for end in earlier if end is not None and end.counts), default=None
    )
    return tuple(iterate_lost_state(spec, checkpoint, ending.counts, highest))


def _read_json_or_empty(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; {} where there is none."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
