"""Laws of backup and restore: one consistent archive without tokens, a new home whole or not at all, no job lost."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.journal.journal import Journal
from orchestrator.service.commands.backup import JOURNAL, MANIFEST, restore_backup, write_backup
from orchestrator.service.commands.replay import read_state
from orchestrator.specs.access import Role
from orchestrator.specs.errors import SpecError
from orchestrator.specs.run import JobFolder
from tests.service.test_reach import Machine
from tests.service.worlds import World

PASSWORD = "pg-secret-4711"
PATIENCE_S = 150.0
LONG = """\
name: {name}
command: {python} -c "import pathlib, time; [time.sleep(0.1) for _ in range(3000) if not pathlib.Path('{go}').exists()]"
global_batch_size: 1
gpus: 1
probe: never
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "cluster.yaml").write_text("name: kept\n")
    world = World(home)
    yield world
    world.journal.close()


def busy(world: World) -> list[str]:
    ids = [world.submit() for _ in range(4)]
    world.turn_until("succeeded")
    return ids


def test_a_new_home_has_the_queue_the_accounts_and_the_cluster_file(
    world: World, tmp_path: Path
) -> None:
    busy(world)
    client = world.by(Role.OPERATOR)
    token = client.headers["authorization"].removeprefix("Bearer ")
    archive, home = tmp_path / "a.orc", tmp_path / "new" / "home"
    write_backup(world.home, archive)
    state, ended = world.controller.state, [job.id for job in world.controller.list_ended_jobs(9)]
    restored = restore_backup(archive, home)
    assert read_state(str(home / JOURNAL)) == state
    assert (home / "cluster.yaml").read_text() == "name: kept\n"
    assert (
        home.stat().st_mode & 0o077
        == archive.stat().st_mode & 0o077
        == (home / JOURNAL).stat().st_mode & 0o077
        == 0
    )
    running = [job.last.name for job in state.jobs.values() if job.status == "running" and job.last]
    assert (restored.lost, restored.queued) == (
        running,
        sum(job.status == "queued" for job in state.jobs.values()),
    )
    assert restored.lost
    for name in restored.lost:
        job_id, _, number = name.rpartition("-")
        assert JobFolder(home, job_id).attempt(int(number)).log(0).exists(), (
            "the attempt would be started a second time"
        )
    with closing(Journal(f"sqlite:///{home / JOURNAL}")) as journal:
        accounts = Accounts(journal.database.transaction, lambda: world.now_s)
        principal = accounts.find_principal_by_token(token)
        assert [job.id for job in journal.list_ended_jobs(9)] == ended
    assert principal is not None
    assert (principal.name, principal.role) == ("ada", Role.OPERATOR)
    assert not (home / "token").exists(), "a new home has a token of its own"


def test_a_job_that_ran_keeps_its_checkpoints_where_the_machine_has_the_old_home(
    world: World, tmp_path: Path
) -> None:
    busy(world)
    jobs = world.controller.state.jobs.values()
    running = [job.id for job in jobs if job.status == "running"]
    for folder in ("checkpoints", "output"):
        saved = world.home / "jobs" / running[0] / folder / "step-4"
        saved.mkdir(parents=True)
        (saved / "weights").write_text("of step 4")
    write_backup(world.home, tmp_path / "a.orc")
    restored = restore_backup(tmp_path / "a.orc", tmp_path / "new")
    assert restored.anew == running[1:]
    for folder in ("checkpoints", "output"):
        file = tmp_path / "new/jobs" / running[0] / folder / "step-4/weights"
        assert file.read_text() == "of step 4"
    log = JobFolder(tmp_path / "new", running[0]).attempt(1).log(0).read_text()
    assert "goes on from the newest checkpoint" in log
    world.home.rename(tmp_path / "gone")
    restored = restore_backup(tmp_path / "a.orc", tmp_path / "elsewhere")
    assert restored.anew == running
    assert (
        "begins anew" in JobFolder(tmp_path / "elsewhere", running[0]).attempt(1).log(0).read_text()
    )
    (tmp_path / "gone").rename(world.home)


def test_no_token_is_in_an_archive(world: World, tmp_path: Path) -> None:
    secret, record = world.accounts.create_token(_user(world.accounts), None)
    (world.home / "token").write_text("home-token-4711")
    write_backup(world.home, tmp_path / "a.orc")
    with zipfile.ZipFile(tmp_path / "a.orc") as packed:
        assert set(packed.namelist()) == {MANIFEST, JOURNAL, "cluster.yaml"}
        content = b"".join(packed.read(name) for name in packed.namelist())
    assert record.shown.encode() in content, "the token is known"
    assert secret.encode() not in content
    assert b"home-token-4711" not in content


