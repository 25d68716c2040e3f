"""Files that are not uploaded: `.orcignore`, in the syntax of .gitignore."""

from __future__ import annotations

from pathlib import Path

from orchestrator.service.transfer.archive import Skipped
from orchestrator.specs.errors import SpecError

FILE = ".orcignore"
DEFAULTS = (".git/", "__pycache__/", ".venv/")  # a line such as !.git/ takes one back


def make_ignore_check(folder: Path) -> Skipped:
    """Return a function that says whether a path below the folder is left out of uploads, as its
    `.orcignore` says.

    Raises SpecError for an unreadable file.
    """
    from pathspec import GitIgnoreSpec  # late: only a submission to another machine needs it

    try:
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot be read: {error}", source=str(folder / FILE)) from None
    try:
        return GitIgnoreSpec.from_lines([*DEFAULTS, *lines]).match_file
    except ValueError as error:
        raise SpecError(
            f"not a pattern of .gitignore: {error}", source=str(folder / FILE)
        ) from None
