"""A folder as a byte stream: one JSON line that lists its entries, then the contents of its files, in order.

tar has hard links, devices, owners, sparse files and headers of any length. None is needed here, so that no code must
guard against them: an archive holds files, folders, and links that stay inside.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen

CHUNK_BYTES = 2**20
MANIFEST_BYTES_MAX = 2**24
PATH_BYTES_MAX, NAME_BYTES_MAX = 4096, 255  # PATH_MAX and NAME_MAX of Linux
FILE_MODE = 0o644
PROGRAM_MODE = 0o755
FOLDER_MODE = 0o755
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# of a pipe that took the file's place, nothing is awaited
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK

Skipped = Callable[[str], bool]  # of a path relative to the root; a folder's ends with /


class Kind(StrEnum):
    """Kinds of an archive's entries."""

    FILE = "file"
    PROGRAM = "program"  # an executable file
    FOLDER = "folder"
    LINK = "link"  # symbolic


@frozen
class Entry:
    """An archive's entry: a file, folder or link; its path is relative to the root."""

    path: str
    kind: Kind
    size: int = 0  # bytes of a file
    target: str = ""  # of a link


@frozen
class Limits:
    """The limits on an archive from outside: its entries and its bytes."""

    entries: int
    total_bytes: int


@frozen
class Listing:
    """The entries of a folder that are sent as an archive, and the names of those that are left
    out.
    """

    root: Path
    entries: Sequence[Entry]
    left_out: Sequence[str] = ()  # links that leave the folder, pipes, sockets, devices

    @property
    def total_bytes(self) -> int:
        """Bytes of the files' content."""
        return sum(entry.size for entry in self.entries)

    def make_manifest(self) -> bytes:
        """Return the JSON line with which the archive begins; it lists the entries."""
        rows = [[entry.path, entry.kind, entry.size, entry.target] for entry in self.entries]
        return json.dumps(rows, separators=(",", ":")).encode() + b"\n"

    def iterate_bytes(self) -> Iterator[bytes]:
        """Yield the archive's bytes. Raises OSError where a file shrank or is no longer a file."""
        yield self.make_manifest()
        with closing(_Folder(self.root)) as root:
            for entry in self.entries:
                if entry.size:
                    yield from root.iterate_content(entry)

    def compute_digest(self) -> str:
        """Return the SHA-256 of the archive in hexadecimal digits."""
        digest = hashlib.sha256()
        for chunk in self.iterate_bytes():
            digest.update(chunk)
        return digest.hexdigest()


def list_files(root: Path, limits: Limits, is_left_out: Skipped = lambda _: False) -> Listing:
    """Return the entries of a folder, or of a single file, that are to be sent, ordered by path. No
    link is followed.

    Raises SpecError beyond the limits or for a name that is no text, OSError where a file cannot be
    read.
    """
    if root.is_file():
        single = [Entry(path=root.name, kind=_get_file_kind(root.stat()), size=root.stat().st_size)]
        _check_size(root, single, limits)
        return Listing(root=root.parent, entries=single)
    entries = list[Entry]()
    left_out = list[str]()
    sent_bytes = 0
    for folder, folders, files, descriptor in os.fwalk(root, onerror=_raise_error):
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"
        links = [
            name
            for name in folders
            if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
        ]
        folders[:] = sorted(
            name for name in folders if name not in links and not is_left_out(f"{prefix}{name}/")
        )
        entries += (Entry(path=f"{prefix}{name}", kind=Kind.FOLDER) for name in folders)
        for name in sorted([*files, *links]):
            path = f"{prefix}{name}"
            if is_left_out(path):
                continue
            entry = _make_entry(path, name, descriptor)
            if entry is None:
                left_out.append(path)
                continue
            entries.append(entry)
            sent_bytes += entry.size
        if len(entries) > limits.entries or sent_bytes > limits.total_bytes:
            _check_size(root, entries, limits)
    for entry in entries:
        _check_entry(entry)
    return Listing(
        root=root, entries=sorted(entries, key=lambda entry: entry.path), left_out=left_out
    )


