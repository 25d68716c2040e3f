"""Laws of the launcher, without Ray: how ranks ended is exact and durable, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.attempts import launcher as module
from orchestrator.backends.attempts.durable import read_attempt_number, write_durably
from orchestrator.backends.attempts.launcher import (
    Launcher,
    count_oom_kills,
    find_free_port,
)
from orchestrator.backends.attempts.leftovers import (
    end_leftover_processes,
    kill_marked_processes,
    make_process_mark,
)
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.ray import connection
from orchestrator.specs.choices import Engine, Offload, OffloadTarget, ZeroStage
from orchestrator.specs.job.model import DataSpec, ModelSpec, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import AttemptFolder, JobFolder, TrainingRun, write_json
from tests.backends.ray_jobs import PROGRAM, alive, first_line, until


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    return AttemptFolder(tmp_path / "attempts" / "1")


def launcher_of(folder: AttemptFolder, number: int = 1) -> Launcher:
    watched = Watched(node="n0", devices=(0,))
    return Launcher(
        str(folder.path),
        str(folder.path.parents[1] / "epoch"),
        number,
        f"{folder.path}/n0",
        watched,
    )


def ranks_of(*behaviours: str, **env: str) -> list[tuple[int, tuple[str, ...], dict[str, str]]]:
    argv = (str(PROGRAM), *behaviours)
    return [(rank, argv, {"RANK": str(rank), **env}) for rank in range(len(behaviours))]


def await_end(launcher: Launcher) -> dict[str, Any]:
    return until(
        lambda: launcher.status()["state"] == "ended" and launcher.status(),
        "every rank has ended",
        20,
    )


def test_exit_codes_and_signals_are_exact_and_on_the_disk(folder: AttemptFolder) -> None:
    launcher = launcher_of(folder)
    launcher.start(ranks_of("exit:0", "exit:5", "signal:11", "signal:9"), "/")
    status = await_end(launcher)
    assert status["exit_codes"] == {0: 0, 1: 5, 2: -11, 3: -9}
    assert [folder.exit_code(rank).read_text() for rank in range(4)] == ["0", "5", "-11", "-9"]
    assert list(folder.path.glob("*.tmp")) == []


def test_the_first_failing_rank_is_named_and_ends_the_others(
    folder: AttemptFolder, tmp_path: Path
) -> None:
    launcher = launcher_of(folder)
    launcher.start(ranks_of("daemon", "deaf", f"go:{tmp_path / 'go'}"), "/")
    children = [int(str(first_line(folder, 0)["child"]))]
    os.kill(launcher.status()["pids"][2], signal.SIGKILL)
    began_s = time.monotonic()
    status = await_end(launcher)
    assert status["first_ended"][0] == 2
    assert status["exit_codes"] == {0: -9, 1: -9, 2: -9}
    assert time.monotonic() - began_s < 5
    assert until(lambda: not alive(children), "a daemon of a rank in its own session ends too", 5)


def test_a_rank_that_ends_well_leaves_the_others_alone(
    folder: AttemptFolder, tmp_path: Path
) -> None:
    launcher = launcher_of(folder)
    launcher.start(ranks_of("exit:0", f"go:{tmp_path / 'go'}"), "/")
    until(lambda: launcher.status()["exit_codes"][0] == 0, "rank 0 has ended")
    assert not launcher.status()["ending"]
    (tmp_path / "go").touch()
    assert await_end(launcher)["exit_codes"] == {0: 0, 1: 0}


def test_an_oom_report_ends_a_rank_that_does_not_end_itself(folder: AttemptFolder) -> None:
    launcher = launcher_of(folder)
    launcher.start(ranks_of(f"oom:{folder.path}", "wait"), "/")
    status = await_end(launcher)
    assert status["oom"]
    assert status["exit_codes"] == {0: -9, 1: -9}


def test_starting_again_changes_nothing(folder: AttemptFolder) -> None:
    launcher = launcher_of(folder)
    first = launcher.start(ranks_of("wait"), "/")["pids"]
    assert launcher.start(ranks_of("wait", "wait"), "/")["pids"] == first
    launcher.abort(0)
    await_end(launcher)


def test_stopped_before_the_start_means_never_started(folder: AttemptFolder) -> None:
    launcher = launcher_of(folder)
    launcher.stop(1.0)
    assert launcher.start(ranks_of("exit:0"), "/")["pids"] == {}
    assert not folder.log(0).exists()


def test_stop_asks_first_and_kills_after_the_grace(folder: AttemptFolder) -> None:
    launcher = launcher_of(folder)
    launcher.start(ranks_of("polite", "deaf", "wait"), "/")
    for rank in range(3):
        first_line(folder, rank)
    began_s = time.monotonic()
    launcher.stop(0.5)
    assert await_end(launcher)["exit_codes"] == {0: 7, 1: -9, 2: -15}
    assert 0.5 <= time.monotonic() - began_s < 5


def test_an_attempt_older_than_the_epoch_is_refused(folder: AttemptFolder) -> None:
    folder.path.mkdir(parents=True)
    write_durably(folder.path.parents[1] / "epoch", "2")
    status = launcher_of(folder, number=1).start(ranks_of("exit:0"), "/")
    assert status["stale"]
    assert status["pids"] == {}


def test_ranks_end_when_a_newer_attempt_appears(folder: AttemptFolder) -> None:
    launcher = launcher_of(folder, number=1)
    launcher.start(ranks_of("deaf"), "/")
    assert read_attempt_number(folder.path.parents[1] / "epoch") == 0
    write_durably(folder.path.parents[1] / "epoch", "2")
    assert await_end(launcher)["exit_codes"] == {0: -9}


def test_ranks_do_not_inherit_tokens(
    folder: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "ORC_TOKEN"):
        monkeypatch.setenv(name, "hidden")
    launcher = launcher_of(folder)
    launcher.start(ranks_of("exit:0", KEPT="yes"), "/")
    await_end(launcher)
    env = first_line(folder, 0)["env"]
    assert isinstance(env, dict)
    assert env["KEPT"] == "yes"
    assert [name for name, value in env.items() if value == "hidden"] == []


def test_a_program_that_cannot_start_is_an_error_in_the_status(folder: AttemptFolder) -> None:
    status = launcher_of(folder).start([(0, ("/no/such/program",), {})], "/")
    assert "/no/such/program" in status["error"]
    assert status["state"] == "ended"


def test_a_long_poll_answers_on_change_and_at_its_timeout(
    folder: AttemptFolder, tmp_path: Path
) -> None:
    launcher = launcher_of(folder)
    version = launcher.start(ranks_of(f"go:{tmp_path / 'go'}"), "/")["version"]
    began_s = time.monotonic()
    assert launcher.wait(version, 0.2)["version"] == version
    assert time.monotonic() - began_s >= 0.2
    (tmp_path / "go").touch()
    assert launcher.wait(version, 20)["version"] > version
    assert time.monotonic() - began_s < 10
    await_end(launcher)


LAUNCHING_PROCESS = """
import sys, time
from tests.backends.test_launcher import AttemptFolder, launcher_of, ranks_of
from pathlib import Path
launcher_of(AttemptFolder(sys.argv[1])).start(ranks_of("deaf", "deaf"), "/")
print("started", flush=True)
time.sleep(300)
"""


def test_ranks_die_with_their_launcher(folder: AttemptFolder) -> None:
    arguments = [sys.executable, "-c", LAUNCHING_PROCESS, str(folder.path)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        pids = [int(str(first_line(folder, rank)["pid"])) for rank in (0, 1)]
        assert alive(pids) == pids
        process.kill()
    assert until(lambda: not alive(pids), "ranks are gone", 5)


def test_attempts_of_one_name_in_two_homes_share_neither_names_nor_marks(tmp_path: Path) -> None:
    """Two services on one machine, or on one Ray, both with a job fits-1: neither takes up or kills the other's."""
    first_home, two = tmp_path / "one", tmp_path / "two"
    marks = {
        make_process_mark(JobFolder(home, "fits-1").attempt(1), "local")
        for home in (first_home, two)
    }
    assert len(marks) == 2
    assert connection.make_home_namespace(first_home) != connection.make_home_namespace(two)
    assert connection.make_home_namespace(first_home) == connection.make_home_namespace(first_home)


