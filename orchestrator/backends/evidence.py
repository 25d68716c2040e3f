"""What is left of an attempt? Evidence from the files of its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.backends.launcher import write_durably
from orchestrator.specs.attempt import Attempt, ErrorReport, Evidence, Heartbeat, OomReport, RankEnd
from orchestrator.specs.job import JobSpec
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.checkpoint_folder import latest_complete, step_of

LOG_TAIL_BYTES = 64 * 1024
REPORT_BYTES_MAX = 4 * 2**20  # written inside the user's process: never trusted with our memory

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What only the watcher of an attempt saw. Kept beside the other files, so that a restarted service knows it."""

    nodes_lost: tuple[str, ...] = ()
    first_ended_rank: int | None = None
    host_oom_kills: int = 0
    hung_for_s: float | None = None
    launch_error: str | None = None
    stopped: bool = False


def write_ending(folder: AttemptFolder, ending: Ending) -> None:
    """Have `ending` on the disk."""
    folder.path.mkdir(parents=True, exist_ok=True)
    write_durably(_ending_path(folder), json.dumps(dataclasses.asdict(ending)))


def read_ending(folder: AttemptFolder) -> Ending | None:
    """The ending that was written, or None."""
    data = _read_json(_ending_path(folder))
    if data is None:
        return None
    return Ending(**{**data, "nodes_lost": tuple(data["nodes_lost"])})


def _ending_path(folder: AttemptFolder) -> Path:
    return folder.path / "ending.json"


def collect(spec: JobSpec, attempt: Attempt, jobs: JobFolder, ending: Ending) -> Evidence:
    """Everything that the attempt's folder tells, and what its watcher saw."""
    folder = jobs.attempt(attempt.number)
    world_size = sum(len(part.devices) for part in attempt.placement)
    ranks = range(world_size)
    checkpoint = latest_complete(jobs.checkpoints)
    began = any(folder.log(rank).exists() for rank in ranks)
    return Evidence(
        ranks=tuple(
            RankEnd(rank=rank, exit_code=read_exit_code(folder, rank), log_tail=log_tail(folder.log(rank)))
            for rank in (ranks if began else ())
        ),
        ooms=_reports(OomReport, folder.oom, ranks),
        errors=_reports(ErrorReport, folder.error, ranks),
        heartbeats=heartbeats(folder, world_size),
        nodes_lost=ending.nodes_lost,
        first_ended_rank=ending.first_ended_rank,
        host_oom_kills=ending.host_oom_kills,
        hung_for_s=ending.hung_for_s,
        launch_error=ending.launch_error,
        stopped=ending.stopped,
        missing_artifacts=_missing_artifacts(spec, jobs),
        checkpoint_step=None if checkpoint is None else step_of(checkpoint),
    )


def heartbeats(folder: AttemptFolder, world_size: int) -> tuple[Heartbeat, ...]:
    """The last sign of life of every rank that gave one."""
    return _reports(Heartbeat, folder.heartbeat, range(world_size))


def read_exit_code(folder: AttemptFolder, rank: int) -> int | None:
    """Exit code, or minus the signal; None where nobody could tell."""
    try:
        return int(folder.exit_code(rank).read_text())
    except (OSError, ValueError):
        return None


def first_ended(folder: AttemptFolder, world_size: int) -> int | None:
    """The rank whose failing exit code was written first, for want of a launcher that saw it."""
    failed = [rank for rank in range(world_size) if read_exit_code(folder, rank)]
    return min(failed, key=lambda rank: folder.exit_code(rank).stat().st_mtime_ns, default=None)


def log_tail(path: Path, size: int = LOG_TAIL_BYTES) -> str:
    """The last `size` bytes of a log as text; empty where there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - size))
            return log.read(size).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _reports(kind: Callable[..., Report], path: Callable[[int], Path], ranks: range) -> tuple[Report, ...]:
    """Readable reports only: a rank that was killed, or a user's program, may leave anything."""
    found = []
    for rank in ranks:
        data = _read_json(path(rank))
        if data is not None:
            try:
                found.append(kind(**data))
            except TypeError:
                continue
    return tuple(found)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > REPORT_BYTES_MAX:
            return None
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _missing_artifacts(spec: JobSpec, jobs: JobFolder) -> tuple[str, ...]:
    if not spec.success.artifacts:
        return ()
    output = jobs.output if spec.knobs.output_dir or not spec.workdir else Path(spec.workdir)
    return tuple(name for name in spec.success.artifacts if not any(output.glob(name)))
