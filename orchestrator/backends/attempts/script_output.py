"""Reads a script's output: artifacts, checkpoints to resume from, and state that a restart loses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from orchestrator.backends.attempts.left_files import iterate_log_lines
from orchestrator.backends.attempts.output_scan import FileMatch, SearchResult, search_as_user
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.patterns import LinePattern, parse_count
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.checkpoint.folder import find_latest_complete, read_step_of_checkpoint

ENTRIES_MAX = 1000  # of an output folder that are looked at for files that may be checkpoints
UNMATCHED_MAX = 4  # files that are named
NAME_CHARACTERS_MAX = 80


@dataclass(frozen=True, slots=True)
class FileAccess:
    """The rights with which a job's files are searched: a child's interpreter, and its (uid, gid);
    None: this process's.
    """

    python: str = sys.executable
    user: tuple[int, int] | None = None

    def search(
        self, root: Path, patterns: Sequence[str], checkpoint_files: Sequence[str] | None = None
    ) -> SearchResult:
        """Return the files below `root` that match shell patterns; see `output_scan.search`."""
        return search_as_user(self.python, self.user, str(root), patterns, checkpoint_files)


OWN_ACCESS = FileAccess()


@dataclass(frozen=True, slots=True)
class Results:
    """How far an attempt meets the job's `success` conditions: missing files, a success line in the
    log, problems.
    """

    absent: tuple[str, ...] = ()
    is_reported: bool = False
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A script's complete checkpoints, newest first, and whether any file matches the job's
    checkpoint patterns.
    """

    matches: tuple[FileMatch, ...] = ()
    has_matches: bool = False
    problems: tuple[str, ...] = ()


def get_output_folder(spec: JobSpec, job_folder: JobFolder) -> Path:
    """Return the folder into which the script writes: its output argument, or its working
    directory.
    """
    return job_folder.output if spec.knobs.output_dir or not spec.workdir else Path(spec.workdir)


def find_results(
    spec: JobSpec,
    job_folder: JobFolder,
    attempt_folder: AttemptFolder,
    started_ranks: Iterable[int],
    file_access: FileAccess = OWN_ACCESS,
    last_step_s: float = 0.0,
) -> Results:
    """Return how far an attempt meets the job's `success` conditions: files newer than its start,
    and a log line.

    `started_ranks` are the ranks whose logs are read. Without a condition on the log, files have to
    be newer than `last_step_s`, too, in seconds since 1970. A condition that cannot be evaluated
    counts as met, since the training may have met it; `problems` names it.
    """
    absent = list[str]()
    problems = list[str]()
    if spec.success.artifacts:
        began_ns = attempt_folder.guard.stat().st_mtime_ns if attempt_folder.guard.exists() else 0
        if spec.success.log is None:
            began_ns = max(began_ns, int(1e9 * last_step_s))
        result = file_access.search(get_output_folder(spec, job_folder), spec.success.artifacts)
        fresh = {match.pattern for match in result.matches if match.mtime_ns >= began_ns}
        absent += [
            name for name in spec.success.artifacts if name not in (*fresh, *result.unevaluated)
        ]
        problems += result.problems
    if spec.success.log is None:
        return Results(tuple(absent), False, tuple(problems))
    pattern = LinePattern(spec.success.log)
    is_reported = any(
        pattern.matches(line)
        for rank in started_ranks
        for _, line in iterate_log_lines(attempt_folder.log(rank))
    )
    if pattern.problem is not None:
        problems.append(pattern.problem)
    elif not is_reported:
        absent.append(f"a log line {spec.success.log!r}")
    return Results(tuple(absent), is_reported, tuple(problems))


def find_checkpoints(spec: JobSpec, output_folder: Path, file_access: FileAccess) -> Checkpoints:
    """Return the complete checkpoints in a script's output folder, newest first: by step, then by time.

    A checkpoint of the job's last step is left out: a script that compares steps for equality would never end.
    """
    result = file_access.search(output_folder, spec.resume.checkpoints, spec.resume.holds)
    step_pattern = None if spec.resume.step is None else LinePattern(spec.resume.step)
    problems = [*result.problems]
    if step_pattern is not None and step_pattern.problem is not None:
        problems.append(step_pattern.problem)
    candidates = dict[tuple[int, int, str], FileMatch]()
    for match in result.matches:
        step = find_last_number(step_pattern, make_relative_to_output(output_folder, match.path))
        is_last = step is not None and spec.steps is not None and step >= spec.steps
        if match.is_whole and not is_last:
            candidates[step or 0, match.mtime_ns, match.path] = match
    matches = tuple(candidates[key] for key in sorted(candidates, reverse=True))
    return Checkpoints(matches, bool(result.matches), tuple(problems))