def test_a_backup_while_jobs_are_submitted_is_one_moment_of_the_journal(
    world: World, tmp_path: Path
) -> None:
    done, errors = threading.Event(), list[BaseException]()

    def submit() -> None:
        try:
            for _ in range(3000):
                if done.is_set():
                    return
                world.submit()
        except BaseException as error:
            errors.append(error)

    submitter = threading.Thread(target=submit)
    submitter.start()
    try:
        for number in range(5):
            before = world.controller.state.submitted
            write_backup(world.home, tmp_path / f"{number}.orc")
            after = world.controller.state.submitted
            restore_backup(tmp_path / f"{number}.orc", tmp_path / f"home{number}")
            state = read_state(str(tmp_path / f"home{number}" / JOURNAL))
            assert before <= state.submitted <= after
            assert len(state.jobs) == state.submitted
    finally:
        done.set()
        submitter.join(60)
    assert not errors


def test_a_home_that_is_not_empty_and_a_file_that_exists_are_left_alone(
    world: World, tmp_path: Path
) -> None:
    write_backup(world.home, tmp_path / "a.orc")
    content = (tmp_path / "a.orc").read_bytes()
    with pytest.raises(SpecError, match="the file exists"):
        write_backup(world.home, tmp_path / "a.orc")
    assert (tmp_path / "a.orc").read_bytes() == content
    with pytest.raises(SpecError, match="the home is not empty"):
        restore_backup(tmp_path / "a.orc", world.home)
    (tmp_path / "empty").mkdir()
    restore_backup(tmp_path / "a.orc", tmp_path / "empty")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".orc-")], (
        "something was left behind"
    )


def test_a_journal_in_postgresql_is_refused_with_what_backs_it_up(tmp_path: Path) -> None:
    (tmp_path / "journal_url").write_text(f"postgresql+psycopg://orc:{PASSWORD}@db/orc")
    with pytest.raises(SpecError) as refused:
        write_backup(tmp_path, tmp_path / "a.orc")
    assert "pg_dump" in str(refused.value)
    assert PASSWORD not in str(refused.value)


Change = Callable[[dict[str, Any], dict[str, bytes]], None]