def test_kill_marked_ends_the_marked_only(tmp_path: Path) -> None:
    name = str(tmp_path)
    marked, other = (
        subprocess.Popen(
            ["sleep", "300"], env={**os.environ, module.MARK: mark}, start_new_session=True
        )
        for mark in (name, f"{name}-other")
    )
    assert kill_marked_processes(name) == 1
    assert marked.wait(10) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait(10)


def write_swap(folder: AttemptFolder, nvme: Path) -> Path:
    """A file that the attempt of `folder` has swapped to below `nvme`, as a DeepSpeed engine writes it."""
    plan = Plan(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.PARAMETERS,
        offload=Offload.PARAMETERS,
        offload_target=OffloadTarget.NVME,
        micro_batch_size=1,
    )
    run = TrainingRun(
        model=ModelSpec(),
        data=DataSpec(),
        training=TrainingSpec(),
        plan=plan,
        job_folder=str(folder.path.parents[1]),
        attempt_folder=str(folder.path),
        epoch=int(folder.path.name),
        device="cuda",
        nvme_folder=str(nvme),
    )
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder.run, run)
    assert run.swap_folder is not None
    file = run.swap_folder / "model" / "zero_stage_3" / "float32params" / "rank0" / "0.swp"
    file.parent.mkdir(parents=True)
    file.touch()
    return file


def test_what_killed_ranks_swapped_to_files_is_removed_and_nothing_else(tmp_path: Path) -> None:
    first, second, other_home = (
        JobFolder(tmp_path / home, "fits-1").attempt(number)
        for home, number in (("a", 1), ("a", 2), ("b", 1))
    )
    mine, newer, foreign = (
        write_swap(folder, tmp_path / "nvme") for folder in (first, second, other_home)
    )
    launcher = launcher_of(first)
    launcher.start(ranks_of("wait", "wait"), "/")
    os.kill(launcher.status()["pids"][0], signal.SIGKILL)
    await_end(launcher)
    assert (mine.exists(), newer.exists(), foreign.exists()) == (False, True, True)
    end_leftover_processes(
        "nobody", str(second.path)
    )  # as a node that lives is told when the launcher is gone
    end_leftover_processes("nobody", str(second.path))
    assert [path.name for path in (tmp_path / "nvme").iterdir()] == [
        foreign.relative_to(tmp_path / "nvme").parts[0]
    ]


def test_ports_are_below_the_ephemeral_range_and_differ() -> None:
    ports = {find_free_port() for _ in range(20)}
    assert len(ports) > 10
    assert all(port < 32768 for port in ports)


def test_the_kernels_counter_is_read() -> None:
    assert count_oom_kills() >= 0
