"""Laws of attempts on whatever cluster has launchers and nodes: here on launchers of this process, without Ray."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.specs.actions import Stop
from orchestrator.specs.events import Finished, NodesSeen, Started
from tests.backends.ray_jobs import BOTH, CLUSTER, Alone, Reader, alive, folder_of, launch_of, said, script, until
from tests.local_cluster import LocalLaunchers, LocalNodes


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
    evidence = reader.finished(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [0, 5, -signal.SIGSEGV, -signal.SIGKILL]
    assert evidence.first_ended_rank in (1, 2)
    assert evidence.nodes_lost == ()


def test_a_stop_is_a_request_first_and_a_kill_later(reader: Reader, tmp_path: Path) -> None:
    launch = launch_of("stopped", script("polite", "deaf", "wait", "wait"), BOTH)
    reader.backend.launch(launch)
    reader.started(launch)
    for rank in range(4):
        said(folder_of(tmp_path, launch), rank)
    reader.backend.stop(Stop(job_id="stopped", number=1, grace_s=1.0))
    evidence = reader.finished(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [7, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGTERM]
    assert evidence.stopped


def test_a_node_that_leaves_is_lost_with_its_ranks_and_ends_the_others(
    reader: Reader, nodes: LocalNodes, tmp_path: Path
) -> None:
    launch = launch_of("nodeless", script("wait", "wait", "wait", "wait"), BOTH)
    reader.backend.launch(launch)
    reader.started(launch)
    pids = [int(str(said(folder_of(tmp_path, launch), rank)["pid"])) for rank in range(4)]
    del nodes.nodes["n1"]
    assert reader.finished(launch).evidence.nodes_lost == ("n1",)
    until(lambda: not alive(pids), "no rank outlives the attempt")
    seen = [event for event in reader.seen if isinstance(event, NodesSeen)]
    assert [node.name for node in seen[-1].nodes] == ["gpu", "n0", "n2"]


def test_a_program_that_is_not_there_is_told_as_such_and_leaves_no_rank(reader: Reader, tmp_path: Path) -> None:
    launch = launch_of("absent", script().model_copy(update={"command": ("/no/such/program",)}), BOTH)
    reader.backend.launch(launch)
    evidence = reader.finished(launch).evidence
    assert evidence.no_program, "it would be launched again, for as often as start-ups may fail"
    assert "/no/such/program" in str(evidence.launch_error)
    assert not folder_of(tmp_path, launch).exit_code(0).exists()


def test_an_end_is_told_again_word_for_word_and_never_run_again(reader: Reader, tmp_path: Path) -> None:
    launch = launch_of("again", script("exit:3"))
    reader.backend.launch(launch)
    first = reader.finished(launch).evidence
    reader.forget(launch)
    reader.backend.adopt(launch.job, launch.attempt)  # the journal had not heard of the end
    assert reader.finished(launch).evidence == first
    reader.forget(launch)
    reader.backend.adopt(launch.job, dataclasses.replace(launch.attempt, evidence=first))  # only its release is missing
    reader.backend.adopt(launch.job, dataclasses.replace(launch.attempt, evidence=first, released=True))
    reader.poll()
    assert reader.of(launch, Finished) is None
    assert reader.of(launch, Started) is None
    assert len(folder_of(tmp_path, launch).log(0).read_text().splitlines()) == 1


def test_an_attempt_on_a_node_that_left_before_it_began_tells_of_a_lost_node(reader: Reader, nodes: LocalNodes) -> None:
    del nodes.nodes["n0"]

    def is_gone() -> bool:
        reader.poll()
        seen = [event for event in reader.seen if isinstance(event, NodesSeen)]
        return bool(seen) and "n0" not in {node.name for node in seen[-1].nodes}

    until(is_gone, "n0 is gone")
    launch = launch_of("nowhere", script("exit:0"))
    reader.backend.launch(launch)
    assert reader.finished(launch).evidence.nodes_lost == ("n0",)
