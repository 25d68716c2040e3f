"""What crosses into a training process: files of the attempt folder. Standard library only.

jobs/<job id>/epoch                       number of the newest attempt: older ones may write nothing any more
jobs/<job id>/checkpoints/step-<n>/       canonical checkpoints, renamed into place when complete
jobs/<job id>/output/                     a script's output folder, kept over attempts; at the end, a fine-tuned model
jobs/<job id>/workdir/                    a script's working directory, copied from an upload
jobs/<job id>/uploaded.json               the paths in it that were copied
jobs/<job id>/data/                       a fine-tuning's tokens, written once
jobs/<job id>/attempts/<n>/run.json       TrainingRun, for our engines
jobs/<job id>/attempts/<n>/guard.json     GuardSettings, for every guarded rank
jobs/<job id>/attempts/<n>/resume.json    {checkpoint}: of a script, that it was to go on from; null where none was
jobs/<job id>/attempts/<n>/before.log     of what was run before the ranks
jobs/<job id>/attempts/<n>/output/        output folder of a probe: nothing of it is kept for the job
jobs/<job id>/attempts/<n>/rank<r>.log    standard output and error
jobs/<job id>/attempts/<n>/rank<r>.rc     exit code, or minus the signal, written when the process is gone
jobs/<job id>/attempts/<n>/rank<r>.heartbeat.json   Heartbeat, replaced as training goes on
jobs/<job id>/attempts/<n>/rank<r>.oom.json         OomReport
jobs/<job id>/attempts/<n>/rank<r>.caught.json      OomReport of the last one that was raised, even if caught
jobs/<job id>/attempts/<n>/rank<r>.error.json       ErrorReport
jobs/<job id>/attempts/<n>/unwatched                 a line for each process that used PyTorch unguarded, and why
jobs/<job id>/attempts/<n>/starts                    a line for each process: forked, or why it was started plainly
jobs/<job id>/attempts/<n>/metrics.jsonl            one line per optimizer step, from rank 0: {step, loss, ...}
jobs/<job id>/attempts/<n>/system.<node>.jsonl      one line per sample of a node and its devices: {at_s, system/...}
uploads/<sha256>/files/                   what a job of another machine brought: read, never written
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

from orchestrator.specs.attempt import ErrorReport, Heartbeat, OomReport
from orchestrator.specs.choices import OffloadTarget
from orchestrator.specs.from_json import from_json
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.model import (
    DataSpec,
    ModelSpec,
    TrainingSpec,
)
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plan import Plan

OOM_EXIT_CODE = 77  # the guard's own: an out-of-memory exception, with a report beside the log
# modification time of each uploaded file: 2000-01-01, so that a later write shows
UPLOADED_AT_S = 946_684_800.0
LAUNCH_GRACE_S = 30.0  # of `orc launch`: KillWait of Slurm (slurm.conf)
DEFAULT_HOME = Path("~/.orc")  # of the service of this machine, where no other home is named
# variable of each process that the service starts as one rank: its number, for the guard
GUARDED_RANK = "ORC_RANK"
STALE_EXIT_CODE = 78  # the guard's own: a newer attempt of the job exists


class JobFolder:
    """Paths of one job under the service's home folder. Creates nothing."""

    def __init__(self, home: str | Path, job_id: str) -> None:
        self.path = Path(home) / "jobs" / job_id
        self.epoch = self.path / "epoch"
        self.checkpoints = self.path / "checkpoints"
        self.output = self.path / "output"
        self.workdir = self.path / "workdir"
        self.uploaded = self.path / "uploaded.json"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / "attempts" / str(number))


_UPLOAD = re.compile(r"/.*/uploads/([0-9a-f]{64})/files(|/.*)")  # digest, path below it


def get_uploads_folder(home: str | Path) -> Path:
    """Return the folder of files uploaded from other machines."""
    return Path(home) / "uploads"


def find_upload(home: str | Path, path: str) -> tuple[Path, Path] | None:
    """Return (root of the upload, path below that root) for a path inside an upload of this home;
    None for other paths.

    An upload is recognised by its digest, so a home that was restored elsewhere still finds it.
    """
    match = _UPLOAD.fullmatch(path)
    if match is None or ".." in Path(match[2]).parts:
        return None
    return get_uploads_folder(home) / match[1] / "files", Path(match[2].lstrip("/"))


class AttemptFolder:
    """Paths of the files of one attempt (one launch of a job)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run = self.path / "run.json"
        self.guard = self.path / "guard.json"
        self.metrics = self.path / "metrics.jsonl"
        self.resume = self.path / "resume.json"
        self.before = self.path / "before.log"
        self.output = self.path / "output"
        self.unwatched = self.path / "unwatched"
        self.starts = self.path / "starts"

    def system(self, node: str) -> Path:
        return self.path / f"system.{node}.jsonl"

    def systems(self) -> list[Path]:
        """Return the files of the nodes' system samples, in order."""
        return sorted(self.path.glob("system.*.jsonl"))

    def log(self, rank: int) -> Path:
        return self.path / f"rank{rank}.log"

    def exit_code(self, rank: int) -> Path:
        return self.path / f"rank{rank}.rc"

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"rank{rank}.heartbeat.json"

    def oom(self, rank: int) -> Path:
        return self.path / f"rank{rank}.oom.json"

    def caught(self, rank: int) -> Path:
        return self.path / f"rank{rank}.caught.json"

    def error(self, rank: int) -> Path:
        return self.path / f"rank{rank}.error.json"


@frozen
class GuardSettings:
    """Settings of the guard (our hook inside each rank's process) that are the same for all ranks
    of an attempt.
    """

    attempt_folder: str
    virtual_capacity_bytes: int | None  # cap to enforce on a virtual device; None on a real one
    # a FaultKind to raise for real, in rank `fault_rank` at step `fault_step`
    fault_kind: str | None = None
    fault_rank: int = 0
    fault_step: int = 0
    heartbeat_interval_s: float = 0.5
    # a step after which each rank writes a heartbeat at once: the training's last; 0: unknown
    last_step: int = 0


@frozen
class TrainingRun:
    """Everything that our engines need to run an attempt (one launch of a job)."""

    model: ModelSpec
    data: DataSpec
    training: TrainingSpec
    plan: Plan
    job_folder: str
    attempt_folder: str
    epoch: int
    device: str  # "cuda" or "cpu"
    nvme_folder: str | None = None  # a node's folder for offload_target=nvme

    @property
    def swap_folder(self) -> Path | None:
        """The folder to which ranks swap on each node: <nvme_folder>/<job>-<digest>/<attempt>.

        The digest separates jobs of the same name in different homes. None where the plan swaps nothing to files, or no
        folder is configured.
        """
        if self.plan.offload_target is not OffloadTarget.NVME or self.nvme_folder is None:
            return None
        digest = hashlib.sha256(self.job_folder.encode()).hexdigest()[:12]
        return Path(self.nvme_folder) / f"{Path(self.job_folder).name}-{digest}" / str(self.epoch)


def parse_training_run_json(data: JsonObject) -> TrainingRun:
    """Return the TrainingRun from the JSON form of `dataclasses.asdict`."""
    return from_json(TrainingRun, data)


Report = GuardSettings | TrainingRun | Heartbeat | OomReport | ErrorReport


def write_json(path: Path, report: Report) -> None:
    """Replace `path` atomically by the report as JSON."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(report)))
    temporary.replace(path)
