"""The home's disk is full, read-only, or stands still: the service says so, jobs run on, their ends are kept later.

Real file systems of this machine: a tmpfs whose size is set to what is used; an ext4 in a file, which fsfreeze(8)
holds up, or in which an error is caused, so that the kernel makes it read-only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.service.client.client import Client, process_is_alive, read_service_file
from orchestrator.service.client.lifecycle import find_journal_url, start_service, stop_service
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Finished
from tests.backends.ray_jobs import until

SIZE = "256m"
SAID_S, BACK_S = 30.0, 120.0
ANSWER_S = 8.0  # a disk that stands still answers never; 0.1 s on an idle machine
FULL_MAX = 2000  # submissions that what a file has room for may still take
JOB = """\
name: waits
command: {python} {script} {go}
global_batch_size: 1
probe: never
gpus: 1
"""
SCRIPT = """\
import pathlib, sys, time
deadline_s = time.monotonic() + 900
while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < deadline_s:
    time.sleep(0.1)
"""


def why_not(*programs: str) -> str | None:
    """Return why this machine mounts nothing for a test; None where it mounts."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"no {missing[0]} on this machine"
    return None if os.geteuid() == 0 else "mounts need root"


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@contextmanager
def mount(folder: Path, *options: str) -> Iterator[None]:
    """A file system at a folder; skips the test where mounting is not permitted."""
    folder.mkdir()
    if subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode != 0:
        pytest.skip("mounts are not permitted")
    try:
        yield
    finally:
        try:
            if (folder / "service.json").exists():
                stop_service(folder, force=True)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


class Night:
    """A service whose home is `home`, with a job that runs until `go` exists."""

    def __init__(self, home: Path, go: Path) -> None:
        self.home, self.go = home, go
        start_service(home, None, None)
        self.pid = int(read_service_file(home)["pid"])
        file = go.with_name("job.yaml")
        script = go.with_name("waits.py")
        script.write_text(SCRIPT)
        file.write_text(JOB.format(python=sys.executable, script=script, go=go))
        self._spec = read_job(file).model_dump(mode="json")
        self.running = self.submit()
        until(self.trains, "the job runs")

    def trains(self) -> bool:
        """Return whether the process of the first job runs."""
        attempt = self.home / "jobs" / self.running / "attempts" / "1"
        return (
            subprocess.run(
                ["pgrep", "--full", f"guard.py {attempt}"], capture_output=True
            ).returncode
            == 0
        )

    def submit(self) -> str:
        with closing(Client(self.home)) as client:
            return client.submit_job(self._spec)

    def job(self, job_id: str) -> Any:
        with closing(Client(self.home)) as client:
            return client.fetch_job_and_version(job_id)[0]

    def problems(self) -> list[str]:
        """Return the problems that the service answers anybody in time. A service that takes no jobs is not ready."""
        url = f"http://127.0.0.1:{read_service_file(self.home)['port']}/readyz"
        answer = httpx.get(url, timeout=ANSWER_S, trust_env=False)
        problems: list[str] = answer.json()["problems"]
        assert (answer.status_code == 503) == any(
            "home folder" in problem or "cannot be written" in problem for problem in problems
        )
        return problems

    def ends_well(self, *job_ids: str, attempts_max: int = 1) -> None:
        """Every job ends well and is kept once, and the service has gone on."""
        for job_id in (self.running, *job_ids):
            until(
                lambda job_id=job_id: self.job(job_id)["status"] == "succeeded",
                f"the end of {job_id}",
                BACK_S,
            )
        until(lambda: not self.problems(), "all is well")
        assert process_is_alive(self.pid)
        assert len(self.job(self.running)["attempts"]) <= attempts_max
        stop_service(self.home, force=True)
        with closing(Journal(find_journal_url(self.home))) as journal:
            ends = [
                (event.job_id, event.number)
                for event in journal.iterate_events()
                if isinstance(event, Finished)
            ]
        assert len(ends) == len(set(ends))
        assert set(job_ids) <= {job_id for job_id, _ in ends}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORC_MLFLOW", "http://127.0.0.1:1")


