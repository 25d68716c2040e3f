"""A program that cannot start is refused when its job file is read; missing only on the node, it fails the job once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.backends.attempts.launcher import Launcher
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.parse import apply_overrides
from tests.trainers.driver import Drive, cluster, story

JOB = "name: job\nglobal_batch_size: 1\nlaunch: self\ncommand: {command}\n"


def program(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def write_programs(folder: Path) -> None:
    """Programs that start, and programs that fail to."""
    program(folder / "bin/works", f"#!{sys.executable}\n")
    program(folder / "bin/by-env", "#!/usr/bin/env -S python3 -u\n")
    program(folder / "bin/moved", "#!/no/such/venv/bin/python\n")
    program(folder / "bin/not-executable", "#!/bin/sh\n", 0o644)
    program(folder / "bin/python3.9", "not a program")
    program(folder / "bin/python3.8", "#!/bin/sh\necho no module encodings >&2\nexit 3\n")
    program(folder / "bin/of-broken", f"#!{folder}/bin/python3.8\n")


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (
            "no-such-program train",
            ["no program 'no-such-program' on the PATH", "/usr/bin", "env: {PATH"],
        ),
        ("bin/nothing", ["the program does not exist", "bin/nothing", "starts at `workdir`"]),
        ("bin", ["no program 'bin'"]),
        ("./bin", ["the program is a folder"]),
        ("bin/not-executable", ["not executable", "chmod +x"]),
        ("bin/moved --x 1", ["names an interpreter that is not there", "/no/such/venv/bin/python"]),
        (
            "/no/such/venv/bin/python train.py",
            ["the program does not exist", "/no/such/venv/bin/python"],
        ),
        ("bin/python3.9 train.py", ["the interpreter cannot be started", "bin/python3.9"]),
        ("bin/python3.8 train.py", ["ends with code 3 at `-c ''`: no module encodings"]),
        ("bin/of-broken", ["ends with code 3 at `-c ''`", "bin/python3.8"]),
    ],
)
def test_a_program_that_cannot_start_is_refused_with_the_path_tried(
    command: str, parts: list[str], tmp_path: Path
) -> None:
    write_programs(tmp_path)
    program(tmp_path / "train.py", "", 0o644)
    (tmp_path / "job.yaml").write_text(JOB.format(command=command))
    with pytest.raises(SpecError) as caught:
        read_job(tmp_path / "job.yaml")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/job.yaml: command: ")
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    "command", ["bin/works", "bin/by-env", "sleep 0", "/bin/sh -c true", "works"]
)
def test_a_program_that_starts_is_taken(command: str, tmp_path: Path) -> None:
    write_programs(tmp_path)
    path = f"env: {{PATH: '{tmp_path}/bin:/usr/bin:/bin:{Path(sys.executable).parent}'}}\n"
    (tmp_path / "job.yaml").write_text(JOB.format(command=command) + path)
    assert read_job(tmp_path / "job.yaml").command is not None


@pytest.mark.parametrize(
    ("command", "python", "program_path"),
    [
        ("python train.py", "bin/works", "project/bin/works"),
        ("works --x 1", "bin/python3", "project/bin/works"),
        ("python3.11 -m train", "../bin/works", "bin/works"),
    ],
)
def test_the_key_python_names_the_interpreter_of_every_word_that_needs_one(
    command: str, python: str, program_path: str, tmp_path: Path
) -> None:
    write_programs(tmp_path)
    write_programs(tmp_path / "project")
    program(tmp_path / "project/train.py", "", 0o644)
    job = JOB.format(command=command) + f"workdir: project\npython: {python}\n"
    (tmp_path / "job.yaml").write_text(job)
    spec = read_job(tmp_path / "job.yaml")
    assert spec.command is not None
    assert spec.command[0] == str(tmp_path / program_path)
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    elsewhere = apply_overrides(spec, [("python", "/other/bin/python")], "orc retry")
    assert elsewhere.command is not None
    assert Path(elsewhere.command[0]).parent == Path("/other/bin")


def test_a_missing_interpreter_is_named_with_the_key_that_changes_it(tmp_path: Path) -> None:
    job = JOB.format(command="python train.py") + "python: .venv/bin/python\n"
    (tmp_path / "job.yaml").write_text(job)
    program(tmp_path / "train.py", "", 0o644)
    with pytest.raises(SpecError, match="python: the program does not exist") as caught:
        read_job(tmp_path / "job.yaml")
    assert "--set python=PATH" in str(caught.value)
    assert read_job(tmp_path / "job.yaml", to_run=False).python == f"{tmp_path}/.venv/bin/python"


@pytest.mark.parametrize(
    ("command", "workdir", "message"),
    [
        ("no-such-program", ".", "no program 'no-such-program' on the PATH: tried "),
        ("true", "gone", "the folder does not exist: tried "),
        ("bin/python3.9", ".", "the interpreter cannot be started: Exec format error"),
        ("bin/not-executable", ".", "the program is not executable: tried "),
    ],
)
def test_a_program_missing_on_the_node_fails_once_with_the_path_tried(
    command: str, workdir: str, message: str, tmp_path: Path
) -> None:
    write_programs(tmp_path)
    said_of = {
        "name": "job",
        "global_batch_size": 1,
        "launch": "self",
        "command": command,
        "gpus": 1,
    }
    spec = JobSpec.model_validate(said_of | {"workdir": str(tmp_path / workdir)})
    job = Drive(tmp_path / "home", cluster("64MiB")).run(spec)
    assert job.status is JobStatus.FAILED
    assert story(job) == ["user_error"]
    assert message in job.reason
    assert "; " in job.reason, "what to write instead"


def test_a_full_process_table_is_no_missing_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of fork is EAGAIN, which is temporary, so a retry may help."""

    def refuse_fork(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("orchestrator.backends.attempts.launcher.subprocess.Popen", refuse_fork)
    launcher = Launcher(
        str(tmp_path / "1"), str(tmp_path / "epoch"), 1, "mark", Watched(node="n", devices=(0,))
    )
    status = launcher.start([(0, ("/bin/true",), {})], "/")
    assert (status["state"], status["no_program"]) == ("ended", False)
    assert "temporarily" in status["error"]