def unpack_and_hash_archive(
    read_bytes: Callable[[int], bytes],
    target: Path,
    limits: Limits,
    set_modified_at_s: float | None = None,
) -> str:
    """Unpack an archive into the new folder `target`, all or nothing; return the archive's SHA-256.

    `read_bytes(n)` returns at most n bytes, and b"" at the end. `set_modified_at_s` becomes the
    files' modification time; None: now. Links are made last, so that nothing is written through
    one. Raises SpecError for an invalid archive, one that leaves the folder, or one beyond the
    limits; OSError where the disk refuses it.
    """
    source = _Source(read_bytes)
    entries = _parse_manifest(source.read_manifest(), limits)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        temporary.mkdir()
        _write_entries(source, entries, temporary, set_modified_at_s)
        temporary.rename(target)
    except (FileExistsError, NotADirectoryError) as error:
        raise SpecError(
            f"an entry stands in the way of another: {error.filename}", source="archive"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return source.digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ sending


class _Folder:
    """Opens files below a folder, and follows no link, even if other processes replace files
    meanwhile.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, OPEN_FOLDER)

    def close(self) -> None:
        os.close(self._root)

    def iterate_content(self, entry: Entry) -> Iterator[bytes]:
        """Yield as many bytes of the file as were listed, even if it has grown. Raises OSError
        where it has fewer.
        """
        *folders, name = entry.path.split("/")
        folder_descriptor = os.dup(self._root)
        try:
            for folder in folders:
                above = folder_descriptor
                folder_descriptor = os.open(folder, OPEN_FOLDER, dir_fd=folder_descriptor)
                os.close(above)
            descriptor = os.open(name, OPEN_FILE, dir_fd=folder_descriptor)
        finally:
            os.close(folder_descriptor)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{entry.path} is no file any more")
            left_bytes = entry.size
            while left_bytes:
                chunk = file.read(min(CHUNK_BYTES, left_bytes))
                if not chunk:
                    raise OSError(f"{entry.path} has become shorter while it was read")
                left_bytes -= len(chunk)
                yield chunk


def _make_entry(path: str, name: str, folder_descriptor: int) -> Entry | None:
    """Return the entry for a file or link in an open folder; None for other kinds of file, which
    are not sent.
    """
    status = os.stat(name, dir_fd=folder_descriptor, follow_symlinks=False)
    if stat.S_ISREG(status.st_mode):
        return Entry(path=path, kind=_get_file_kind(status), size=status.st_size)
    if not stat.S_ISLNK(status.st_mode):
        return None
    target = os.readlink(name, dir_fd=folder_descriptor)
    return (
        Entry(path=path, kind=Kind.LINK, target=target)
        if _link_stays_inside(path, target)
        else None
    )


def _get_file_kind(status: os.stat_result) -> Kind:
    return Kind.PROGRAM if status.st_mode & stat.S_IXUSR else Kind.FILE


def _check_size(root: Path, entries: Sequence[Entry], limits: Limits) -> None:
    """Raise SpecError if the entries exceed the limits; the error names the largest parts."""
    total = sum(entry.size for entry in entries)
    if len(entries) <= limits.entries and total <= limits.total_bytes:
        return
    counts: dict[str, list[int]] = {}
    for entry in entries:
        top = counts.setdefault(entry.path.partition("/")[0], [0, 0])
        top[0] += entry.size
        top[1] += 1
    by = 0 if total > limits.total_bytes else 1
    largest = sorted(counts, key=lambda name: -counts[name][by])[:3]
    raise SpecError(
        "too much to upload",
        source=str(root),
        got=f"at least {total / 2**20:.0f} MiB in {len(entries)} entries; most of it in {', '.join(largest)}",
        allowed=f"{limits.total_bytes / 2**20:.0f} MiB in {limits.entries} entries",
        hint="name what is not needed in `.orcignore` (as in .gitignore), or put data on the service's machine and "
        "name its absolute path",
    )


def _raise_error(error: OSError) -> None:
    raise error


# ---------------------------------------------------------------------------------------------------------- receiving


class _Source:
    """Reads an archive piece by piece, and computes its digest."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._rest = b""
        self.digest = hashlib.sha256()

    def read_manifest(self) -> bytes:
        """Return the archive's first line, which lists its entries."""
        while b"\n" not in self._rest:
            chunk = self._read(CHUNK_BYTES)
            if not chunk or len(self._rest) > MANIFEST_BYTES_MAX:
                raise _make_bad_archive_error("it has no manifest")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        self.digest.update(line + b"\n")
        return line

    def read_chunk(self, size_max: int) -> bytes:
        """Return at most `size_max` bytes; b"" at the end."""
        if self._rest:
            chunk = self._rest[:size_max]
            self._rest = self._rest[size_max:]
        else:
            chunk = self._read(size_max)
        self.digest.update(chunk)
        return chunk


def _parse_manifest(manifest_line: bytes, limits: Limits) -> list[Entry]:
    try:
        rows = json.loads(manifest_line)
        entries = [
            Entry(path=path, kind=Kind(kind), size=size, target=target)
            for path, kind, size, target in rows
        ]
    except (ValueError, TypeError, RecursionError):
        raise _make_bad_archive_error("its manifest cannot be read") from None
    if len(entries) > limits.entries:
        raise _make_bad_archive_error(
            f"it has {len(entries)} entries; {limits.entries} are allowed"
        )
    for entry in entries:
        _check_entry(entry)
    if len({entry.path for entry in entries}) < len(entries):
        raise _make_bad_archive_error("it names a path twice")
    if sum(entry.size for entry in entries) > limits.total_bytes:
        raise _make_bad_archive_error(f"it unpacks to more than {limits.total_bytes} bytes")
    return entries


def _check_entry(entry: Entry) -> None:
    """Raise SpecError for a path that is not below the root, and for a link that leaves the
    root.
    """
    try:
        names = [name.encode() for name in entry.path.split("/")]
        entry.target.encode()
    except (UnicodeEncodeError, AttributeError):
        raise _make_bad_archive_error(f"a name is not UTF-8 text: {entry.path!r}") from None
    if any(
        name in (b"", b".", b"..") or len(name) > NAME_BYTES_MAX or b"\0" in name for name in names
    ):
        raise _make_bad_archive_error(
            f"it names a path outside its folder, or none: {entry.path[:NAME_BYTES_MAX]!r}"
        )
    if len(entry.path.encode()) > PATH_BYTES_MAX:
        raise _make_bad_archive_error(f"a path is longer than {PATH_BYTES_MAX} bytes")
    is_file = entry.kind in (Kind.FILE, Kind.PROGRAM)
    if type(entry.size) is not int or entry.size < 0 or (entry.size and not is_file):
        raise _make_bad_archive_error(f"no size: {entry.size!r}")
    if entry.kind is Kind.LINK and not _link_stays_inside(entry.path, entry.target):
        raise _make_bad_archive_error(f"a link leaves its folder: {entry.path!r}")


def _link_stays_inside(link_path: str, link_target: str) -> bool:
    """Return whether a link leads to a path below the root, judged from the text of its target
    alone.
    """
    if (
        not link_target
        or link_target.startswith("/")
        or "\0" in link_target
        or len(link_target.encode(errors="replace")) > PATH_BYTES_MAX
    ):
        return False
    destination = os.path.normpath(os.path.join(os.path.dirname(link_path), link_target))
    return destination != ".." and not destination.startswith("../")


def _write_entries(
    source: _Source, entries: Sequence[Entry], root: Path, set_modified_at_s: float | None
) -> None:
    links = []
    for entry in entries:
        path = root / entry.path
        if entry.kind is Kind.LINK:
            links.append((path, entry.target))
            continue
        folder = path if entry.kind is Kind.FOLDER else path.parent
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        if entry.kind is not Kind.FOLDER:
            _write_file(source, entry, path)
            if set_modified_at_s is not None:
                os.utime(path, (set_modified_at_s, set_modified_at_s))
    if source.read_chunk(1):
        raise _make_bad_archive_error("it goes on behind its last file")
    for path, target in links:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    inside = f"{os.path.realpath(root)}/"
    for path, _ in links:  # links that lead through links
        if not f"{os.path.realpath(path)}/".startswith(inside):
            raise _make_bad_archive_error(f"a link leaves its folder: {path.relative_to(root)}")


def _write_file(source: _Source, entry: Entry, target: Path) -> None:
    mode = PROGRAM_MODE if entry.kind is Kind.PROGRAM else FILE_MODE
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        left_bytes = entry.size
        while left_bytes:
            chunk = source.read_chunk(min(CHUNK_BYTES, left_bytes))
            if not chunk:
                raise _make_bad_archive_error(f"it ends within {entry.path}")
            file.write(chunk)
            left_bytes -= len(chunk)


def _make_bad_archive_error(problem: str) -> SpecError:
    return SpecError(problem, source="archive")
