"""Jobs of other people run as other people: two user ids, a real service and its Ray. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.attempts.durable import open_to_append, write_durably
from orchestrator.backends.attempts.left_files import read_exit_code, read_log_tail
from orchestrator.service.client.client import Client, get_user_name, process_is_alive
from orchestrator.service.client.lifecycle import prepare_home, start_service, stop_service
from orchestrator.service.intake.intake import read_job
from orchestrator.service.pages.job import load_attempt_curves
from orchestrator.service.server.routes.attempt_files import read_with_secrets_masked
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.run import JobFolder
from tests.backends.ray_jobs import until
from tests.service.test_disks import JOB, SCRIPT
from tests.service.test_reach import Machine, free_port
from tests.service.test_secrets import shared_python

ADA, BOB = 51001, 51002
END_S = 120.0
SPY = """\
import json, os, pathlib, signal, sys
home, of_ada, own, pid = sys.argv[1:]
own = pathlib.Path(own)
tries = {
    "lists the home": lambda: os.listdir(home),
    "lists the jobs": lambda: os.listdir(home + "/jobs"),
    "reads the token": lambda: open(home + "/token").read(),
    "reads the journal": lambda: open(home + "/journal.sqlite", "rb").read(1),
    "reads the cluster file": lambda: open(home + "/cluster.yaml").read(),
    "lists the other's job": lambda: os.listdir(of_ada),
    "reads the other's log": lambda: open(of_ada + "/attempts/1/rank0.log").read(),
    "reads the other's output": lambda: os.listdir(of_ada + "/output"),
    "lists the other's home": lambda: os.listdir(home + "/users/ada"),
    "reads the other's environment": lambda: open(f"/proc/{pid}/environ", "rb").read(1),
    "signals the other's rank": lambda: os.kill(int(pid), signal.SIGCONT),
    "changes the guard's settings": lambda: open(own / "guard.json", "a"),
    "removes the guard's settings": lambda: os.unlink(own / "guard.json"),
    "replaces the guard's settings": lambda: os.replace(own / "mine", own / "guard.json"),
    "removes its log": lambda: os.unlink(own / "rank0.log"),
    "changes the guard": lambda: open(os.environ["PYTHONPATH"].split(":")[0] + "/sitecustomize.py", "a"),
    "becomes root": lambda: os.setuid(0),
}
(own / "mine").write_text("")
(own.parents[1] / "output" / "result").write_text("done")
(pathlib.Path.home() / "cache").write_text("")
os.symlink(home + "/token", own / "rank0.caught.json")
done = []
for name, attempt in tries.items():
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
print("may", json.dumps({"done": done, "uid": os.getresuid(), "gid": os.getresgid(), "groups": os.getgroups()}))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="orc-users-"))
    folder.chmod(0o755)
    yield folder
    if (folder / "home" / "service.json").exists():
        stop_service(folder / "home", force=True)
    shutil.rmtree(folder)


def submit(home: Path, folder: Path, user: str, python: str, script: str, *arguments: str) -> str:
    program, file = folder / f"{user}.py", folder / f"{user}.yaml"
    program.write_text(script)
    file.write_text(
        JOB.format(python=python, script=program, go=" ".join(arguments))
        + "retries: {startup: 0}\n"
    )
    spec = {**read_job(file).model_dump(mode="json"), "user": user, "name": user}
    with closing(Client(home)) as client:
        return client.submit_job(spec)


def show(home: Path, job_id: str) -> Any:
    with closing(Client(home)) as client:
        return client.fetch_job_and_version(job_id)[0]


