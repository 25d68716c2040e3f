"""Reads a script's output: artifacts, checkpoints to resume from, and state that a restart loses."""

from __future__ import annotations

import json
import re
import time
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from orchestrator.backends.attempts.durable import open_left
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Resume
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.checkpoint.folder import latest_complete, step_of

ZIP_START = b"PK\x03\x04"
SAFETENSORS_LENGTH_BYTES = 8
ENTRIES_MAX = 1000  # of an output folder that are looked at for files that may be checkpoints
UNMATCHED_MAX = 4  # files that are named
NAME_CHARACTERS_MAX = 80


def output_folder(spec: JobSpec, jobs: JobFolder) -> Path:
    """Return the script's output folder: the one of its knob, or its working directory."""
    return jobs.output if spec.knobs.output_dir or not spec.workdir else Path(spec.workdir)


def missing_results(spec: JobSpec, jobs: JobFolder, folder: AttemptFolder, started: Iterable[int]) -> tuple[str, ...]:
    """Return the parts of `success` that this attempt lacks: files newer than its start, or a log line."""
    output, absent = output_folder(spec, jobs), []
    began_ns = folder.guard.stat().st_mtime_ns if folder.guard.exists() else 0
    for name in spec.success.artifacts:
        if not any(path.stat().st_mtime_ns >= began_ns for path in output.glob(name)):
            absent.append(name)
    if spec.success.log is not None:
        pattern = re.compile(spec.success.log.encode())
        if not any(_has_line(folder.log(rank), pattern) for rank in started):
            absent.append(f"a log line {spec.success.log!r}")
    return tuple(absent)


def newest_checkpoint(spec: JobSpec, output: Path) -> str | None:
    """Return the newest complete checkpoint in a script's output folder; None without one.

    A checkpoint of the job's last step is skipped: a script that compares steps for equality would never end.
    """
    resume, candidates = spec.resume, []
    for path in {path for pattern in resume.checkpoints for path in output.glob(pattern)}:
        step = last_count(resume.step, str(path.relative_to(output)))
        done = step is not None and spec.steps is not None and step >= spec.steps
        if not done and _is_whole(resume, path):
            candidates.append((0 if step is None else step, path.stat().st_mtime_ns, str(path)))
    return max(candidates)[2] if candidates else None


def saved_step(spec: JobSpec, jobs: JobFolder) -> int | None:
    """Return the step of the checkpoint to resume from, in the unit of `resume.step`; None if unknown."""
    if spec.is_script:
        path = newest_checkpoint(spec, output := output_folder(spec, jobs))
        return None if path is None else last_count(spec.resume.step, str(Path(path).relative_to(output)))
    checkpoint = latest_complete(jobs.checkpoints)
    return None if checkpoint is None else step_of(checkpoint)


def list_unmatched(spec: JobSpec, jobs: JobFolder) -> tuple[str, ...]:
    """Return the newest files of a script's output folder, oldest first; () where any matches as a checkpoint.

    A working directory is not listed, since it has the program's files too. No link is followed, since a user's program
    may have made it.
    """
    output = output_folder(spec, jobs)
    if not spec.is_script or output != jobs.output:
        return ()
    try:
        if any(True for pattern in spec.resume.checkpoints for _ in output.glob(pattern)):
            return ()
        entries = islice(chain(output.glob("*"), output.glob("*/*")), ENTRIES_MAX)
        files = [path for path in entries if path.is_file() and not (path.is_symlink() or path.parent.is_symlink())]
        times_ns = {str(path.relative_to(output)): path.stat().st_mtime_ns for path in files}
    except OSError:  # the script removes one
        return ()
    names = [name for name in times_ns if len(name) <= NAME_CHARACTERS_MAX and name.isprintable()]
    return tuple(sorted(names, key=lambda name: (times_ns[name], name))[-UNMATCHED_MAX:])


def last_saved_s(spec: JobSpec, output: Path) -> float | None:
    """Return the time of the last write to a checkpoint, in seconds since 1970; None without checkpoints."""
    newest = None
    try:
        for path in {path for pattern in spec.resume.checkpoints for path in output.glob(pattern)}:
            for entry in (path, *(path.rglob("*") if path.is_dir() else ())):
                newest = max(newest or 0.0, entry.stat().st_mtime)
    except OSError:  # the script is removing one, which is progress
        return time.time()
    return newest


def last_count(pattern: str | None, text: str) -> int | None:
    """Return the number in the last match of a pattern; None without a match."""
    matches = re.findall(pattern, text) if pattern is not None else []
    return int(matches[-1]) if matches and matches[-1].isdecimal() else None


def list_lost(
    spec: JobSpec, checkpoint: str | None, counts: tuple[int, int] | None, before: int | None
) -> Iterator[str]:
    """Yield names of state that a script did not restore from `checkpoint`.

    `counts` are its (first, last) logged steps, `before` is the highest step of earlier attempts.
    """
    if checkpoint is None:
        return
    yield from spec.resume.loses
    reached = max(last_count(spec.resume.step, checkpoint) or 0, before or 0)
    if counts is not None and counts[0] <= 1 < reached:
        yield f"everything: it began at {counts[0]} again, after {reached}, with {Path(checkpoint).name} there"


def _is_whole(resume: Resume, path: Path) -> bool:
    """Whether a checkpoint has every required file, none truncated."""
    try:
        files = [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]
        has_required = all(any(path.glob(pattern)) for pattern in resume.holds) if path.is_dir() else True
        return bool(files) and has_required and not any(_is_torn(file) for file in files)
    except OSError:  # it is being removed
        return False


def _is_torn(file: Path) -> bool:
    """Whether a file is truncated, as after a killed writer; only some formats show it.

    torch.save writes a ZIP archive, whose directory stands last (torch/serialization.py). A file of safetensors begins
    with the length of its header, which says where the last tensor ends (huggingface/safetensors, README.md, Format).
    """
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(len(ZIP_START))
        if start == ZIP_START:
            return not zipfile.is_zipfile(file)
        if file.suffix != ".safetensors" or size < SAFETENSORS_LENGTH_BYTES:
            return size == 0
        content.seek(0)
        header_bytes = int.from_bytes(content.read(SAFETENSORS_LENGTH_BYTES), "little")
        if header_bytes > size:
            return True
        try:
            header = json.loads(content.read(header_bytes))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return False  # it only has that name: nothing is known of its end
        return size < SAFETENSORS_LENGTH_BYTES + header_bytes + max(ends, default=0)


def _has_line(path: Path, pattern: re.Pattern[bytes]) -> bool:
    try:
        with open_left(path) as log:
            return any(pattern.search(line) for line in log)
    except OSError:
        return False
