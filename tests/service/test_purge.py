"""Laws of `keep:` and `orc purge`: what goes, what never does, and what a kill in between leaves."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.backends.attempts.ended_files import (
    TRASH,
    Part,
    Removal,
    describe_removals,
    empty_trash_and_list_errors,
    list_removable_parts,
    move_to_trash,
)
from orchestrator.backends.journal.history import Codec
from orchestrator.cli import main
from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import start_service, stop_service
from orchestrator.service.commands.doctor import run_checks
from orchestrator.service.intake.intake import read_job
from orchestrator.service.server.purger import SERVICE, Purge, Purger
from orchestrator.specs.access import Role
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.job_record import Job
from orchestrator.specs.keep import KeepSpec
from orchestrator.specs.parse import parse_job
from orchestrator.specs.run import JobFolder
from orchestrator.training.checkpoint.folder import (
    WrittenFile,
    get_complete_checkpoint_path,
    get_unfinished_checkpoint_path,
    write_manifest,
)
from tests.backends.ray_jobs import until
from tests.examples import examples
from tests.service.worlds import JOB, World

FREE = ("lm-1", "lm-2", "lm-4")  # ended, and named by no other job; the last did not succeed
NAMED = ("lm-3", "lm-5")  # ended: the first by `depends_on`, the second by a path
LIVE = ("lm-6", "late-7")
UNKNOWN = "stranger-9"  # the journal has no such job
CLUSTER = """\
name: kept
nodes: [{name: n, devices: 1, device: {name: v, kind: virtual, memory: 256MiB, bf16_tflops: 0.05, fp32_tflops: 0.05,
  memory_bandwidth: 10GB/s, link_bandwidth: 1GB/s}, host_memory: 4GiB}]
trackers: [jsonl]
keep: {superseded: 0s, logs: 0s, budget: 1B}
"""
Files = dict[str, list[int]]  # by job: which of FILES it has


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service with jobs that succeeded, that were cancelled, and that wait and name others."""
    world = World(tmp_path_factory.mktemp("night"))
    submit, plain = world.controller.submit, parse_job(JOB, "job.yaml")
    for _ in range(3):
        submit(plain)
    turn_until_ended(world, 3)
    submit(plain)
    submit(plain)
    world.controller.cancel_jobs(["lm-4", "lm-5"])
    turn_until_ended(world, 5)
    submit(parse_job(JOB + "depends_on: lm-3\n", "job.yaml"))
    command = f"command: python train.py --from {world.home}/jobs/lm-5/output"
    submit(parse_job(f"name: late\n{command}\nglobal_batch_size: 1\ngpus: 1\n", "late.yaml"))
    assert {*LIVE} <= {*world.controller.state.jobs}
    assert {*FREE, *NAMED} == {*world.journal.read_status_and_end_by_job()}
    yield world
    world.journal.close()


def turn_until_ended(world: World, count: int) -> None:
    """Turn until so many jobs have given back their devices."""
    for _ in range(2000):
        if len(world.journal.read_status_and_end_by_job()) >= count:
            return
        world.controller.run_once(10.0)
    raise AssertionError("no job has ended")


def purger_of(world: World, home: Path, keep: KeepSpec, *trackers: str) -> Purger:
    return Purger(home, keep, trackers, world.controller, world.journal, world.accounts)


def purge(world: World, home: Path, keep: KeepSpec, *, is_dry: bool = False) -> Purge:
    return purger_of(world, home, keep).purge(SERVICE, "", is_dry=is_dry)


def checkpoint(folder: Path, *, is_complete: bool = True) -> None:
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 5000)
    if is_complete:
        write_manifest(folder, {"weights": WrittenFile(size_bytes=5000, crc32="0" * 8)})


def file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 5000)


FILES = (
    lambda job: checkpoint(get_complete_checkpoint_path(job.checkpoints, 10)),
    lambda job: checkpoint(get_complete_checkpoint_path(job.checkpoints, 20)),
    lambda job: checkpoint(get_complete_checkpoint_path(job.checkpoints, 30), is_complete=False),
    lambda job: checkpoint(
        get_unfinished_checkpoint_path(job.checkpoints, 1, 40), is_complete=False
    ),
    lambda job: checkpoint(job.checkpoints / "damaged-step-00000005", is_complete=False),
    lambda job: file(job.output / "model" / "weights"),
    lambda job: file(job.attempt(1).log(0)),
    lambda job: file(job.attempt(2).metrics),
    lambda job: file(job.path / "data" / "tokens"),
    lambda job: file(job.workdir / "train.py"),
    lambda job: file(job.epoch),
)
homes = st.fixed_dictionaries(
    {job: st.sets(st.integers(0, len(FILES) - 1)) for job in (*FREE, *NAMED, *LIVE, UNKNOWN)}
)
periods = st.sampled_from([None, "0s", "36500d"])
keeps = st.builds(
    KeepSpec,
    superseded=periods,
    logs=periods,
    unsuccessful=periods,
    results=st.sampled_from([None, "36500d"]),
    budget=st.sampled_from([None, "0B", "64KiB", "1TiB"]),
)