def _newer(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    manifest["schema"] = "9999"


def _newer_format(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    manifest["format"] = 2


def _flipped(_: dict[str, Any], files: dict[str, bytes]) -> None:
    middle = len(files[JOURNAL]) // 2
    files[JOURNAL] = files[JOURNAL][:middle] + b"x" + files[JOURNAL][middle + 1 :]


def _longer(_: dict[str, Any], files: dict[str, bytes]) -> None:
    files[JOURNAL] += b"\0" * 4096


def _missing(_: dict[str, Any], files: dict[str, bytes]) -> None:
    del files["cluster.yaml"]


def _elsewhere(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    manifest["files"]["../outside"] = manifest["files"].pop("cluster.yaml")
    files["../outside"] = files.pop("cluster.yaml")


def _no_digest(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    del manifest["files"][JOURNAL]["sha256"]


@pytest.mark.parametrize(
    "change", [_newer, _newer_format, _flipped, _longer, _missing, _elsewhere, _no_digest]
)
def test_nothing_is_made_of_an_archive_that_is_changed_or_newer(
    world: World, tmp_path: Path, change: Change
) -> None:
    write_backup(world.home, tmp_path / "a.orc")
    with zipfile.ZipFile(tmp_path / "a.orc") as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    manifest = json.loads(files.pop(MANIFEST))
    change(manifest, files)
    with zipfile.ZipFile(tmp_path / "b.orc", "w") as packed:
        for name, content in {MANIFEST: json.dumps(manifest).encode(), **files}.items():
            packed.writestr(name, content)
    message = "newer version" if change in (_newer, _newer_format) else "not a whole backup"
    with pytest.raises(SpecError, match=message):
        restore_backup(tmp_path / "b.orc", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.orc", "b.orc", "home"]


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.orc").write_bytes(content)
    with pytest.raises(SpecError, match="not a whole backup"):
        restore_backup(tmp_path / "a.orc", tmp_path / "new")


@pytest.mark.long
def test_the_queue_goes_on_in_a_restored_home(tmp_path: Path) -> None:
    """A real service, Ray and ranks, 80 s: two jobs run and one waits at the backup, and the machine is lost."""
    here, there = Machine(folder=tmp_path / "here"), Machine(folder=tmp_path / "there")
    go = tmp_path / "go"
    for machine in (here, there):
        machine.folder.mkdir()
    files = [here.folder / f"{name}.yaml" for name in ("one", "two", "three")]
    for file in files:
        file.write_text(LONG.format(name=file.stem, python=sys.executable, go=go))
    archive = str(tmp_path / "a.orc")
    here.orc("up")
    try:
        ids = here.orc("submit", *map(str, files))["ids"]
        _until(here, lambda jobs: sum(job["status"] == "running" for job in jobs) == 2)
        here.orc("backup", archive)
    finally:
        here.orc("down", "--force")
    restored = there.orc("restore", archive)
    assert (restored["lost"], restored["queued"]) == ([f"{ids[0]}-1", f"{ids[1]}-1"], 1)
    go.touch()
    there.orc("up")
    try:
        jobs = _until(there, lambda jobs: all(job["status"] == "succeeded" for job in jobs))
        assert [job["id"] for job in jobs] == ids
        for job in jobs[:2]:
            assert [attempt["outcome"] for attempt in job["attempts"]] == ["node_lost", "succeeded"]
        assert [attempt["outcome"] for attempt in jobs[2]["attempts"]] == ["succeeded"]
    finally:
        there.orc("down", "--force")


def _until(machine: Machine, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Return the jobs as soon as that holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        jobs = machine.orc("queue")["jobs"]
        if jobs and holds(jobs):
            return list(jobs)
        time.sleep(0.2)
    pytest.fail(f"it did not come: {jobs}")


def _user(accounts: Accounts) -> str:
    accounts.set_user("ada", Role.MEMBER)
    return "ada"


def damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield archives that are cut off, empty, another file, and have bytes that were changed at many places."""
    yield from (
        ("empty", b""),
        ("another file", b"no archive" * 999),
        ("SQLite", b"SQLite format 3\0" + b"x" * 999),
    )
    yield from (
        (f"cut off at {end}", whole[:end]) for end in range(1, len(whole), len(whole) // 40)
    )
    yield from ((f"begins at {begin}", whole[begin:]) for begin in (1, 30, 100, len(whole) // 2))
    headers = [*range(64), *range(len(whole) - 240, len(whole))]
    for offset in (*headers, *range(64, len(whole) - 240, len(whole) // 150)):
        bits = 0xFF if offset % 2 else 0x01
        yield (
            f"byte {offset} ^ {bits}",
            whole[:offset] + bytes([whole[offset] ^ bits]) + whole[offset + 1 :],
        )
    zeros = len(whole) // 3
    yield "zeros amid", whole[:zeros] + b"\0" * 512 + whole[zeros + 512 :]


def test_a_damaged_archive_is_one_error_or_restores_the_whole_and_nothing_is_left(
    world: World, tmp_path: Path
) -> None:
    """Changed bytes may matter to nobody, such as a time in a header: what is restored is then the whole."""
    busy(world)
    archive = tmp_path / "a.orc"
    write_backup(world.home, archive)
    whole, home, refused = archive.read_bytes(), tmp_path / "new", 0
    state = read_state(str(world.home / JOURNAL))
    for name, content in damaged(whole):
        archive.write_bytes(content)
        with contextlib.suppress(SpecError):
            restore_backup(archive, home)
        refused += not home.exists()
        if home.exists():
            assert read_state(str(home / JOURNAL)) == state, name
            shutil.rmtree(home)
        assert {*tmp_path.iterdir()} == {archive, world.home}, name
    assert refused > 200


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_of_another_compression_with_changed_bytes_is_one_error_or_restores_the_whole(
    world: World, tmp_path: Path, method: int
) -> None:
    """The archive's length decides which bytes are changed; one may be a time in a header."""
    archive, other, home = tmp_path / "a.orc", tmp_path / "b.orc", tmp_path / "new"
    state = read_state(str(world.home / JOURNAL))
    refusals, restored = list[str](), 0
    write_backup(world.home, archive)
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(other, "w", method) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    whole = other.read_bytes()
    for offset in range(40, len(whole) - 300, len(whole) // 40):
        other.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        try:
            restore_backup(other, home)
        except SpecError as error:
            refusals.append(str(error))
        else:
            assert read_state(str(home / JOURNAL)) == state, offset
            shutil.rmtree(home)
            restored += 1
    assert all("not a whole backup" in refusal for refusal in refusals)
    assert restored <= 1


def test_what_is_no_file_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not a whole backup"):
        restore_backup(tmp_path, tmp_path / "new")
