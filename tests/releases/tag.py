"""Tag this commit as the version that pyproject.toml names: `make release`. Nothing is pushed.

A tag is made only where nothing is missing: a clean tree, a version after all tagged ones, its section of the changelog
with nothing unreleased above it, and its journal among the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
PLAIN_VERSION = re.compile(r"\d+\.\d+\.\d+")
SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?\n(.*?)(?=^## \[|\Z)", re.M | re.S)


def main() -> None:
    """Tag the commit, with the changelog's section as its message; exit with 1 and every reason against it."""
    problems = list_problems(ROOT, datetime.now(UTC).date())
    if problems:
        sys.exit("\n".join(["no tag was made:", *(f"- {problem}" for problem in problems)]))
    tag = create_tag(ROOT)
    print(f"tagged {tag}; `git push origin {tag}` publishes it")


def list_problems(root: Path, today: date) -> list[str]:
    """Return every reason why the commit of this repository may not be tagged."""
    version = read_version(root)
    problems = []
    if changed := run_git(root, "status", "--porcelain").splitlines():
        names = ", ".join(line[3:] for line in changed[:5])
        problems.append(f"the tree has changes that no commit has: {names}")
    if not PLAIN_VERSION.fullmatch(version):
        return [*problems, f"version {version!r} of pyproject.toml: it has the form 1.2.3"]
    for tag in run_git(root, "tag", "--list", "v*").split():
        if PLAIN_VERSION.fullmatch(tag[1:]) and Version(tag[1:]) >= Version(version):
            problems.append(f"version {version} of pyproject.toml is not after {tag}: raise it")
    if not (root / "tests" / "releases" / version / "journal.sql").exists():
        problems.append(f"tests/releases/{version} is missing: run `python -m tests.releases.keep`")
    return problems + list_problems_of_changelog(root, version, today)


def list_problems_of_changelog(root: Path, version: str, today: date) -> list[str]:
    """Return what the changelog lacks for this version."""
    sections = read_sections(root)
    unreleased = sections.pop("Unreleased", ("", ""))[1]
    problems = []
    if unreleased.strip():
        problems.append(
            "CHANGELOG.md has changes under [Unreleased]: move them to the version's section"
        )
    if next(iter(sections), None) != version:
        return [
            *problems,
            f"CHANGELOG.md: its first version is not [{version}]: write that section",
        ]
    day, text = sections[version]
    if not text.strip():
        problems.append(f"CHANGELOG.md: [{version}] says nothing")
    try:
        if date.fromisoformat(day) > today:
            problems.append(f"CHANGELOG.md: [{version}] is dated {day}, which is to come")
    except ValueError:
        problems.append(
            f"CHANGELOG.md: [{version}] has date {day!r}; write 'YYYY-MM-DD' after a hyphen"
        )
    return problems


def create_tag(root: Path) -> str:
    """Make the annotated tag of this commit; return its name."""
    version = read_version(root)
    message = f"Version {version}\n\n{read_sections(root)[version][1].strip()}\n"
    # As it is: git would drop the changelog's headings, which begin with #.
    run_git(root, "tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--message", message)
    return f"v{version}"


def read_version(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def read_sections(root: Path) -> dict[str, tuple[str, str]]:
    """Return the date and the text of each section of the changelog, by version, in the order of the file."""
    matches = SECTION.finditer((root / "CHANGELOG.md").read_text())
    return {match[1]: (match[2] or "", match[3]) for match in matches}


def run_git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=60
    ).stdout


if __name__ == "__main__":
    main()
