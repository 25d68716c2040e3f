"""Laws of searching a job's files: shell patterns as a shell has them, bounded, with the rights of the job's user."""

from __future__ import annotations

import glob
import os
import random
import sys
from pathlib import Path

import pytest

from orchestrator.backends.attempts import output_scan
from orchestrator.backends.attempts.output_scan import search, search_as_user
from orchestrator.backends.attempts.script_output import find_results
from orchestrator.specs.globs import parse_glob
from orchestrator.specs.run import JobFolder
from tests.scheduling.factories import script_spec

NOBODY = (65_534, 65_534)
PARTS = ("*", "a", "?", "[ab]*", "**", "a*", "*.pt", "..", "b.pt", "**x")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in ("a/b.pt", "a/a/x.pt", "b/ab/c.txt", "x", "a.pt", "b/a/b.pt", "..c"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def paths_of(root: Path, pattern: str) -> set[str]:
    return {os.path.normpath(match.path) for match in search(str(root), [pattern]).matches}


def test_a_pattern_matches_what_the_standard_library_finds(tree: Path) -> None:
    draw = random.Random(53)
    for _ in range(150):
        pattern = "/".join(draw.choices(PARTS, k=draw.randint(1, 4)))
        expected = glob.glob(pattern, root_dir=tree, recursive=True, include_hidden=True)
        paths = {os.path.normpath(tree / path) for path in expected if (tree / path).exists()}
        assert paths_of(tree, pattern) == paths, pattern
        assert paths_of(tree, f"{tree}/{pattern}") - {str(tree)} == paths_of(tree, pattern) - {
            str(tree)
        }, pattern


def test_a_search_is_bounded_in_names_and_says_so(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_scan, "ENTRIES_MAX", 5)
    bounds = output_scan.SearchBudget(entries=5)
    with pytest.raises(output_scan.OutOfBounds):
        list(output_scan.iterate_matches(str(tree), parse_glob("**/*.pt"), bounds))
    for name in range(200):
        (tree / f"many-{name}").touch()
    monkeypatch.setattr(output_scan, "MATCHES_MAX", 50)
    result = search(str(tree), ["many-*", "a.pt"])
    assert result.unevaluated == ("many-*", "a.pt")
    assert "more than 50 matches" in result.problems[0]


def test_links_in_a_circle_end(tree: Path) -> None:
    (tree / "a" / "loop").symlink_to(tree)
    assert str(tree / "a/a/x.pt") in paths_of(tree, "**/x.pt")


def test_a_name_that_is_no_text_is_no_match(tree: Path) -> None:
    os.close(os.open(os.fsencode(tree) + b"/\xff.pt", os.O_CREAT))
    assert paths_of(tree, "*.pt") == {str(tree / "a.pt")}


def test_an_artifact_that_was_not_looked_for_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = JobFolder(tmp_path, "lm-1")
    jobs.output.mkdir(parents=True)
    spec = script_spec(success={"artifacts": ["model.pt"]}, knobs={"output_dir": {"flag": "--out"}})
    assert find_results(spec, jobs, jobs.attempt(1), (0,)).absent == ("model.pt",)
    monkeypatch.setattr(output_scan, "SEARCH_S_MAX", -1.0)
    results = find_results(spec, jobs, jobs.attempt(1), (0,))
    assert (results.absent, len(results.problems)) == ((), 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may search as another user")
def test_a_search_has_the_rights_of_the_jobs_user(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "key.pem").touch()
    (tmp_path / "open.pt").touch()
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o111)
    patterns = ["open.pt", f"{secret}/*", "secret/key.pem"]
    assert len(search_as_user(sys.executable, None, str(tmp_path), patterns).matches) == 3
    result = search_as_user(sys.executable, NOBODY, str(tmp_path), patterns)
    assert [match.path for match in result.matches] == [str(tmp_path / "open.pt")], result.problems
