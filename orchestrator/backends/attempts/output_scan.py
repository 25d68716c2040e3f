"""Searches a job's files by shell patterns, within bounds, in this process or as the job's own user.

Standard library only: `python -m orchestrator.backends.attempts.output_scan` is the child that runs as that user.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.specs.globs import ANY_FOLDERS, compile_glob_part, parse_glob

ENTRIES_MAX = 200_000  # names that one search looks at
MATCHES_MAX = 5_000  # of one search
SEARCH_S_MAX = 10.0
CHILD_S_MAX = SEARCH_S_MAX + 20.0  # of a child, whose start may be slow, or whose file system hangs
REPLY_BYTES_MAX = 16 * 2**20
ZIP_START = b"PK\x03\x04"
SAFETENSORS_LENGTH_BYTES = 8
# huggingface/safetensors, safetensors/src/tensor.rs, MAX_HEADER_SIZE
SAFETENSORS_HEADER_BYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class FileMatch:
    """A file or folder that matches a pattern. `newest_s` and `is_whole` are set for checkpoints
    only.
    """

    pattern: str
    path: str
    mtime_ns: int
    newest_s: float = 0.0  # last write to it, or to a file in it, in seconds since 1970
    is_whole: bool = False  # it has every required file, none truncated


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The matches of a search, and sentences on patterns that were not, or not fully, evaluated."""

    matches: tuple[FileMatch, ...] = ()
    problems: tuple[str, ...] = ()
    unevaluated: tuple[str, ...] = ()  # patterns that may match more files than are listed


class OutOfBounds(Exception):
    """A search has looked at the allowed number of names, or has used its allowed time."""


@dataclass(slots=True)
class SearchBudget:
    """The number of names and the time that one search may still use."""

    entries: int = ENTRIES_MAX
    until_s: float = field(default_factory=lambda: time.monotonic() + SEARCH_S_MAX)

    def count_entry(self) -> None:
        """Subtract a directory entry from the budget. Raises OutOfBounds once the entries or the
        time are used up.
        """
        self.entries -= 1
        if self.entries < 0:
            raise OutOfBounds(f"more than {ENTRIES_MAX:,} names")
        if time.monotonic() > self.until_s:
            raise OutOfBounds(f"more than {SEARCH_S_MAX:.0f} s")


def search(
    root: str, patterns: Sequence[str], checkpoint_files: Sequence[str] | None = None
) -> SearchResult:
    """Return the files below `root`, or at absolute paths, that match these shell patterns.

    With `checkpoint_files`, the patterns of files that a complete checkpoint has, each match is
    examined as a checkpoint. The newest checkpoint is examined first. Never raises for what a job
    left: the result names a pattern that cannot be evaluated.
    """
    bounds = SearchBudget()
    by_path = dict[tuple[str, str], FileMatch]()
    problems = list[str]()
    unevaluated = list[str]()
    for pattern in dict.fromkeys(patterns):
        try:
            for path in iterate_matches(root, parse_glob(pattern), bounds):
                add_match(by_path, pattern, path)
        except (OutOfBounds, ValueError, OSError, RecursionError) as error:
            problems.append(f"the pattern {pattern[:80]!r} is not fully evaluated: {error}")
            unevaluated.append(pattern)
    matches = sorted(by_path.values(), key=lambda match: match.mtime_ns, reverse=True)
    if checkpoint_files is None:
        return SearchResult(tuple(matches), tuple(problems), tuple(unevaluated))
    examined = list[FileMatch]()
    for match in matches:
        try:
            examined.append(examine_checkpoint(match, checkpoint_files, bounds))
        except (OutOfBounds, ValueError, RecursionError) as error:
            problems.append(
                f"checkpoints older than {os.path.basename(match.path)[:80]!r} are not examined: {error}"
            )
            break
        except OSError:  # a file in it is being removed, which is progress
            examined.append(FileMatch(match.pattern, match.path, match.mtime_ns, time.time()))
    return SearchResult(tuple(examined), tuple(problems), tuple(unevaluated))


def add_match(by_path: dict[tuple[str, str], FileMatch], pattern: str, path: str) -> None:
    """Add a match to `by_path`, unless it has vanished or its name is not UTF-8. Raises
    OutOfBounds.
    """
    if len(by_path) >= MATCHES_MAX:
        raise OutOfBounds(f"more than {MATCHES_MAX:,} matches")
    try:
        path.encode()
        by_path[pattern, path] = FileMatch(pattern, path, os.stat(path).st_mtime_ns)
    except (OSError, UnicodeEncodeError):
        return


def iterate_matches(root: str, parts: Sequence[str], budget: SearchBudget) -> Iterator[str]:
    """Yield the paths below `root` that match a pattern, given by its parts between slashes.

    A link to a folder is followed, but not by `**`. Folders that cannot be read have no matches.
    Raises OutOfBounds.
    """
    names = [compile_glob_part(part) for part in parts]
    left = [("/", 1)] if parts[0] == "/" else [(root, 0)]
    visited = set(left)

    def enter(folder: str, index: int) -> None:
        if (folder, index) not in visited:
            visited.add((folder, index))
            left.append((folder, index))

    while left:
        folder, index = left.pop()
        budget.count_entry()
        is_last = index == len(parts) - 1
        name = names[index]
        if parts[index] == ANY_FOLDERS:
            for entry in iterate_entries(folder, budget):
                if is_last and not entry.is_dir(follow_symlinks=False):
                    yield entry.path
                if entry.is_dir(follow_symlinks=False):
                    enter(entry.path, index)
            if not is_last:
                enter(folder, index + 1)
            elif folder != root:
                yield folder
        elif name is None:
            path = os.path.join(folder, parts[index])
            if is_last and os.path.exists(path):
                yield path
            elif not is_last and os.path.isdir(path):
                enter(path, index + 1)
        else:
            for entry in iterate_entries(folder, budget):
                if name.match(entry.name) is None:
                    continue
                if is_last:
                    yield entry.path
                elif entry.is_dir():
                    enter(entry.path, index + 1)