def find_newest_checkpoint(
    spec: JobSpec, output_folder: Path, file_access: FileAccess = OWN_ACCESS
) -> str | None:
    """Return the path of the newest complete checkpoint in a script's output folder; None without one."""
    return next(
        (match.path for match in find_checkpoints(spec, output_folder, file_access).matches), None
    )


def find_saved_step(spec: JobSpec, job_folder: JobFolder, checkpoints: Checkpoints) -> int | None:
    """Return the step of the newest of these checkpoints, in the unit of `resume.step`; None if the
    step is unknown.

    For jobs of our engines, the checkpoint is the newest in the job's own folder.
    """
    if spec.is_script:
        pattern = None if spec.resume.step is None else LinePattern(spec.resume.step)
        newest = next(iter(checkpoints.matches), None)
        return (
            None
            if newest is None
            else find_last_number(
                pattern, make_relative_to_output(get_output_folder(spec, job_folder), newest.path)
            )
        )
    checkpoint = find_latest_complete(job_folder.checkpoints)
    return None if checkpoint is None else read_step_of_checkpoint(checkpoint)


def list_unmatched_files(spec: JobSpec, job_folder: JobFolder) -> tuple[str, ...]:
    """Return the newest files of the script's output folder, oldest first, for a job of which no
    file is a known checkpoint.

    The user may then see which pattern is missing. A working directory is not listed, since it has
    the program's files too. No link is followed, since a user's program may have made it.
    """
    output_folder = get_output_folder(spec, job_folder)
    if not spec.is_script or output_folder != job_folder.output:
        return ()
    try:
        entries = islice(chain(output_folder.glob("*"), output_folder.glob("*/*")), ENTRIES_MAX)
        files = [
            path
            for path in entries
            if path.is_file() and not (path.is_symlink() or path.parent.is_symlink())
        ]
        times_ns = {str(path.relative_to(output_folder)): path.stat().st_mtime_ns for path in files}
    except OSError:  # the script removes one
        return ()
    names = [name for name in times_ns if len(name) <= NAME_CHARACTERS_MAX and name.isprintable()]
    return tuple(sorted(names, key=lambda name: (times_ns[name], name))[-UNMATCHED_MAX:])


def find_last_saved_s(spec: JobSpec, output_folder: Path, file_access: FileAccess) -> float | None:
    """Return the time of the last write to any checkpoint, in seconds since 1970; None without
    checkpoints.
    """
    result = file_access.search(output_folder, spec.resume.checkpoints, ())
    return max((match.newest_s for match in result.matches), default=None)


def make_relative_to_output(output_folder: Path, path: str) -> str:
    """Return a path relative to the output folder; unchanged where it is outside that folder."""
    return path.removeprefix(f"{output_folder}/")


def find_last_number(pattern: LinePattern | None, text: str) -> int | None:
    """Return the number in the last match of the pattern in a text; None without a match or a
    pattern.
    """
    groups = [] if pattern is None else pattern.list_groups(text)
    return parse_count(groups[-1]) if groups else None


def iterate_lost_state(
    spec: JobSpec,
    checkpoint: str | None,
    logged_steps: tuple[int, int] | None,
    earlier_step: int | None,
) -> Iterator[str]:
    """Yield the names of state (such as the optimizer) that a script did not restore from
    `checkpoint`.

    `logged_steps` are its (first, last) logged steps; `earlier_step` is the highest step of earlier attempts.
    """
    if checkpoint is None:
        return
    yield from spec.resume.loses
    pattern = None if spec.resume.step is None else LinePattern(spec.resume.step)
    reached = max(find_last_number(pattern, checkpoint) or 0, earlier_step or 0)
    if logged_steps is not None and logged_steps[0] <= 1 < reached:
        yield f"everything: it began at {logged_steps[0]} again, after {reached}, with {Path(checkpoint).name} there"