def make(home: Path, files: Files) -> Path:
    """The home with these files and a journal; one of an earlier example is replaced."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    file(home / "journal.sqlite")
    for job, numbers in files.items():
        for number in sorted(numbers):
            FILES[number](JobFolder(home, job))  # type: ignore[no-untyped-call]
    return home


def tree(home: Path) -> set[str]:
    """Every file of the home but notes of removals and the trash."""
    paths = (path.relative_to(home) for path in home.rglob("*") if not path.is_dir())
    return {
        str(path)
        for path in paths
        if path.parts[0] != TRASH and not path.name.startswith("removed.json")
    }


@settings(max_examples=examples(60))
@given(files=homes, keep=keeps)
def test_only_listed_parts_of_ended_jobs_go_and_a_dry_run_lists_them_and_removes_nothing(
    night: World, files: Files, keep: KeepSpec
) -> None:
    home = make(night.home / "example", files)
    before = tree(home)
    dry = purge(night, home, keep, is_dry=True)
    assert tree(home) == before
    real = purge(night, home, keep)
    assert real.goes == dry.goes
    listed = [f"jobs/{part.job}/{part.path}/" for part, _ in real.goes]
    gone = before - tree(home)
    assert gone == {path for path in before if any(path.startswith(folder) for folder in listed)}
    assert not any(path.split("/")[1] not in FREE for path in gone)
    for job in FREE:
        folder, complete = (
            JobFolder(home, job),
            {10, 20} & {10 * (n + 1) for n in files[job] if n < 2},
        )
        is_result = job != "lm-4"
        left = {
            step
            for step in complete
            if get_complete_checkpoint_path(folder.checkpoints, step).is_dir()
        }
        if complete and (left or is_result or (keep.unsuccessful != 0 and keep.budget is None)):
            assert max(complete) in left, "the newest goes last"
        if is_result and 5 in files[job]:
            assert (folder.output / "model" / "weights").is_file()
    if keep.budget is not None and real.beyond_bytes:  # nothing more could go
        rest = [
            part
            for job in FREE
            for part in list_removable_parts(home, job, "succeeded", 0.0, lambda: None)
        ]
        assert {part.kind for part in rest if part.job != "lm-4"} <= {"results"}
        assert not [part for part in rest if part.job == "lm-4"]
    assert empty_trash_and_list_errors(home, 10_000) == []
    assert not [*(home / TRASH).iterdir()] if real.goes else not (home / TRASH).exists()


def test_without_keep_nothing_goes(night: World) -> None:
    home = make(night.home / "plain", {job: [*range(len(FILES))] for job in FREE})
    left = purge(night, home, KeepSpec())
    assert left.goes == []
    assert {reason for reason in left.stays if reason.startswith("keep.")} == {
        f"keep.{kind} is not set" for kind in ("superseded", "logs", "unsuccessful", "results")
    }


def test_the_budget_takes_older_checkpoints_then_logs_then_what_failed_oldest_first_and_tells_what_it_lacks(
    night: World,
) -> None:
    home = make(night.home / "budget", {job: [0, 1, 5, 6] for job in FREE})
    purger = purger_of(night, home, KeepSpec.model_validate({"budget": "0B"}))
    all_of_it = purger.purge(SERVICE, "", is_dry=True)
    first, *others = [(part.job, part.kind.value) for part, _ in all_of_it.goes]
    assert [first, *others] == [
        *((job, kind) for kind in ("superseded", "logs") for job in FREE),
        ("lm-4", "unsuccessful"),
        ("lm-4", "unsuccessful"),
    ]
    enough = all_of_it.home_bytes - all_of_it.goes[0][0].size_bytes
    some = purge(night, home, KeepSpec.model_validate({"budget": f"{enough}B"}))
    assert [(part.job, part.kind.value) for part, _ in some.goes] == [first]
    assert purger.problem is None
    purger.purge(SERVICE, "", is_dry=False)
    assert purger.problem is not None
    assert "nothing more may go" in purger.problem


def test_nothing_goes_before_its_records_have_left(night: World) -> None:
    home = make(night.home / "records", {"lm-1": [6]})
    keep = KeepSpec.model_validate({"logs": "0s"})
    waits = purger_of(night, home, keep, "mlflow").purge(SERVICE, "", is_dry=False)
    assert waits.goes == []
    assert "records wait for mlflow" in waits.stays
    assert len(purge(night, home, keep).goes) == 1


def test_nothing_goes_while_a_row_of_the_journal_cannot_be_read(night: World) -> None:
    home = make(night.home / "unreadable", {"lm-1": [6]})
    night.journal.set_aside.read_or_set_aside(Codec(Job), "jobs", "99", "{")
    try:
        for is_dry in (True, False):
            with pytest.raises(ServiceError, match="not known which files jobs need"):
                purge(night, home, KeepSpec.model_validate({"logs": "0s"}), is_dry=is_dry)
    finally:
        night.journal.set_aside.delete_row("jobs", "99")
    assert JobFolder(home, "lm-1").attempt(1).log(0).is_file()


# ------------------------------------------------------------------------------------------------- kills and links


@dataclass
class Step:
    """Ends this process before its n-th change of a file's name, as `kill -9` does."""

    left: int

    def __call__(self, event: str, _: object) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or event.startswith(
            "shutil."
        ):
            self.left -= 1
            if self.left < 0:
                os._exit(9)