def iterate_entries(folder: str, budget: SearchBudget) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; none if it cannot be read. Raises OutOfBounds once the
    search's budget is used up.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                budget.count_entry()
                yield entry
    except OSError:
        return


def examine_checkpoint(
    match: FileMatch, required_files: Sequence[str], budget: SearchBudget
) -> FileMatch:
    """Return the match with the time of its last write, and with whether it is whole: all required
    files, none truncated.

    Raises OSError and OutOfBounds.
    """
    newest_s = os.stat(match.path).st_mtime
    files = list[str]()
    has_required = True
    if os.path.isdir(match.path):
        for path in iterate_matches(match.path, (ANY_FOLDERS,), budget):
            status = os.stat(path)
            newest_s = max(newest_s, status.st_mtime)
            if stat.S_ISREG(status.st_mode):
                files.append(path)
        for pattern in required_files:
            matches = iterate_matches(match.path, parse_glob(pattern), budget)
            has_required = has_required and next(matches, None) is not None
    elif os.path.isfile(match.path):
        files.append(match.path)
    is_whole = bool(files) and has_required and not any(is_truncated(path) for path in files)
    return FileMatch(match.pattern, match.path, match.mtime_ns, newest_s, is_whole)


def is_truncated(path: str) -> bool:
    """Return whether a file is truncated, as after its writer was killed. Only some formats show
    this.

    torch.save writes a ZIP archive, whose directory stands last (torch/serialization.py). A file of
    safetensors begins with the length of its header, which says where the last tensor ends
    (huggingface/safetensors, README.md, Format).
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as content:
        size = os.fstat(content.fileno()).st_size
        start = content.read(len(ZIP_START))
        if start == ZIP_START:
            return not zipfile.is_zipfile(content)
        if not path.endswith(".safetensors") or size < SAFETENSORS_LENGTH_BYTES:
            return size == 0
        content.seek(0)
        header_bytes = int.from_bytes(content.read(SAFETENSORS_LENGTH_BYTES), "little")
        if header_bytes > size:
            return True
        if header_bytes > SAFETENSORS_HEADER_BYTES_MAX:
            return False  # it only has that name: nothing is known of its end
        try:
            header = json.loads(content.read(header_bytes))
            ends = [
                tensor["data_offsets"][1]
                for name, tensor in header.items()
                if name != "__metadata__"
            ]
            end = max(ends, default=0)
            return size < SAFETENSORS_LENGTH_BYTES + header_bytes + end
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return False  # as above


def search_as_user(
    python: str,
    user: tuple[int, int] | None,
    root: str,
    patterns: Sequence[str],
    checkpoint_files: Sequence[str] | None = None,
) -> SearchResult:
    """Return what `search` returns, found with the rights of `user` (uid, gid); None means this
    process's user.

    `python` is the interpreter of the child process that searches as the other user.
    """
    if user is None or not patterns:
        return search(root, patterns, checkpoint_files)
    request = json.dumps(
        {
            "user": user,
            "root": root,
            "patterns": list(patterns),
            "holds": checkpoint_files and list(checkpoint_files),
        }
    )
    problem = "its search as the job's user failed"
    try:
        child = subprocess.run(
            (python, "-m", "orchestrator.backends.attempts.output_scan"),
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=CHILD_S_MAX,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            check=True,
        )
        return parse_search_result(json.loads(child.stdout[:REPLY_BYTES_MAX]))
    except subprocess.TimeoutExpired:
        problem = f"its search took more than {CHILD_S_MAX:.0f} s"
    except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError) as error:
        problem = f"{problem}: {type(error).__name__}: {str(error)[:200]}"
    sentences = (
        f"the pattern {pattern[:80]!r} is not evaluated: {problem}" for pattern in patterns
    )
    return SearchResult((), tuple(sentences), tuple(patterns))


def parse_search_result(raw: Mapping[str, Any]) -> SearchResult:
    """Return the search result from the JSON object that the child wrote. Raises ValueError,
    TypeError and KeyError.
    """
    return SearchResult(
        matches=tuple(FileMatch(**match) for match in raw["matches"]),
        problems=tuple(raw["problems"]),
        unevaluated=tuple(raw["unevaluated"]),
    )


def run_search_child() -> None:
    """Run the child process of a search as another user.

    It reads a request from standard input, becomes that user, searches, and prints the result as
    JSON.
    """
    request = json.load(sys.stdin)
    uid, gid = request["user"]
    os.setgroups([])
    os.setresgid(gid, gid, gid)  # before the user, who may not change groups
    os.setresuid(uid, uid, uid)
    result = search(request["root"], request["patterns"], request["holds"])
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    run_search_child()
