"""Shell patterns of files: `*`, `?` and `[...]` within a name, and `**` alone for any number of folders.

Two asterisks beside other characters mean what one means, as in a shell. Standard library only.
"""

from __future__ import annotations

import fnmatch
import re

GLOB_CHARACTERS_MAX = 1000
PARTS_MAX = 64
ANY_FOLDERS = "**"

_MATCHES_NOTHING = fnmatch.translate("[b-a]")


def parse_glob(pattern: str) -> tuple[str, ...]:
    """Return the parts of a shell pattern between its slashes; the first part is `/` for an
    absolute pattern.

    Raises ValueError for a pattern that no file can match.
    """
    if not 0 < len(pattern) <= GLOB_CHARACTERS_MAX:
        raise ValueError(f"a pattern of files has 1 to {GLOB_CHARACTERS_MAX} characters")
    if "\0" in pattern or not _is_utf8(pattern):
        raise ValueError("a pattern of files is text in UTF-8 without NUL")
    if pattern.startswith("~"):
        raise ValueError(
            "`~` is not expanded: write an absolute path, or one below the output folder"
        )
    parts = ["/"] if pattern.startswith("/") else []
    for part in pattern.split("/"):
        is_repeated = part == ANY_FOLDERS and parts[-1:] == [ANY_FOLDERS]
        if part in ("", ".") or is_repeated:
            continue
        if fnmatch.translate(part) == _MATCHES_NOTHING:
            raise ValueError(f"{part!r} matches no name: its range is reversed")
        parts.append(part)
    if parts in ([], ["/"]):
        raise ValueError(f"{pattern!r} names no file: `*` matches every name")
    if len(parts) > PARTS_MAX:
        raise ValueError(f"a pattern of files has at most {PARTS_MAX} parts between its slashes")
    return tuple(parts)


def compile_glob_part(part: str) -> re.Pattern[str] | None:
    """Return the compiled pattern for one part; None for a part without wildcards."""
    has_wildcard = any(character in part for character in "*?[")
    return re.compile(fnmatch.translate(part)) if has_wildcard else None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
