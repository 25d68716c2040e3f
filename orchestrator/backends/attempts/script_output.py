"""Reads a script's output: artifacts, checkpoints to resume from, and state that a restart loses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from orchestrator.backends.attempts.left_files import log_lines
from orchestrator.backends.attempts.output_scan import FileMatch, SearchResult, search_as
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.patterns import LinePattern, parse_count
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.checkpoint.folder import find_latest_complete, step_of_checkpoint

ENTRIES_MAX = 1000  # of an output folder that are looked at for files that may be checkpoints
UNMATCHED_MAX = 4  # files that are named
NAME_CHARACTERS_MAX = 80


@dataclass(frozen=True, slots=True)
class FileAccess:
    """Whose rights reach a job's files: the interpreter of a child, and its (uid, gid); None: this process's."""

    python: str = sys.executable
    user: tuple[int, int] | None = None

    def search(
        self, root: Path, patterns: Sequence[str], holds: Sequence[str] | None = None
    ) -> SearchResult:
        """Return the files that match shell patterns below `root`, as `output_scan.search` does."""
        return search_as(self.python, self.user, str(root), patterns, holds)


OWN_ACCESS = FileAccess()


@dataclass(frozen=True, slots=True)
class Results:
    """What `success` asks of an attempt: parts that it lacks, whether its log reports success, and problems."""

    absent: tuple[str, ...] = ()
    is_reported: bool = False
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A script's complete checkpoints, newest first, and whether any file matches the job's patterns at all."""

    matches: tuple[FileMatch, ...] = ()
    has_matches: bool = False
    problems: tuple[str, ...] = ()


def output_folder(spec: JobSpec, jobs: JobFolder) -> Path:
    """Return the script's output folder: the one of its knob, or its working directory."""
    return jobs.output if spec.knobs.output_dir or not spec.workdir else Path(spec.workdir)


def find_results(
    spec: JobSpec,
    jobs: JobFolder,
    folder: AttemptFolder,
    started: Iterable[int],
    access: FileAccess = OWN_ACCESS,
) -> Results:
    """Return what `success` asks of an attempt: files newer than its start, and a log line.

    A part that cannot be evaluated is not absent, since the training may have left it; `problems` names it.
    """
    absent = list[str]()
    problems = list[str]()
    if spec.success.artifacts:
        began_ns = folder.guard.stat().st_mtime_ns if folder.guard.exists() else 0
        result = access.search(output_folder(spec, jobs), spec.success.artifacts)
        fresh = {match.pattern for match in result.matches if match.mtime_ns >= began_ns}
        absent += [
            name for name in spec.success.artifacts if name not in (*fresh, *result.unevaluated)
        ]
        problems += result.problems
    if spec.success.log is None:
        return Results(tuple(absent), False, tuple(problems))
    pattern = LinePattern(spec.success.log)
    is_reported = any(
        pattern.matches(line) for rank in started for _, line in log_lines(folder.log(rank))
    )
    if pattern.problem is not None:
        problems.append(pattern.problem)
    elif not is_reported:
        absent.append(f"a log line {spec.success.log!r}")
    return Results(tuple(absent), is_reported, tuple(problems))


def find_checkpoints(spec: JobSpec, output: Path, access: FileAccess = OWN_ACCESS) -> Checkpoints:
    """Return the complete checkpoints in a script's output folder, newest first: by step, then by time.

    A checkpoint of the job's last step is left out: a script that compares steps for equality would never end.
    """
    result = access.search(output, spec.resume.checkpoints, spec.resume.holds)
    step_pattern = None if spec.resume.step is None else LinePattern(spec.resume.step)
    problems = [*result.problems]
    if step_pattern is not None and step_pattern.problem is not None:
        problems.append(step_pattern.problem)
    candidates = dict[tuple[int, int, str], FileMatch]()
    for match in result.matches:
        step = last_count(step_pattern, path_below(output, match.path))
        is_last = step is not None and spec.steps is not None and step >= spec.steps
        if match.is_whole and not is_last:
            candidates[step or 0, match.mtime_ns, match.path] = match
    matches = tuple(candidates[key] for key in sorted(candidates, reverse=True))
    return Checkpoints(matches, bool(result.matches), tuple(problems))


def newest_checkpoint(spec: JobSpec, output: Path, access: FileAccess = OWN_ACCESS) -> str | None:
    """Return the path of the newest complete checkpoint in a script's output folder; None without one."""
    return next((match.path for match in find_checkpoints(spec, output, access).matches), None)


def saved_step(spec: JobSpec, jobs: JobFolder, checkpoints: Checkpoints) -> int | None:
    """Return the step of the checkpoint to resume from, in the unit of `resume.step`; None if unknown."""
    if spec.is_script:
        pattern = None if spec.resume.step is None else LinePattern(spec.resume.step)
        newest = next(iter(checkpoints.matches), None)
        return (
            None
            if newest is None
            else last_count(pattern, path_below(output_folder(spec, jobs), newest.path))
        )
    checkpoint = find_latest_complete(jobs.checkpoints)
    return None if checkpoint is None else step_of_checkpoint(checkpoint)


def list_unmatched(spec: JobSpec, jobs: JobFolder) -> tuple[str, ...]:
    """Return the newest files of a script's output folder, oldest first, for a job without any checkpoint.

    A working directory is not listed, since it has the program's files too. No link is followed, since a user's program
    may have made it.
    """
    output = output_folder(spec, jobs)
    if not spec.is_script or output != jobs.output:
        return ()
    try:
        entries = islice(chain(output.glob("*"), output.glob("*/*")), ENTRIES_MAX)
        files = [
            path
            for path in entries
            if path.is_file() and not (path.is_symlink() or path.parent.is_symlink())
        ]
        times_ns = {str(path.relative_to(output)): path.stat().st_mtime_ns for path in files}
    except OSError:  # the script removes one
        return ()
    names = [name for name in times_ns if len(name) <= NAME_CHARACTERS_MAX and name.isprintable()]
    return tuple(sorted(names, key=lambda name: (times_ns[name], name))[-UNMATCHED_MAX:])


def last_saved_s(spec: JobSpec, output: Path, access: FileAccess = OWN_ACCESS) -> float | None:
    """Return the time of the last write to a checkpoint, in seconds since 1970; None without checkpoints."""
    result = access.search(output, spec.resume.checkpoints, ())
    return max((match.newest_s for match in result.matches), default=None)


def path_below(output: Path, path: str) -> str:
    """Return a path relative to the output folder; unchanged where it lies elsewhere."""
    return path.removeprefix(f"{output}/")


def last_count(pattern: LinePattern | None, text: str) -> int | None:
    """Return the number in the last match of a pattern; None without a match."""
    groups = [] if pattern is None else pattern.list_groups(text)
    return parse_count(groups[-1]) if groups else None


def list_lost(
    spec: JobSpec, checkpoint: str | None, counts: tuple[int, int] | None, before: int | None
) -> Iterator[str]:
    """Yield names of state that a script did not restore from `checkpoint`.

    `counts` are its (first, last) logged steps, `before` is the highest step of earlier attempts.
    """
    if checkpoint is None:
        return
    yield from spec.resume.loses
    pattern = None if spec.resume.step is None else LinePattern(spec.resume.step)
    reached = max(last_count(pattern, checkpoint) or 0, before or 0)
    if counts is not None and counts[0] <= 1 < reached:
        yield f"everything: it began at {counts[0]} again, after {reached}, with {Path(checkpoint).name} there"
