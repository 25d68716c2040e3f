"""Laws of uploads and outputs: what arrives is what was sent, stays in its folder, and is bounded."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.service.client.sending import upload_files
from orchestrator.service.intake.intake import read_jobs_for_service
from orchestrator.service.transfer import store
from orchestrator.service.transfer.archive import Limits, list_files, unpack_and_hash_archive
from orchestrator.service.transfer.ignore import make_ignore_check
from orchestrator.service.transfer.store import Uploads
from orchestrator.specs.access import Role
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.job.model import DataSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.run import JobFolder
from tests.service.test_access import TEAMS
from tests.service.worlds import World, job_spec

LIMITS = Limits(entries=50, total_bytes=10_000)
SCRIPT = "name: s\nglobal_batch_size: 8\ncommand: python train.py\n"


def reader(archive: bytes) -> Callable[[int], bytes]:
    return io.BytesIO(archive).read


def archive(*rows: tuple[str, str, int, str], content: bytes = b"") -> bytes:
    return json.dumps(rows).encode() + b"\n" + content


def tree(root: Path) -> dict[str, object]:
    """Every path with its content, link target and whether it is executable."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes(), os.access(path, os.X_OK))
        if path.is_file()
        else None
        for path in root.rglob("*")
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in ("src", ".git", "src/__pycache__", ".venv", "runs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    (folder / "train.py").write_text("print('hi')")
    (folder / "go.sh").write_text("#!/bin/sh\n")
    (folder / "go.sh").chmod(0o755)
    (folder / "current").symlink_to("src/file")
    return folder


def test_what_is_unpacked_is_what_was_packed_and_its_digest_depends_on_nothing_else(
    project: Path, tmp_path: Path
) -> None:
    listing = list_files(project, LIMITS)
    digest = unpack_and_hash_archive(
        reader(b"".join(listing.iterate_bytes())), tmp_path / "copy", LIMITS
    )
    assert tree(tmp_path / "copy") == tree(project)
    assert digest == listing.compute_digest()
    os.utime(project / "train.py", (0, 0))
    assert list_files(project, LIMITS).compute_digest() == digest
    assert list_files(tmp_path / "copy", LIMITS).compute_digest() == digest
    (project / "train.py").write_text("print('ho')")
    assert list_files(project, LIMITS).compute_digest() != digest


def test_what_git_and_python_make_and_what_orcignore_names_is_left_out(project: Path) -> None:
    (project / ".orcignore").write_text("runs/\n*.sh\n!.venv/\n")
    paths = {
        entry.path for entry in list_files(project, LIMITS, make_ignore_check(project)).entries
    }
    assert paths == {".orcignore", ".venv", ".venv/file", "current", "src", "src/file", "train.py"}


def test_too_much_is_refused_with_what_takes_most_and_how_to_leave_it_out(project: Path) -> None:
    (project / "runs" / "weights.bin").write_bytes(b"w" * 20_000)
    with pytest.raises(SpecError) as caught:
        list_files(project, LIMITS)
    assert [
        part
        for part in ("too much", "runs", ".orcignore", "50 entries")
        if part not in str(caught.value)
    ] == []


def test_a_link_that_leaves_the_folder_is_not_followed(project: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    for name, target in {"a": tmp_path / "secret", "b": "../secret", "c": tmp_path}.items():
        (project / name).symlink_to(target)
    os.mkfifo(project / "pipe")
    listing = list_files(project, LIMITS)
    assert sorted(listing.left_out) == ["a", "b", "c", "pipe"]
    assert b"token" not in b"".join(listing.iterate_bytes())


def test_a_file_that_becomes_a_link_while_it_is_sent_is_not_followed(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("token------")
    listing = list_files(project, LIMITS)
    (project / "train.py").unlink()
    (project / "train.py").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        b"".join(listing.iterate_bytes())


BAD = {
    "above": archive(("../a", "file", 1, ""), content=b"x"),
    "absolute": archive(("/tmp/a", "file", 1, ""), content=b"x"),
    "above within": archive(("a/../../b", "file", 1, ""), content=b"x"),
    "no name": archive(("", "folder", 0, "")),
    "nul": archive(("a\0b", "file", 0, "")),
    "long": archive(("a" * 256, "file", 0, "")),
    "surrogate": archive(("\ud800", "file", 0, "")),
    "absolute link": archive(("a", "link", 0, "/etc/passwd")),
    "link above": archive(("a/b", "link", 0, "../../c")),
    "links that together leave": archive(
        ("p/q/r/x", "link", 0, "../../../t"),
        ("t", "folder", 0, ""),
        ("y", "link", 0, "p/q/r/x/../../u"),
    ),
    "written through a link": archive(
        ("a", "link", 0, "b"), ("b", "folder", 0, ""), ("a/c", "file", 1, ""), content=b"x"
    ),
    "device": archive(("a", "device", 0, "")),
    "hard link": archive(("a", "hard", 0, "b")),
    "twice": archive(("a", "file", 0, ""), ("a", "file", 0, "")),
    "file as folder": archive(("a", "file", 0, ""), ("a/b", "file", 0, "")),
    "too large": archive(("a", "file", 10_001, ""), content=b"x" * 10_001),
    "negative": archive(("b", "file", -5, ""), ("a", "file", 10_004, ""), content=b"x" * 10_004),
    "a fraction": archive(("a", "file", 0.5, ""), content=b"x"),  # type: ignore[arg-type]
    "truth": archive(("a", "file", True, ""), content=b"x"),
    "too many": archive(*((str(number), "file", 0, "") for number in range(51))),
    "cut off": archive(("a", "file", 5, ""), content=b"x"),
    "more behind": archive(("a", "file", 1, ""), content=b"xy"),
    "no manifest": b"x" * 100,
    "no JSON": b"{\n",
    "nested": b"[" * 100_000 + b"\n",
    "numbers": b"[1]\n",
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_archive_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    message = "archive: no size" if name in ("negative", "a fraction", "truth") else "archive: "
    with pytest.raises(SpecError, match=message):
        unpack_and_hash_archive(reader(BAD[name]), tmp_path / "in" / "copy", LIMITS)
    assert tree(tmp_path) == {"in": None}


@given(
    st.binary(max_size=300)
    | st.lists(st.tuples(st.text(), st.text(), st.integers(), st.text())).map(lambda r: archive(*r))
)
def test_any_bytes_are_an_archive_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    target = tmp_path_factory.mktemp("any") / "copy"
    try:
        unpack_and_hash_archive(reader(data), target, LIMITS)
    except SpecError:
        assert list(target.parent.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- the service


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def pack_folder(folder: Path) -> tuple[str, bytes]:
    listing = list_files(folder, LIMITS)
    return listing.compute_digest(), gzip.compress(b"".join(listing.iterate_bytes()))


def store_upload(uploads: Uploads, folder: Path) -> str:
    digest, data = pack_folder(folder)
    with uploads.make_temporary_file_path() as file:
        file.write_bytes(data)
        uploads.store_upload(digest, file)
    return digest


def test_an_upload_is_kept_while_a_live_job_names_it_and_goes_when_it_was_long_unused(
    tmp_path: Path, project: Path
) -> None:
    used, clock = set[str](), Clock()
    uploads = Uploads(tmp_path / "home", lambda: used, clock)
    first = store_upload(uploads, project)
    used.add(first)
    clock.now_s += store.KEPT_S + 1
    (project / "a").write_text("2")
    second = store_upload(uploads, project)
    assert uploads.list_missing([first, second, "0" * 64]) == ["0" * 64]
    used.clear()
    clock.now_s += store.KEPT_S + 1
    (project / "a").write_text("3")
    third = store_upload(uploads, project)
    assert uploads.list_missing([first, second, third]) == [first, second]


def test_uploads_have_a_bound_together(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "TOTAL_BYTES_MAX", 1000)
    clock, used = Clock(), set[str]()
    uploads = Uploads(tmp_path / "home", lambda: used, clock)
    (project / "big").write_bytes(b"b" * 600)
    first = store_upload(uploads, project)
    (project / "big").write_bytes(b"c" * 600)
    with pytest.raises(ServiceError, match="uploads that jobs use"):
        store_upload(uploads, project)  # the first was asked for a moment ago
    clock.now_s += store.GRACE_S + 1
    second = store_upload(uploads, project)
    assert uploads.list_missing([first, second]) == [first]
    assert not [
        path for path in (tmp_path / "home" / "uploads").iterdir() if path.name.startswith(".")
    ]


def test_a_bomb_is_refused_before_it_unpacks(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, set)
    bombs = (
        archive(("a", "file", 2**40, ""), content=b"\0" * 10**6),
        b" " * (2**24 + 2**22),
        archive(("a", "file", 1, ""), content=b"\0" * 10**7),
    )
    for bomb in bombs:
        with uploads.make_temporary_file_path() as file:
            file.write_bytes(gzip.compress(bomb))
            with pytest.raises(SpecError):
                uploads.store_upload("0" * 64, file)
    assert list((tmp_path / "uploads").iterdir()) == []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "home").mkdir()
    world = World(tmp_path / "home", TEAMS)
    yield world
    world.journal.close()


def test_an_upload_has_the_digest_that_it_says(world: World, project: Path) -> None:
    ada = world.by(Role.MEMBER)
    digest, data = pack_folder(project)
    for path, body, message in (
        ("0" * 64, data, "not what its name says"),
        ("..%2f..%2fx", data, ""),
        ("ABC", data, "not a SHA-256"),
        (digest, data[:-20], "no gzip stream"),
        (digest, b"PK", "no gzip stream"),
    ):
        answer = ada.put(f"/uploads/{path}", content=body)
        assert answer.status_code in (404, 422), answer.text
        assert message in answer.text
    assert ada.post("/uploads/missing", json={"digests": [digest]}).json() == {"missing": [digest]}
    assert ada.put(f"/uploads/{digest}", content=data).status_code == 200
    assert ada.put(f"/uploads/{digest}", content=data).status_code == 200
    assert ada.post("/uploads/missing", json={"digests": [digest]}).json() == {"missing": []}
    assert tree(world.home / "uploads" / digest / "files") == tree(project)


def script(workdir: str) -> dict[str, Any]:
    spec = {
        **job_spec(),
        "model": None,
        "command": ["python", "train.py"],
        "workdir": workdir,
        "name": "s",
    }
    return {name: value for name, value in spec.items() if name != "data"}


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("upload:" + "0" * 64, "no such upload"),
        ("upload:x", "not a SHA-256"),
        ("upload:{}/../../../token", "leaves its upload"),
        ("upload:{}//etc", "leaves its upload"),
        ("upload:{}/src", "the script does not exist"),
        ("/no/such/folder", "the folder does not exist"),
    ],
)
def test_a_job_that_names_what_is_not_there_is_refused(
    world: World, project: Path, workdir: str, message: str
) -> None:
    ada = world.by(Role.MEMBER)
    digest, data = pack_folder(project)
    assert ada.put(f"/uploads/{digest}", content=data).status_code == 200
    answer = ada.post("/jobs", json={"spec": script(workdir.format(digest))})
    assert (answer.status_code, message in answer.text) == (422, True), answer.text
    assert world.controller.state.jobs == {}


class Carrier:
    """Stands between `upload_files` and a test client: counts what is sent."""

    def __init__(self, client: Any) -> None:
        self.client, self.sent = client, list[str]()

    def list_missing_uploads(self, digests: list[str]) -> list[str]:
        return list(
            self.client.post("/uploads/missing", json={"digests": digests}).json()["missing"]
        )

    def upload(self, digest: str, data: Iterator[bytes], size_bytes: int) -> None:
        body = b"".join(data)
        assert len(body) == size_bytes
        self.sent.append(digest)
        assert self.client.put(f"/uploads/{digest}", content=body).status_code == 200


def test_only_what_is_missing_is_sent_and_every_path_of_this_machine_becomes_one_of_the_service(
    world: World, project: Path, tmp_path: Path
) -> None:
    (project / "job.yaml").write_text(
        SCRIPT + "trains: {hf: ../model}\nresume: {checkpoints: c-*, before: [python, fix.py]}\n"
        "profile: {parameters: 1000, activations_per_sample: 1MiB}\narray: {seed: [0, 1]}\nenv: {S: 'x{seed}'}\n"
    )
    (project / "fix.py").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    carrier = Carrier(world.by(Role.MEMBER))
    jobs = read_jobs_for_service(project / "job.yaml")
    specs = upload_files(carrier, jobs)  # type: ignore[arg-type]
    assert len(carrier.sent) == 2, "the project and the model, once for both jobs of the array"
    assert specs == upload_files(carrier, jobs)  # type: ignore[arg-type]
    assert len(carrier.sent) == 2
    body = {"jobs": [{"spec": spec.model_dump(mode="json")} for spec in specs]}
    ids = carrier.client.post("/jobs/batch", json=body).json()["ids"]
    spec = world.controller.state.jobs[ids[1]].spec
    uploads = world.home / "uploads"
    assert spec.workdir is not None
    assert spec.trains is not None
    assert spec.resume.before is not None
    for path in (spec.workdir, spec.trains.hf, spec.resume.before[1]):
        assert Path(str(path)).is_relative_to(uploads)
        assert Path(str(path)).exists()


def test_absolute_paths_are_those_of_the_service_and_need_not_exist_here(project: Path) -> None:
    job = project / "job.yaml"
    job.write_text(SCRIPT + "workdir: /srv/elsewhere\n")
    (read,) = read_jobs_for_service(job)
    assert (read.spec.workdir, read.local_keys) == ("/srv/elsewhere", frozenset())
    job.write_text(SCRIPT + "workdir: ./nowhere\n")
    with pytest.raises(SpecError, match="the folder does not exist"):
        read_jobs_for_service(job)


# --------------------------------------------------------------------------------------------------------- the output


def test_a_member_fetches_output_of_its_own_team_only_and_nothing_beside_it(
    world: World, tmp_path: Path
) -> None:
    clients = {name: world.by(Role.MEMBER, name) for name in ("ada", "bob", "cyd")}
    job_id = clients["ada"].post("/jobs", json={"spec": job_spec()}).json()["id"]
    url = f"/jobs/{job_id}/output"
    assert clients["ada"].get(url).status_code == 409
    output = JobFolder(world.home, job_id).output
    output.mkdir(parents=True)
    (output / "model.pt").write_bytes(b"weights")
    (output / "latest").symlink_to("model.pt")
    (output / "stolen").symlink_to(world.home / "journal.sqlite")
    answers = {name: client.get(url) for name, client in clients.items()}
    operator, viewer = (
        world.by(Role.OPERATOR, "ops").get(url),
        world.by(Role.VIEWER, "eve").get(url),
    )
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "ada": 200,
        "bob": 200,
        "cyd": 403,
    }
    assert (operator.status_code, viewer.status_code) == (200, 403)
    headers = answers["ada"].headers
    assert (headers["x-output-bytes"], headers["x-output-left-out"]) == ("7", "1")
    unpack_and_hash_archive(reader(answers["bob"].content), tmp_path / "got", LIMITS)
    assert tree(tmp_path / "got") == {"model.pt": (b"weights", False), "latest": "model.pt"}


def test_of_an_uploaded_working_directory_only_what_the_job_wrote_is_fetched(
    world: World, project: Path, tmp_path: Path
) -> None:
    from orchestrator.backends.attempts.workdir import copy_upload, relocate_uploads

    ada = world.by(Role.MEMBER)
    digest, data = pack_folder(project)
    ada.put(f"/uploads/{digest}", content=data)
    job_id = ada.post("/jobs", json={"spec": script(f"upload:{digest}")}).json()["id"]
    job, folder = world.controller.state.jobs[job_id], JobFolder(world.home, job_id)
    folder.path.mkdir(parents=True)
    copy_upload(job, world.home)
    workdir = relocate_uploads(job, world.home).spec.workdir
    assert workdir == str(folder.workdir)
    (folder.workdir / "src" / "model.pt").write_text("weights")
    (folder.workdir / "go.sh").write_text("changed")
    shutil.copy2(
        folder.workdir / "train.py", folder.workdir / "runs" / "copy.py"
    )  # with the time of the upload
    copy_upload(job, world.home)
    assert (folder.workdir / "src" / "model.pt").exists(), "a restart keeps what the job wrote"
    assert not (world.home / "uploads" / digest / "files" / "src" / "model.pt").exists()
    unpack_and_hash_archive(
        reader(ada.get(f"/jobs/{job_id}/output").content), tmp_path / "got", LIMITS
    )
    written = {
        path: content for path, content in tree(tmp_path / "got").items() if content is not None
    }
    assert written == {
        "src/model.pt": (b"weights", False),
        "go.sh": (b"changed", True),
        "runs/copy.py": (b"print('hi')", False),
    }


def test_an_upload_is_found_in_a_home_that_was_restored_elsewhere(
    world: World, project: Path, tmp_path: Path
) -> None:
    from orchestrator.backends.attempts.workdir import copy_upload, relocate_uploads

    ada, restored = world.by(Role.MEMBER), tmp_path / "restored"
    digest, data = pack_folder(project)
    ada.put(f"/uploads/{digest}", content=data)
    job_id = ada.post("/jobs", json={"spec": script(f"upload:{digest}")}).json()["id"]
    job = world.controller.state.jobs[job_id]
    data_spec = DataSpec(text=(f"{job.spec.workdir}/train.py",), sequence_length=8)
    job = replace(job, spec=job.spec.model_copy(update={"data": data_spec}))
    restored.mkdir()
    (world.home / "uploads").rename(restored / "uploads")
    JobFolder(restored, job.id).path.mkdir(parents=True)
    copy_upload(job, restored)
    moved = relocate_uploads(job, restored).spec
    assert moved.workdir == str(JobFolder(restored, job.id).workdir)
    assert (Path(moved.workdir) / "train.py").read_text() == "print('hi')"
    assert all(Path(path).is_file() for path in moved.data.text)