def rank_of(home: Path, job_id: str) -> int | None:
    """The process of a job's rank, by its command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"{home}/jobs/{job_id}/attempts/1/guard.json".encode()
                in (entry / "cmdline").read_bytes()
            ):
                return int(entry.name)
        except OSError:
            continue
    return None


@pytest.mark.long
def test_ranks_of_two_users_reach_neither_each_other_nor_the_home(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, home, go = shared_python(), folder / "home", folder / "go"
    monkeypatch.setenv("ORC_MLFLOW", "http://127.0.0.1:1")
    cluster = folder / "cluster.yaml"
    users = f"users: {{ada: {{uid: {ADA}}}, bob: {{uid: {BOB}, gid: {BOB + 1}}}}}\n"
    cluster.write_text(Path("clusters/two-virtual-devices.yaml").read_text() + users)
    start_service(home, cluster, None)
    ada = submit(home, folder, "ada", python, SCRIPT, str(go))
    pid = until(lambda: rank_of(home, ada), "ada's rank", END_S)
    assert os.stat(f"/proc/{pid}").st_uid == ADA
    attempt_folder = home / "jobs" / "bob-2" / "attempts" / "1"
    bob = submit(
        home,
        folder,
        "bob",
        python,
        SPY,
        str(home),
        str(home / "jobs" / ada),
        str(attempt_folder),
        str(pid),
    )
    until(lambda: show(home, bob)["status"] in ("succeeded", "failed"), "the end of bob's", END_S)
    log = (attempt_folder / "rank0.log").read_text()
    assert "may " in log, log
    may = json.loads(log.partition("may ")[2])
    assert may == {"done": [], "uid": [BOB] * 3, "gid": [BOB + 1] * 3, "groups": []}
    assert show(home, bob)["status"] == "succeeded"
    assert (attempt_folder / "rank0.heartbeat.json").stat().st_uid == BOB, "its guard has worked"
    with closing(Client(home)) as client, pytest.raises(ServiceError, match="there is no rank 1"):
        client.read_log_and_offset(bob, 1, 1, 0)
    prepare_home(home)  # as every `orc up` does
    with pytest.raises(SpecError, match="the user has no user id here"):
        submit(home, folder, "eve", python, SCRIPT, str(go))
    go.touch()
    until(lambda: show(home, ada)["status"] == "succeeded", "the end of ada's", END_S)


@pytest.mark.long
def test_a_service_for_other_machines_asks_before_jobs_of_a_second_user_run_as_its_own(
    tmp_path: Path,
) -> None:
    here, listen = Machine(folder=tmp_path), f"127.0.0.1:{free_port()}"
    command = ("up", "--listen", listen, "--ray", "127.0.0.1:1")
    here.orc(*command)
    try:
        for name, role in ((get_user_name(), "admin"), ("eve", "viewer")):
            here.orc("user", "set", name, "--role", role)
        refused = json.loads(here.orc("user", "set", "ada", "--role", "member", code=1))["error"]
        assert refused.startswith(
            f"jobs of ada would run as {get_user_name()}, who can read and change this home"
        )
        assert "`orc up --listen HOST:PORT --trust-users`" in refused
        assert len(refused.splitlines()) == 1
        here.orc("down")
        here.orc(*command, "--trust-users")
        here.orc("user", "set", "ada", "--role", "member")
        here.orc("down")
        assert "jobs of ada would run as" in here.orc(*command, code=1)
    finally:
        here.orc("down", "--force", code=0 if (tmp_path / "home" / "service.json").exists() else 1)


def test_a_link_or_a_pipe_that_a_rank_planted_is_neither_read_nor_written_through(
    tmp_path: Path,
) -> None:
    secret, link, pipe = tmp_path / "secret", tmp_path / "rank1.log", tmp_path / "rank2.log"
    text = '{"step": 1, "loss": 2.0}'
    secret.write_text(text)
    link.symlink_to(secret)
    os.mkfifo(pipe)
    folder = JobFolder(tmp_path, "lm-1").attempt(1)
    folder.path.mkdir(parents=True)
    for planted in (link, pipe):
        for file in (folder.metrics, folder.exit_code(0)):
            file.unlink(missing_ok=True)
            file.symlink_to(secret) if planted is link else os.mkfifo(file)
        assert load_attempt_curves(tmp_path, "lm-1", 1).loss == []
        assert read_exit_code(folder, 0) is None
        assert read_with_secrets_masked(planted, 0, ()) == b""
        assert read_log_tail(planted) == ""
        with pytest.raises(OSError, match=r"Too many levels|No such device"):
            open_to_append(planted)
    (tmp_path / f"rank0.rc.{os.getpid()}.{threading.get_ident()}.tmp").symlink_to(secret)
    write_durably(tmp_path / "rank0.rc", "0")
    assert (tmp_path / "rank0.rc").read_text() == "0"
    assert secret.read_text() == text


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")
def test_a_rank_of_another_user_dies_with_its_launcher() -> None:
    """A change of user clears the signal that a dead parent leaves (prctl(2)): it is set after that."""
    starts = (
        "import subprocess, sys; "
        "from orchestrator.backends.attempts.launcher import make_die_with_parent_hook; "
        "from orchestrator.backends.attempts.launcher import make_popen_user_arguments; "
        "rank = subprocess.Popen(['sleep', '600'], preexec_fn=make_die_with_parent_hook(), "
        f"**make_popen_user_arguments('{ADA}:{ADA}')); "
        "print(rank.pid, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", starts], **pipes) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        assert os.stat(f"/proc/{rank}").st_uid == ADA
        launcher.kill()
        until(lambda: not process_is_alive(rank), "the end of the rank", END_S)
