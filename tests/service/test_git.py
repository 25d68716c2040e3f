"""Laws of the commit of a job's code: it is what MLflow itself would say of the folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.service.intake.git import read_code_source
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.code_source import CodeSource
from orchestrator.specs.parse import parse_job_data

JOB = "name: s\nglobal_batch_size: 8\ncommand: python train.py\n"
URL = "https://example.org/ada/project.git"


def git(folder: Path, *arguments: str) -> None:
    who = (
        "-c",
        "user.name=ada",
        "-c",
        "user.email=ada@example.org",
        "-c",
        "init.defaultBranch=main",
    )
    subprocess.run(["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A work tree with one commit, a remote and a job file."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(JOB)
    git(tmp_path, "init")
    git(tmp_path, "remote", "add", "origin", URL.replace("https://", "https://ada:secret@"))
    git(tmp_path, "add", "train.py", "job.yaml")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_a_job_has_the_commit_of_its_code_as_mlflow_reads_it(project: Path) -> None:
    from mlflow.utils.git_utils import get_git_branch, get_git_commit, get_git_repo_url

    script = str(project / "train.py")
    spec = read_job(project / "job.yaml")
    assert spec.source is not None
    assert (spec.source.commit, spec.source.branch) == (
        get_git_commit(script),
        get_git_branch(script),
    )
    assert spec.source.repo_url == get_git_repo_url(script) == URL, "the password is in no record"
    assert not spec.source.dirty
    assert parse_job_data(spec.model_dump(mode="json"), "the journal") == spec


def test_changed_files_make_it_dirty_and_new_ones_do_not(project: Path) -> None:
    (project / "output.bin").write_text("x")
    assert read_code_source(project) == read_job(project / "job.yaml").source
    assert not read_code_source(project).dirty  # type: ignore[union-attr]
    (project / "train.py").write_text("print()")
    assert read_code_source(project).dirty  # type: ignore[union-attr]


def test_what_is_no_work_tree_or_has_no_commit_has_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_code_source(tmp_path) is None
    git(tmp_path, "init")
    assert read_code_source(tmp_path) is None
    assert read_code_source(tmp_path / "absent") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert read_code_source(tmp_path) is None


def test_a_branch_is_none_where_none_is_checked_out(project: Path) -> None:
    git(project, "checkout", "--detach")
    source = read_code_source(project)
    assert source is not None
    assert source.branch == ""


def test_a_file_does_not_say_its_commit(project: Path) -> None:
    source = CodeSource(commit="a" * 40).model_dump(mode="json")
    (project / "job.yaml").write_text(f"{JOB}source: {source}\n")
    with pytest.raises(SpecError, match="the commit of the code is no setting"):
        read_job(project / "job.yaml")