@pytest.mark.long
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.skipif(why_not("mount") is not None, reason=str(why_not("mount")))
def test_a_full_home_is_told_and_what_ended_meanwhile_is_kept_once_there_is_room(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    with mount(home, "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs"):
        night = Night(home, tmp_path / "go")
        used = run("df", "--block-size=1", "--output=used", str(home)).split()[-1]
        run("mount", "-o", f"remount,size={used}", str(home))
        until(night.problems, "the service says so", SAID_S)
        assert any(
            word in night.problems()[-1] for word in ("No space left on device", "disk is full")
        )
        taken: list[str] = []
        with pytest.raises(ServiceError, match="cannot be written: database or disk is full"):  # noqa: PT012
            for _ in range(FULL_MAX):
                taken.append(night.submit())
        began_s = time.monotonic()
        with pytest.raises(ServiceError, match="cannot be written"):
            night.submit()
        assert time.monotonic() - began_s < ANSWER_S
        night.go.touch()  # the job ends while its end cannot be kept
        until(lambda: not night.trains(), "its process has ended")
        assert night.job(night.running)["status"] == "running"
        run("mount", "-o", f"remount,size={SIZE}", str(home))
        night.ends_well(*taken)
        log = (home / "service.log").read_text()
        assert log.count("cannot be written") <= 8, "told when it began, and not at each try"


@pytest.mark.long
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.skipif(
    why_not("mkfs.ext4", "fsfreeze") is not None, reason=str(why_not("mkfs.ext4", "fsfreeze"))
)
def test_a_disk_that_stands_still_is_told_and_everything_goes_on_with_it(tmp_path: Path) -> None:
    image, home = tmp_path / "image", tmp_path / "home"
    run("truncate", "-s", SIZE, str(image))
    run("mkfs.ext4", "-q", "-F", str(image))
    with mount(home, "-o", "loop", str(image)):
        night = Night(home, tmp_path / "go")
        run("fsfreeze", "--freeze", str(home))
        try:
            problems = until(night.problems, "the service says so", SAID_S)
            assert any("has taken no write for" in problem for problem in problems)
            night.go.touch()
        finally:
            run("fsfreeze", "--unfreeze", str(home))
        night.ends_well(night.submit())


@pytest.mark.long
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.skipif(
    why_not("mkfs.ext4", "e2fsck") is not None, reason=str(why_not("mkfs.ext4", "e2fsck"))
)
def test_a_home_that_became_read_only_is_told_and_a_repair_is_all_that_it_takes(
    tmp_path: Path,
) -> None:
    """Remount as ext4 does after a disk error: writes work again only after an unmount and a check."""
    image, home = tmp_path / "image", tmp_path / "home"
    run("truncate", "-s", SIZE, str(image))
    run("mkfs.ext4", "-q", "-F", str(image))
    with mount(home, "-o", "loop,errors=remount-ro", str(image)):
        device = Path(run("findmnt", "--noheadings", "--output", "SOURCE", str(home)).strip()).name
        trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
        if not trigger.exists():
            pytest.skip("this kernel causes no error of ext4 on demand")
        night = Night(home, tmp_path / "go")
        taken = night.submit()
        trigger.write_text("1")
        until(night.problems, "the service says so", SAID_S)
        assert any("Read-only file system" in problem for problem in night.problems())
        with pytest.raises(ServiceError, match="cannot be written"):
            night.submit()
        assert night.trains(), "training needs no journal"
        assert process_is_alive(night.pid)
        stop_service(home, force=True)
        assert "Traceback" not in (home / "service.log").read_text()
        until(
            lambda: subprocess.run(["umount", str(home)], capture_output=True).returncode == 0,
            "nobody uses it",
        )
        subprocess.run(["e2fsck", "-f", "-y", str(image)], capture_output=True, timeout=60)
        run("mount", "-o", "loop", str(image), str(home))
        night.go.touch()
        start_service(home, None, None)
        night.pid = int(read_service_file(home)["pid"])
        night.ends_well(taken, attempts_max=2)
