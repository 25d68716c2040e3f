"""Laws of attempts on whatever cluster has launchers and nodes: here on launchers of this process, without Ray."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.attempts.durable import write_durably
from orchestrator.backends.attempts.launcher import GRACE_AFTER_FAILURE_S
from orchestrator.specs.actions import Stop
from orchestrator.specs.attempt import NodeDevices
from orchestrator.specs.events import Finished, NodesSeen, Started
from orchestrator.specs.run import JobFolder
from tests.backends.ray_jobs import (
    BOTH,
    CLUSTER,
    Alone,
    Reader,
    alive,
    descendants_of,
    first_line,
    folder_of,
    launch_of,
    script,
    until,
)
from tests.local_cluster import LocalLaunchers, LocalNodes

SECONDS_TO_END_A_GANG = 5.0


@pytest.fixture
def nodes() -> LocalNodes:
    return LocalNodes(CLUSTER)


@pytest.fixture
def reader(tmp_path: Path, nodes: LocalNodes) -> Iterator[Reader]:
    backend = ProcessBackend(tmp_path, CLUSTER, nodes, LocalLaunchers(), Alone())
    yield Reader(backend)
    backend.close()


def test_ends_are_exact_on_every_node(reader: Reader) -> None:
    launch = launch_of("exact", script("exit:0", "exit:5", "signal:11", "wait"), BOTH)
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [0, 5, -signal.SIGSEGV, -signal.SIGKILL]
    assert evidence.first_ended_rank in (1, 2)
    assert evidence.nodes_lost == ()


def test_one_rank_out_of_memory_ends_the_gang_in_seconds(reader: Reader, tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "oom").attempt(1)
    launch = launch_of("oom", script("wait", "daemon", "wait", f"oom:{folder.path}"), BOTH)
    reader.backend.launch(launch)
    reader.await_start(launch)
    until(folder.oom(3).exists, "the report")
    began_s = time.monotonic()
    pids = descendants_of(folder, [0, 1, 2])
    evidence = reader.await_end(launch).evidence
    assert time.monotonic() - began_s < SECONDS_TO_END_A_GANG
    assert [report.rank for report in evidence.ooms] == [3]
    assert [end.exit_code for end in evidence.ranks] == [-signal.SIGKILL] * 4
    assert alive(pids) == []


def test_a_guarded_script_leaves_its_own_account(reader: Reader, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise KeyError('no such column')\n")
    launch = launch_of("guarded", script().model_copy(update={"command": ("python", str(program))}))
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert [(report.rank, report.type) for report in evidence.errors] == [(0, "KeyError")]
    assert [beat.rank for beat in evidence.heartbeats] == [0]
    assert [end.exit_code for end in evidence.ranks] == [1]
    assert "no such column" in evidence.ranks[0].log_tail


def test_a_script_that_said_why_it_fails_may_take_its_time_to_end(
    reader: Reader, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    slow = 3 * GRACE_AFTER_FAILURE_S
    program.write_text(
        f"import atexit, time\natexit.register(time.sleep, {slow})\nraise KeyError('no such column')\n"
    )
    launch = launch_of(
        "slow-to-end", script().model_copy(update={"command": ("python", str(program))})
    )
    reader.backend.launch(launch)
    assert [end.exit_code for end in reader.await_end(launch).evidence.ranks] == [1]


def test_no_step_for_too_long_is_a_hang(reader: Reader) -> None:
    launch = launch_of("hung", script("wait", hang_timeout="1s"))
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert evidence.hung_for_s is not None
    assert evidence.hung_for_s > 1.0
    assert [end.exit_code for end in evidence.ranks] == [-signal.SIGKILL]


def test_an_older_attempt_never_starts(reader: Reader, tmp_path: Path) -> None:
    jobs = JobFolder(tmp_path, "fenced")
    jobs.path.mkdir(parents=True)
    write_durably(jobs.epoch, "2")
    launch = launch_of("fenced", script("wait"))
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert evidence.launch_error is not None
    assert "attempt 2" in evidence.launch_error
    assert evidence.ranks == ()
    assert jobs.epoch.read_text() == "2"


def test_a_newer_attempt_ends_an_older_one(reader: Reader, tmp_path: Path) -> None:
    launch = launch_of(
        "overtaken", script("deaf", "deaf"), (NodeDevices(node="n0", devices=(0, 1)),)
    )
    reader.backend.launch(launch)
    reader.await_start(launch)
    write_durably(JobFolder(tmp_path, "overtaken").epoch, "2")
    evidence = reader.await_end(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [-signal.SIGKILL] * 2


def test_a_missing_secret_is_a_failed_launch(reader: Reader) -> None:
    launch = launch_of("secretive", script("exit:0", secrets=("NO_SUCH_SECRET",)))
    reader.backend.launch(launch)
    assert "NO_SUCH_SECRET" in str(reader.await_end(launch).evidence.launch_error)


def test_an_attempt_that_never_began_is_begun_by_adopting_it(reader: Reader) -> None:
    launch = launch_of("unbegun", script("exit:0"))
    reader.backend.adopt(launch.job, launch.attempt)
    assert [end.exit_code for end in reader.await_end(launch).evidence.ranks] == [0]


def test_a_stop_is_a_request_first_and_a_kill_later(reader: Reader, tmp_path: Path) -> None:
    launch = launch_of("stopped", script("polite", "deaf", "wait", "wait"), BOTH)
    reader.backend.launch(launch)
    reader.await_start(launch)
    for rank in range(4):
        first_line(folder_of(tmp_path, launch), rank)
    reader.backend.stop(Stop(job_id="stopped", number=1, grace_s=1.0))
    evidence = reader.await_end(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [
        7,
        -signal.SIGKILL,
        -signal.SIGTERM,
        -signal.SIGTERM,
    ]
    assert evidence.stopped


def test_a_node_that_leaves_is_lost_with_its_ranks_and_ends_the_others(
    reader: Reader, nodes: LocalNodes, tmp_path: Path
) -> None:
    launch = launch_of("nodeless", script("wait", "wait", "wait", "wait"), BOTH)
    reader.backend.launch(launch)
    reader.await_start(launch)
    pids = [int(str(first_line(folder_of(tmp_path, launch), rank)["pid"])) for rank in range(4)]
    del nodes.nodes["n1"]
    assert reader.await_end(launch).evidence.nodes_lost == ("n1",)
    until(lambda: not alive(pids), "no rank outlives the attempt")
    node_events = [event for event in reader.received if isinstance(event, NodesSeen)]
    assert [node.name for node in node_events[-1].nodes] == ["gpu", "n0", "n2"]


def test_a_program_that_is_not_there_is_told_as_such_and_leaves_no_rank(
    reader: Reader, tmp_path: Path
) -> None:
    launch = launch_of(
        "absent", script().model_copy(update={"command": ("/no/such/program",)}), BOTH
    )
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert evidence.no_program, "it would be launched again, for as often as start-ups may fail"
    assert "/no/such/program" in str(evidence.launch_error)
    assert not folder_of(tmp_path, launch).exit_code(0).exists()


def test_an_end_is_told_again_word_for_word_and_never_run_again(
    reader: Reader, tmp_path: Path
) -> None:
    launch = launch_of("again", script("exit:3"))
    reader.backend.launch(launch)
    first = reader.await_end(launch).evidence
    reader.forget(launch)
    reader.backend.adopt(launch.job, launch.attempt)  # the journal had not heard of the end
    assert reader.await_end(launch).evidence == first
    reader.forget(launch)
    reader.backend.adopt(
        launch.job, dataclasses.replace(launch.attempt, evidence=first)
    )  # only its release is missing
    reader.backend.adopt(
        launch.job, dataclasses.replace(launch.attempt, evidence=first, released=True)
    )
    reader.poll()
    assert reader.find(launch, Finished) is None
    assert reader.find(launch, Started) is None
    assert len(folder_of(tmp_path, launch).log(0).read_text().splitlines()) == 1


def test_an_attempt_on_a_node_that_left_before_it_began_tells_of_a_lost_node(
    reader: Reader, nodes: LocalNodes
) -> None:
    del nodes.nodes["n0"]

    def is_gone() -> bool:
        reader.poll()
        node_events = [event for event in reader.received if isinstance(event, NodesSeen)]
        return bool(node_events) and "n0" not in {node.name for node in node_events[-1].nodes}

    until(is_gone, "n0 is gone")
    launch = launch_of("nowhere", script("exit:0"))
    reader.backend.launch(launch)
    assert reader.await_end(launch).evidence.nodes_lost == ("n0",)
