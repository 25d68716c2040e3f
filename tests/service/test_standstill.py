"""A decision that never ends: the service says so, SIGTERM ends it in time, `orc down --force` leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.client.client import Client, is_up, process_is_alive, read_service_file
from orchestrator.service.client.lifecycle import start_service, stop_service
from orchestrator.service.intake.intake import read_job
from orchestrator.service.server import controller as controller_module
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Action
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Event, Submitted
from tests.backends.ray_jobs import until
from tests.scheduling.world import script
from tests.service.folder_world import FolderBackend
from tests.service.mortal import CLUSTER
from tests.service.test_disks import JOB, SCRIPT, Night

FORCED_S = 15.0
SIGTERM_S = 10.0
NO_RAY = "127.0.0.1:1"
PLANTED = """\
import sys, time
if "orchestrator.service.process" in sys.orig_argv:
    from orchestrator.scheduling.policies import registry
    from orchestrator.scheduling.policies.rigid import RigidPolicy

    class Endless(RigidPolicy):
        def rank(self, job):
            while True:
                time.sleep({pause_s})

    for order in registry.POLICIES:
        registry.POLICIES[order] = Endless
"""


class Gated(Scheduler):
    """A Scheduler whose decisions on submissions end once `opened` is set."""

    opened = threading.Event()

    def step(self, event: Event) -> tuple[Action, ...]:
        if isinstance(event, Submitted):
            self.opened.wait()
        return super().step(event)


@pytest.fixture(
    params=[0.001, pytest.param(0, marks=pytest.mark.long)]
)  # the second takes a whole processor
def hanging(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The home of a service that hangs in its first decision on a job, under the controller's lock."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(pause_s=request.param))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ORC_MLFLOW", NO_RAY)
    home, program, file = tmp_path / "home", tmp_path / "waits.py", tmp_path / "job.yaml"
    program.write_text(SCRIPT)
    file.write_text(JOB.format(python="python", script=program, go=tmp_path / "go"))
    start_service(home, None, NO_RAY)
    spec = read_job(file).model_dump(mode="json")

    def submit() -> None:
        with suppress(ServiceError), closing(Client(home)) as client:
            client.submit_job(spec)

    threading.Thread(target=submit, daemon=True).start()
    yield home
    with suppress(ServiceError):
        stop_service(home, force=True)


def readyz(home: Path) -> httpx.Response:
    return httpx.get(
        f"http://127.0.0.1:{read_service_file(home)['port']}/readyz", timeout=5.0, trust_env=False
    )


def test_a_service_whose_decision_does_not_end_is_not_ready_and_says_what_it_does_without_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "STANDSTILL_S", 0.1)
    with closing(Journal(f"sqlite:///{tmp_path / 'journal.sqlite'}")) as journal:
        controller = Controller(journal, FolderBackend(tmp_path, CLUSTER), time.time, Gated)
        submitter = threading.Thread(target=controller.submit, args=[script("lm", gpus=1)])
        submitter.start()
        problems = until(controller.health.list_failures, "the standstill is told")
        assert problems[0].startswith("no decision has ended for 0 s: submitted, since ")
        assert "job=lm-1" in str(controller.describe_standstill(name_job=True))
        Gated.opened.set()
        submitter.join()
        assert controller.health.list_failures() == []


@pytest.mark.long
def test_sigterm_ends_a_service_within_ten_seconds_though_its_decision_never_ends(
    hanging: Path,
) -> None:
    pid = int(read_service_file(hanging)["pid"])
    answer = until(
        lambda: (reply := readyz(hanging)).status_code == 503 and reply,
        "the service is not ready",
        60.0,
    )
    assert ": submitted, since " in answer.json()["error"]
    log = hanging / "service.log"
    until(
        lambda: ": submitted job=waits-1, since " in log.read_text(), "its operator reads which job"
    )
    os.kill(pid, signal.SIGTERM)
    until(lambda: not process_is_alive(pid), "its end", SIGTERM_S)
    assert "in rank" in log.read_text(), "the log says where it hung"


@pytest.mark.long
@pytest.mark.parametrize("is_frozen", [False, True], ids=["a decision hangs", "all of it hangs"])
def test_down_by_force_ends_a_service_that_hangs(hanging: Path, is_frozen: bool) -> None:
    pid = int(read_service_file(hanging)["pid"])
    until(lambda: readyz(hanging).status_code == 503, "the service is not ready", 60.0)
    if is_frozen:
        os.kill(pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    stop_service(hanging, force=True)
    assert time.monotonic() - begun_s < FORCED_S
    assert not process_is_alive(pid)
    assert not is_up(hanging)


@pytest.mark.long
def test_down_by_force_ends_all_of_the_home_after_a_clean_end_of_its_service(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    night = Night(home, tmp_path / "go")
    os.kill(night.pid, signal.SIGTERM)
    until(lambda: not process_is_alive(night.pid), "the end of the service", 2 * SIGTERM_S)
    assert not (home / "service.json").exists()
    with pytest.raises(
        ServiceError, match=r"its Ray runs, perhaps with jobs: `orc up` adopts them"
    ):
        stop_service(home, force=False)
    ray = embedded_ray.read_record(home)
    assert ray is not None
    assert night.trains()
    assert MlflowServer(home).list_processes()
    stop_service(home, force=True)
    assert not night.trains()
    assert embedded_ray.find_local_address(home) is None
    assert subprocess.run(["pgrep", "--full", ray["temp_dir"]], capture_output=True).stdout == b""
    assert MlflowServer(home).list_processes() == ()
    with pytest.raises(ServiceError, match="no service is up"):
        stop_service(home, force=True)
