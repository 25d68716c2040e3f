"""Laws of a release's tag: it is made where nothing is missing, and else every reason is told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from tests.releases import tag

TODAY = date(2026, 11, 29)
CHANGELOG = """\
# Changelog

## [Unreleased]

## [1.2.0] - 2026-11-29

### Added

- A door.

## [1.1.0] - 2026-11-01

- A wall.
"""


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A repository whose commit may be tagged as 1.2.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    journal = tmp_path / "tests" / "releases" / "1.2.0" / "journal.sql"
    journal.parent.mkdir(parents=True)
    journal.write_text("")
    tag.run_git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    tag.run_git(tmp_path, "tag", "v1.1.0")
    return tmp_path


def commit(root: Path) -> None:
    tag.run_git(root, "config", "user.name", "a")
    tag.run_git(root, "config", "user.email", "a@b")
    tag.run_git(root, "add", "--all")
    tag.run_git(root, "commit", "--quiet", "--message", "all")


def replace_in(root: Path, name: str, old: str, new: str) -> None:
    """Change a file, and commit it."""
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))
    commit(root)


def remove_journal(root: Path) -> None:
    (root / "tests" / "releases" / "1.2.0" / "journal.sql").unlink()
    commit(root)


def test_a_release_is_tagged_with_its_section_of_the_changelog(ready: Path) -> None:
    assert tag.list_problems(ready, TODAY) == []
    assert tag.create_tag(ready) == "v1.2.0"
    assert tag.run_git(ready, "cat-file", "-t", "v1.2.0") == "tag\n"
    message = tag.run_git(ready, "tag", "--list", "--format=%(contents)", "v1.2.0")
    assert message.strip() == "Version 1.2.0\n\n### Added\n\n- A door."
    (problem,) = tag.list_problems(ready, TODAY)
    assert "not after v1.2.0" in problem


FAULTS: dict[str, Callable[[Path], object]] = {
    "changes that no commit has: new.py": lambda root: (root / "new.py").write_text(""),
    "'1.2.0rc1'": lambda root: replace_in(root, "pyproject.toml", "1.2.0", "1.2.0rc1"),
    "is not after v1.10.0": lambda root: tag.run_git(root, "tag", "v1.10.0"),
    "tests.releases.keep": remove_journal,
    "under [Unreleased]": lambda root: replace_in(
        root, "CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n- A roof.\n"
    ),
    "is not [1.2.0]": lambda root: replace_in(
        root, "CHANGELOG.md", "## [1.2.0] - 2026-11-29\n", ""
    ),
    "says nothing": lambda root: replace_in(root, "CHANGELOG.md", "### Added\n\n- A door.\n", ""),
    "2026-11-30, which is to come": lambda root: replace_in(
        root, "CHANGELOG.md", "2026-11-29", "2026-11-30"
    ),
    "has date ''": lambda root: replace_in(root, "CHANGELOG.md", " - 2026-11-29", ""),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_release_that_lacks_anything_is_not_tagged(ready: Path, reason: str) -> None:
    FAULTS[reason](ready)
    problems = tag.list_problems(ready, TODAY)
    assert [reason in problem for problem in problems].count(True) == 1, problems


def test_the_command_of_a_release_says_why_it_makes_no_tag(
    monkeypatch: pytest.MonkeyPatch, ready: Path
) -> None:
    monkeypatch.setattr(tag, "ROOT", ready)
    (ready / "new.py").write_text("")
    with pytest.raises(SystemExit, match=r"no tag was made:\n- the tree has changes"):
        tag.main()
    assert tag.run_git(ready, "tag").split() == ["v1.1.0"]
