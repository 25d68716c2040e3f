"""Laws of `make seeds`: what it clones and builds, and what it says of a run that did not end as it should."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.specs.parse import parse_job
from tests.processor_time import ProcessorTime
from tests.seeds.checkouts import ENVIRONMENTS, HERE, Missing, find_checkout, name_commit
from tests.seeds.runs import CASES, PROJECTS, Case, Row, _wrong
from tests.trainers.driver import Drive, Overrun, cluster

ROW = Row(
    project="p",
    commit="c",
    where="virtual",
    devices="1 x 1 MiB",
    attempts=("", ""),
    resumed="4",
    ended="succeeded",
    mlflow="job: finished, 1: failed, 2: finished",
    wall_s=1,
    processor_s=1,
    advice="",
    wrong="",
)
CASE = Case(
    where="virtual",
    mib=(1,),
    options={},
    sizes={},
    story=("device_oom", "finished"),
    end="succeeded",
    resumed="4",
)


def make_seeds(seeds: Path | None, *names: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "SEEDS"}
    if seeds is not None:
        env["SEEDS"] = str(seeds)
    argv = (sys.executable, "-m", "tests.seeds", *names)
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, check=False, cwd=HERE.parents[1], timeout=120
    )


def test_without_seeds_each_run_is_skipped_with_the_reason() -> None:
    process = make_seeds(None)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("skipped: SEEDS names no folder of checkouts") == len(CASES)


def test_a_run_that_fails_in_its_environment_has_failed(tmp_path: Path) -> None:
    (tmp_path / "parler-tts").mkdir()
    environment = tmp_path / ENVIRONMENTS / "common"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").symlink_to(sys.executable)  # it has no parler_tts
    (environment / "versions.txt").write_text((HERE / "common.txt").read_text())
    process = make_seeds(tmp_path, "parler", "virtual")
    assert process.returncode == 1, process.stderr
    assert "failed: its tiny weights cannot be made: ModuleNotFoundError" in process.stdout


def test_a_name_of_no_run_is_an_error() -> None:
    process = make_seeds(None, "parlor")
    assert process.returncode == 2
    assert "no run has the name parlor" in process.stdout


def test_a_checkout_that_seeds_lacks_is_cloned_at_the_commit_of_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = tmp_path / "mirror/someone/thing"
    mirror.mkdir(parents=True)
    identity = ("-c", "user.name=n", "-c", "user.email=e@x.example")
    git = ("git", "-C", str(mirror), *identity)
    subprocess.run((*git, "init", "--quiet"), check=True)
    for text in ("pinned", "newer"):
        (mirror / "file").write_text(text)
        subprocess.run((*git, "add", "file"), check=True)
        subprocess.run((*git, "commit", "--quiet", "-m", text), check=True)
    log = subprocess.run((*git, "log", "--format=%H"), check=True, capture_output=True, text=True)
    newer, pinned = log.stdout.split()
    job = tmp_path / "job.yaml"
    job.write_text(f"# A job.\n# someone/thing at {pinned[:7]} (2026-01-01)\nname: a\n")
    project = SimpleNamespace(CHECKOUT="thing", JOB=str(job))
    monkeypatch.setenv("SEEDS", str(tmp_path / "seeds"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{tmp_path / 'mirror'}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    checkout = find_checkout(project)
    assert (checkout / "file").read_text() == "pinned"
    assert name_commit(project, checkout) == pinned[:7]
    subprocess.run(("git", "-C", str(checkout), "checkout", "--quiet", newer), check=True)
    assert name_commit(project, find_checkout(project)) == (
        f"{newer[:7]} (the job file: {pinned[:7]})"
    )

    elsewhere = SimpleNamespace(CHECKOUT="other", JOB=str(job))
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://nowhere.example/")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no network
    with pytest.raises(Missing, match=r"SEEDS has no other, and `git clone .*failed"):
        find_checkout(elsewhere)
    assert not (tmp_path / "seeds/other").exists()


@pytest.mark.parametrize(
    ("row", "outcomes", "part"),
    [
        (ROW, ("device_oom", "finished"), ""),
        (ROW, ("finished",), "the attempts are finished, not device_oom, finished"),
        (replace(ROW, ended="asks: more"), ("device_oom", "finished"), "its end is not"),
        (replace(ROW, resumed="-"), ("device_oom", "finished"), "resumed at -, not 4"),
        (replace(ROW, mlflow="job: finished"), ("device_oom", "finished"), "MLflow lacks"),
    ],
)
def test_a_row_that_is_not_as_its_case_says_is_wrong(
    row: Row, outcomes: tuple[str, ...], part: str
) -> None:
    wrong = _wrong(CASE, row, outcomes)
    assert part in wrong
    assert bool(wrong) == bool(part)


def test_each_environment_has_a_file_of_versions_with_one_torch() -> None:
    for project in PROJECTS:
        versions = (HERE / f"{getattr(project, 'ENVIRONMENT', 'common')}.txt").read_text()
        assert "\ntorch==2.13.0\n" in versions
        assert "+cpu" not in versions
        assert "\npyarrow==20." in versions or project.CHECKOUT == "LatentSync"


def test_processor_time_counts_what_computes_and_what_was_killed_and_not_what_waits() -> None:
    meter = ProcessorTime()
    end_s = time.monotonic() + 60.0
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    waiting = subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE)
    computing = subprocess.Popen((sys.executable, "-c", code), process_group=0)
    while meter.look_s() < 1.0 and time.monotonic() < end_s:
        pass
    os.killpg(computing.pid, 9)
    computing.wait()
    waiting.communicate(b"\n")
    assert 1.0 <= meter.look_s() < 3.0, "a killed grandchild's time stays, and the other's is small"


@pytest.mark.parametrize(
    ("code", "timeout_s", "limit"),
    [
        ("while True: pass", 60.0, "3 s of processor time"),
        ("import time; time.sleep(600)", 5.0, "5 s"),
    ],
)
def test_a_run_is_cut_by_what_it_computes_and_else_by_the_clock(
    code: str, timeout_s: float, limit: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(code)
    job = f"name: a\ncommand: python train.py\nworkdir: {tmp_path}\nglobal_batch_size: 1\n"
    profile = "profile: {parameters: 1, activations_per_sample: 1KiB}\n"
    drive = Drive(tmp_path / "home", cluster("100MiB", 1), timeout_s, processor_limit_s=3.0)
    with pytest.raises(Overrun, match=f"attempt 1 did not end in {limit}: "):
        drive.run(parse_job(job + profile, "job.yaml"))