def remove_all(home: Path) -> None:
    for part in list_removable_parts(home, "lm-1", "succeeded", 0.0, lambda: None):
        move_to_trash(
            home,
            part,
            Removal(at_s=0.0, why="keep.logs: 0s", by="keep", size_bytes=part.size_bytes),
        )
    empty_trash_and_list_errors(home, 100)


def test_a_kill_at_any_step_leaves_a_home_that_the_next_pass_completes(tmp_path: Path) -> None:
    for step in range(1000):
        home = make(tmp_path / "home", {"lm-1": [0, 1, 6], "lm-2": [*range(len(FILES))]})
        others = {path for path in tree(home) if "lm-2" in path}
        if (child := os.fork()) == 0:
            sys.addaudithook(Step(step))
            remove_all(home)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = {path for path in tree(home) if "lm-1" in path}
        for sentence in describe_removals(home, "lm-1"):
            assert not any(path.startswith(f"jobs/lm-1/{sentence.split()[0]}/") for path in left)
        remove_all(home)
        assert tree(home) == {"journal.sqlite", *others}
        assert len(describe_removals(home, "lm-1")) == 3
        assert not [*(home / TRASH).iterdir()]
        if status == 0:
            break
    assert step > 10, "the last child was not killed"


def test_no_link_is_followed(tmp_path: Path) -> None:
    home, outside = make(tmp_path / "home", {"lm-1": [6]}), tmp_path / "outside"
    checkpoint(outside / "step-00000001")
    file(outside / "notes")
    folder = JobFolder(home, "lm-1")
    folder.checkpoints.symlink_to(outside)
    folder.output.symlink_to(outside)
    (folder.attempt(1).path / "link").symlink_to(outside)
    (home / TRASH).mkdir()
    (home / TRASH / f"lm-9.{'0' * 16}").symlink_to(outside)
    parts = list_removable_parts(home, "lm-1", "succeeded", 0.0, lambda: None)
    assert [part.path for part in parts] == ["attempts"]
    planted = Part(
        job="lm-1",
        path="checkpoints/step-00000001",
        kind=parts[0].kind,
        size_bytes=0,
        ended_at_s=0.0,
    )
    with pytest.raises(OSError, match="Not a directory"):
        move_to_trash(home, planted, Removal(at_s=0.0, why="", by="", size_bytes=0))
    remove_all(home)
    assert {path.name for path in outside.rglob("*")} == {
        "step-00000001",
        "weights",
        "manifest",
        "notes",
    }
    assert not (home / TRASH / f"lm-9.{'0' * 16}").is_symlink()


def test_a_job_whose_folder_is_a_link_keeps_all_of_it(night: World) -> None:
    home = make(night.home / "linked", {"lm-1": [0, 1, 6]})
    folder = JobFolder(home, "lm-1").path
    folder.rename(night.home / "elsewhere")
    folder.symlink_to(night.home / "elsewhere")
    left = purge(night, home, KeepSpec.model_validate({"superseded": "0s", "logs": "0s"}))
    assert left.goes == []
    assert "its folder is behind a link" in left.stays


def test_files_in_the_trash_that_are_not_its_own_stay(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {})
    file(home / TRASH / "somebodys")
    assert empty_trash_and_list_errors(home, 100) == []
    assert (home / TRASH / "somebodys").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_files_of_another_user_are_removed_by_root_and_told_by_others(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"lm-1": [6], "lm-2": [6]})
    for job in ("lm-1", "lm-2"):
        for path in (*JobFolder(home, job).path.rglob("*"),):
            os.chown(path, 4321, 4321)
    if (child := os.fork()) == 0:
        os.setuid(1234)
        try:
            remove_all(home)
        except PermissionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    remove_all(home)
    assert {path for path in tree(home) if "lm-1" in path} == set()


# ------------------------------------------------------------------------------------------------- what people see


def test_who_purged_what_is_audited_and_history_says_what_was_removed(tmp_path: Path) -> None:
    world = World(tmp_path, keep=KeepSpec.model_validate({"logs": "0s"}))
    world.submit()
    turn_until_ended(world, 1)
    file(JobFolder(tmp_path, "lm-1").attempt(1).log(0))
    assert world.by(Role.MEMBER).post("/purge", json={"dry_run": False}).status_code == 403
    ada = world.by(Role.OPERATOR)
    assert ada.get("/jobs/lm-1/attempts/1/logs").status_code == 200
    answer = ada.post("/purge", json={"dry_run": False}).json()
    assert [(part["job"], part["part"], part["why"]) for part in answer["goes"]] == [
        ("lm-1", "attempts", "keep.logs: 0s")
    ]
    for path in (
        "/jobs/lm-1/attempts/1/logs",
        "/jobs/lm-1/attempts/1/logs/follow",
        "/ui/jobs/lm-1/log",
    ):
        refused = ada.get(path)
        assert refused.status_code == 404, path
        assert "attempts was removed on" in refused.text, path
    assert "by keep.logs: 0s" in ada.get("/jobs/lm-1").json()["job"]["removed"][0]
    assert "attempts was removed on" in world.client.get("/ui/jobs/lm-1").text
    rows = [
        row
        for row in world.accounts.list_audit_rows(10)
        if row.action.startswith("purge lm-1/attempts: ")
    ]
    assert [row.user for row in rows] == ["ada"]
    world.journal.close()


@pytest.mark.long
def test_a_real_service_purges_by_itself_and_when_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, cluster = tmp_path / "home", tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    job = tmp_path / "job.yaml"
    command = f"command: {sys.executable} -c 'print(1)'"
    job.write_text(f"name: says\n{command}\nglobal_batch_size: 1\nprobe: never\ngpus: 1\n")
    start_service(home, cluster, None)
    try:
        with closing(Client(home)) as client:
            names = [client.submit_job(read_job(job).model_dump(mode="json")) for _ in range(2)]
            until(
                lambda: all(
                    client.fetch_job_and_version(name)[0]["status"] == "succeeded" for name in names
                ),
                "both ends",
                120.0,
            )
            until(
                lambda: len(client.purge_files(dry_run=True)["goes"]) == 2,
                "the records have left",
                60.0,
            )
            assert client.read_log_and_offset(names[0], 1, 0, 0)[0]
            with pytest.raises(SystemExit) as ended:
                main(["purge", "--home", str(home), "--json"])
            answer = json.loads(capsys.readouterr().out)
            assert ended.value.code == 1, "the home holds more than its budget"
            assert "nothing more may go" in "; ".join(client.fetch_cluster()["problems"])
            (service,) = [finding for finding in run_checks(home) if finding.subject == "service"]
            assert "nothing more may go" in service.found
            assert [part["job"] for part in answer["goes"]] == names
            with pytest.raises(ServiceError, match="attempts was removed on"):
                client.read_log_and_offset(names[0], 1, 0, 0)
            until(lambda: not [*(home / TRASH).iterdir()], "the trash is empty", 60.0)
            again = client.submit_job(read_job(job).model_dump(mode="json"))
            until(
                lambda: client.fetch_job_and_version(again)[0]["status"] == "succeeded",
                "the third end",
                120.0,
            )
    finally:
        stop_service(home, force=True)
    start_service(home, None, None)  # its first pass is seconds after the start
    try:
        until(
            lambda: bool(describe_removals(home, again)), "the service has purged by itself", 60.0
        )
    finally:
        stop_service(home, force=True)
