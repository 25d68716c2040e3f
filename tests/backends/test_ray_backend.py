"""Laws of launching on a real Ray: ends are told exactly, nothing outlives an attempt, nothing runs twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.ray import agent, connection
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.backends.ray import launchers as ray_launchers
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import NodeDevices
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Finished, NodesSeen, Released
from orchestrator.specs.run import AttemptFolder
from tests.backends.conftest import Embedded
from tests.backends.ray_jobs import (
    BOTH,
    CLUSTER,
    MIB,
    PROGRAM,
    Reader,
    alive,
    descendants_of,
    first_line,
    folder_of,
    launch_of,
    parent_of,
    script,
    until,
)
from tests.training.fake_cuda import ON_CUDA

SECONDS_TO_END_A_GANG = 5.0


def group_names() -> set[str]:
    return {
        group["name"]
        for group in ray.util.placement_group_table().values()
        if group["state"] not in ("REMOVED",)
    }


def free_of(reader: Reader) -> tuple[int, ...]:
    """Return the free bytes on the devices of the node that has an NVML, as last reported."""
    return (
        next(event for event in reversed(reader.received) if isinstance(event, NodesSeen))
        .nodes[0]
        .free_bytes
    )


def nothing_is_left(launch: Launch) -> bool:
    return (
        launch.attempt.name not in group_names()
        and not ray_launchers.RayLaunchers().find_launchers(launch.attempt).nodes
    )


def test_ends_are_exact_and_nothing_is_left(reader: Reader) -> None:
    launch = launch_of("exact", script("exit:0", "exit:5", "signal:11", "signal:9"), BOTH)
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [0, 5, -signal.SIGSEGV, -signal.SIGKILL]
    assert evidence.first_ended_rank in (1, 2, 3)
    assert (evidence.nodes_lost, evidence.launch_error, evidence.stopped) == ((), None, False)
    assert until(lambda: nothing_is_left(launch), "placement group and launchers removed")


@pytest.mark.long
def test_every_rank_is_told_its_place_and_no_token(reader: Reader, embedded: Embedded) -> None:
    launch = launch_of("place", script(*["exit:0"] * 4), BOTH)
    reader.backend.launch(launch)
    reader.await_end(launch)
    firsts = [first_line(folder_of(embedded.home, launch), rank)["env"] for rank in range(4)]
    assert [
        (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"])
        for env in firsts
    ] == [
        ("0", "0", "4", "2"),
        ("1", "1", "4", "2"),
        ("2", "0", "4", "2"),
        ("3", "1", "4", "2"),
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in firsts}) == 1
    assert not [name for env in firsts for name in env if name.startswith("RAY_")]


def test_a_launcher_takes_the_process_of_one_that_has_ended_and_never_shares_it(
    reader: Reader, embedded: Embedded, tmp_path: Path
) -> None:
    def begin(name: str, device: int) -> tuple[Launch, int]:
        """Start a job that waits; return it with the process of its launcher."""
        place = (NodeDevices(node="n0", devices=(device,)),)
        launch = launch_of(f"host-{name}", script(f"go:{tmp_path / 'go'}"), place)
        reader.backend.launch(launch)
        reader.await_start(launch)
        rank = int(str(first_line(folder_of(embedded.home, launch), 0)["pid"]))
        return launch, parent_of(rank)

    def end(*launches: Launch) -> None:
        (tmp_path / "go").touch()
        for launch in launches:
            assert [end.exit_code for end in reader.await_end(launch).evidence.ranks] == [0]
        (tmp_path / "go").unlink()

    first, host = begin("first", 0)
    end(first)
    second, same_host = begin("second", 0)
    beside, other_host = begin("beside", 1)
    assert (same_host, other_host != host) == (host, True)
    end(second, beside)
    for pid in (host, other_host):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive([host, other_host]), "the idle hosts are gone")
    third, new_host = begin("third", 0)
    assert new_host not in (host, other_host)
    end(third)


def test_a_host_keeps_an_attempt_until_all_its_processes_ended(tmp_path: Path) -> None:
    host, watched = ray_launchers.LauncherHost(), Watched(node="n0", devices=(0,))
    folder = AttemptFolder(tmp_path / "attempts" / "1")
    arguments = (str(folder.path), str(tmp_path / "epoch"), 1, f"{folder.path}@n0", watched)
    assert host.host("a/1", *arguments)
    assert not host.host("b/1", *arguments)
    assert not host.release("a/1"), "its ranks may be started any moment"
    host.call("a/1", "start", [(0, (str(PROGRAM), "wait"), {})], "/")
    assert not host.release("a/1")
    with pytest.raises(LookupError):
        host.call("b/1", "status")
    host.call("a/1", "abort", 0.0)
    until(lambda: host.release("a/1"), "its rank has ended")
    assert host.host("b/1", *arguments)
    with pytest.raises(LookupError):
        host.call("a/1", "stop", 0.0)


IDLE_HOST = """
import time
from orchestrator.backends.ray import launchers
launchers.HOST_IDLE_S, launchers.HOST_LOOK_S = 0.2, 0.1
host = launchers.LauncherHost()
time.sleep(60)
"""


def test_an_idle_host_ends() -> None:
    command = [sys.executable, "-c", IDLE_HOST]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=30)


def test_a_killed_launcher_is_a_lost_node_without_orphans(
    reader: Reader, embedded: Embedded
) -> None:
    launch = launch_of("launcherless", script("wait", "daemon", "wait", "wait"), BOTH)
    reader.backend.launch(launch)
    reader.await_start(launch)
    pids = descendants_of(folder_of(embedded.home, launch), [0, 1, 2, 3])
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    evidence = reader.await_end(launch).evidence
    assert evidence.nodes_lost == ("n0",)
    assert [end.exit_code for end in evidence.ranks] == [
        None,
        None,
        -signal.SIGKILL,
        -signal.SIGKILL,
    ]
    assert alive(pids) == []
    assert until(lambda: nothing_is_left(launch), "placement group removed")


def test_a_lost_node_is_told_and_leaves_the_cluster(reader: Reader, embedded: Embedded) -> None:
    lost = (NodeDevices(node="n1", devices=(0,)), NodeDevices(node="n2", devices=(0,)))
    launch = launch_of("nodeless", script("wait", "wait"), lost)
    reader.backend.launch(launch)
    reader.await_start(launch)
    pids = descendants_of(folder_of(embedded.home, launch), [0, 1])
    os.kill(parent_of(parent_of(pids[1])), signal.SIGKILL)  # rank <- launcher <- raylet
    evidence = reader.await_end(launch).evidence
    assert evidence.nodes_lost == ("n2",)
    assert until(lambda: not alive(pids), "no rank outlives its node")
    node_events = [event for event in reader.received if isinstance(event, NodesSeen)]
    assert [node.name for node in node_events[0].nodes] == ["gpu", "n0", "n1", "n2"]
    assert [node.name for node in node_events[-1].nodes] == ["gpu", "n0", "n1"]


@pytest.mark.long
def test_a_node_whose_launcher_wrote_down_that_ray_killed_its_ranks_is_lost_all_the_same(
    reader: Reader, embedded: Embedded
) -> None:
    """Ray kills a worker's children before the worker: its launcher may have the time for their exit codes."""
    launch = launch_of("written-down", script("wait", "wait", "wait", "wait"), BOTH)
    reader.backend.launch(launch)
    reader.await_start(launch)
    folder = folder_of(embedded.home, launch)
    launcher = parent_of(descendants_of(folder, [0, 1, 2, 3])[0])
    os.kill(launcher, signal.SIGSTOP)  # it tells nothing of what follows
    for rank in (0, 1):
        folder.exit_code(rank).write_text(str(-signal.SIGKILL))
    os.kill(launcher, signal.SIGKILL)
    assert reader.await_end(launch).evidence.nodes_lost == ("n0",)


def test_devices_are_released_when_nvml_says_so(
    reader: Reader, embedded: Embedded, nvml_library: Path
) -> None:
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    node_event = next(
        event
        for event in reader.received + list(reader.backend.await_events(1))
        if isinstance(event, NodesSeen)
    )
    assert node_event.nodes[0].free_bytes == (960 * MIB, 448 * MIB)  # told in steps of 64 MiB
    launch = launch_of("greedy", script("wait"), (NodeDevices(node="gpu", devices=(0,)),))
    reader.backend.launch(launch)
    reader.await_start(launch)
    assert first_line(folder_of(embedded.home, launch), 0)["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    embedded.nvml_state.write_text("ok\n1000 900 0 7:900\n1000 500 0 -\n")
    reader.backend.stop(Stop(job_id="greedy", number=1, grace_s=0.0))
    reader.wait(launch, Finished)
    with pytest.raises(AssertionError, match="not within"):
        reader.wait(launch, Released, deadline_s=2.0)
    embedded.nvml_state.write_text("ok\n1000 0 0 -\n1000 500 0 -\n")
    assert reader.wait(launch, Released)


def test_a_driver_that_breaks_while_a_job_runs_ends_nothing_and_is_told_until_it_is_back(
    reader: Reader, embedded: Embedded, nvml_library: Path
) -> None:
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")

    def errors() -> tuple[str, ...]:
        return (
            next(event for event in reversed(reader.received) if isinstance(event, NodesSeen))
            .nodes[0]
            .driver_errors
        )

    launch = launch_of("undriven", script("wait"), (NodeDevices(node="gpu", devices=(0,)),))
    reader.backend.launch(launch)
    reader.await_start(launch)
    begun = len(reader.received)
    for text, expected in (
        ("9\n", ("NVML does not start: Driver Not Loaded",) * 2),
        ("ok\n1000 0 0 -\n1000 500 1 -\n", ("", "GPU is lost")),
        ("ok\n1000 0 0 -\n1000 500 0 -\n", ()),
    ):
        embedded.nvml_state.write_text(text)
        assert until(lambda expected=expected: reader.poll() or errors() == expected, f"{expected}")
    assert {type(event) for event in reader.received[begun:]} == {NodesSeen}, (
        "the job has not ended"
    )
    assert len(alive(descendants_of(folder_of(embedded.home, launch), [0]))) == 1
    reader.backend.stop(Stop(job_id="undriven", number=1, grace_s=0.0))
    reader.wait(launch, Released)


def test_a_driver_that_hangs_is_a_reading_with_an_error_and_leaves_no_process(
    reader: Reader, embedded: Embedded, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    assert reader.poll() is None
    monkeypatch.setattr(agent, "PROBE_TIMEOUT_S", 3.0)
    node_id = next(
        node["NodeID"] for node in ray.nodes() if "gpu" in node["Labels"].get("orc-node", "")
    )
    embedded.nvml_state.write_text("hang\n")
    try:
        reading = agent.AgentCalls().read_devices(node_id, "gpu")
    finally:
        pid = int(Path(f"{embedded.nvml_state}.hangs").read_text())
        embedded.nvml_state.write_text("ok\n1000 0 0 -\n1000 500 0 -\n")
    assert reading.error == "no answer within 3 s"
    assert until(lambda: not alive([pid]), "its process has ended")


def test_what_a_device_holds_beside_the_allocator_is_measured_by_nvml_and_the_rank_together(
    reader: Reader, embedded: Embedded, nvml_library: Path, tmp_path: Path
) -> None:
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    embedded.nvml_state.write_text("ok\n1000 300 0 -\n1000 500 0 -\n")  # a desktop holds 300 MiB
    # the first worker of Ray may start slowly, and a reading that was cut off comes again after 40 s
    until(lambda: reader.poll() or free_of(reader)[0] == 640 * MIB, "the reading", 240.0)
    program = tmp_path / "train.py"
    program.write_text(
        ON_CUDA.format(free=(700 - 200 - 140) * MIB) + f"Device.reserved = {200 * MIB}\ntrain(3)\n"
    )
    spec = script().model_copy(update={"command": ("python", str(program))})
    launch = launch_of("measured", spec, (NodeDevices(node="gpu", devices=(0,)),))
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [0], evidence.ranks
    (beat,) = evidence.heartbeats
    assert beat.allocator_room_bytes is not None
    assert evidence.free_before_bytes == (700 * MIB,)
    assert evidence.free_before_bytes[0] - beat.allocator_room_bytes == 140 * MIB


def test_secrets_reach_the_ranks_and_no_file(
    reader: Reader, embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "never-on-disk-4711-0815"
    monkeypatch.setenv("TEST_SECRET", secret)
    launch = launch_of("discreet", script("exit:0", secrets=("TEST_SECRET",)))
    reader.backend.launch(launch)
    reader.await_end(launch)
    assert first_line(folder_of(embedded.home, launch), 0)["secret_length"] == len(secret)
    files = [path for path in embedded.home.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_taken_devices_are_a_failed_launch_that_leaves_no_group_waiting(reader: Reader) -> None:
    holder, late = launch_of("holder", script("wait")), launch_of("late", script("exit:0"))
    reader.backend.launch(holder)
    reader.await_start(holder)
    reader.backend.launch(late)
    assert "not free" in str(reader.await_end(late).evidence.launch_error)
    assert group_names() & {"late-1"} == set()
    reader.backend.stop(Stop(job_id="holder", number=1, grace_s=0.0))
    reader.await_end(holder)


SERVICE = """
import sys, time
from pathlib import Path
from orchestrator.backends.ray.backend import RayBackend
from tests.backends.ray_jobs import BOTH, CLUSTER, Alone, Reader, launch_of, script
home, address, job_id, *behaviours = sys.argv[1:]
reader = Reader(RayBackend(Path(home), CLUSTER, lambda: address, Alone()))
launch = launch_of(job_id, script(*behaviours, secrets=("TEST_SECRET",)), BOTH)
reader.backend.launch(launch)
reader.await_start(launch)
print("started", flush=True)
time.sleep(300)
"""


def started_by_a_killed_service(embedded: Embedded, job_id: str, *behaviours: str) -> Launch:
    """An attempt whose service was killed by signal 9 right after it had started."""
    arguments = [
        sys.executable,
        "-c",
        SERVICE,
        str(embedded.home),
        embedded.address,
        job_id,
        *behaviours,
    ]
    env, folder = (
        {**os.environ, "TEST_SECRET": "not known to the next service"},
        Path(__file__).parents[2],
    )
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, cwd=folder, env=env
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "started\n"
        service.kill()
    return launch_of(job_id, script(*behaviours, secrets=("TEST_SECRET",)), BOTH)


def test_training_outlives_the_service_and_is_taken_up_again(
    reader: Reader, embedded: Embedded, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    launch = started_by_a_killed_service(
        embedded, "adopted", f"go:{go}", "exit:0", f"go:{go}", "exit:0"
    )
    folder = folder_of(embedded.home, launch)
    pids = [int(str(first_line(folder, rank)["pid"])) for rank in (0, 2)]
    reader.backend.adopt(launch.job, launch.attempt)
    reader.await_start(launch)
    reader.backend.adopt(launch.job, launch.attempt)
    assert alive(pids) == pids
    go.touch()
    evidence = reader.await_end(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [0, 0, 0, 0]
    assert [len(folder.log(rank).read_text().splitlines()) for rank in range(4)] == [
        1,
        1,
        1,
        1,
    ]  # none ran twice
    assert (
        len(
            [
                event
                for event in reader.received
                if isinstance(event, Finished) and event.job_id == "adopted"
            ]
        )
        == 1
    )


def test_what_ended_while_nobody_watched_is_told_later(reader: Reader, embedded: Embedded) -> None:
    launch = started_by_a_killed_service(
        embedded, "unwatched", "exit:0", "exit:3", "wait", "exit:0"
    )
    folder = folder_of(embedded.home, launch)
    until(lambda: folder.exit_code(1).exists(), "rank 1 has ended")
    reader.backend.adopt(launch.job, launch.attempt)
    evidence = reader.await_end(launch).evidence
    assert [end.exit_code for end in evidence.ranks] == [0, 3, -signal.SIGKILL, 0]
    assert evidence.first_ended_rank == 1


@pytest.mark.long
def test_adopting_what_lost_its_launchers_meanwhile_tells_of_lost_nodes(
    reader: Reader, embedded: Embedded
) -> None:
    launch = started_by_a_killed_service(embedded, "bereft", "wait", "wait", "wait", "wait")
    folder = folder_of(embedded.home, launch)
    pids = [int(str(first_line(folder, rank)["pid"])) for rank in range(4)]
    for rank in (0, 2):
        os.kill(parent_of(pids[rank]), signal.SIGKILL)
    until(lambda: not alive(pids), "ranks end with their launchers")
    reader.backend.adopt(launch.job, launch.attempt)
    assert reader.await_end(launch).evidence.nodes_lost == ("n0", "n1")
    assert until(lambda: nothing_is_left(launch), "placement group removed")


def test_the_embedded_cluster_is_private(embedded: Embedded) -> None:
    assert (embedded.home / "ray_token").stat().st_mode & 0o777 == 0o600
    assert embedded.address.startswith("127.0.0.1:")
    state = (embedded.home / "ray.json").read_text()
    port = int(embedded.address.rpartition(":")[2])
    assert str(port) in state
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    listening = {line.split()[1] for lines in tables for line in lines if line.split()[3] == "0A"}
    addresses = {entry.split(":")[0] for entry in listening if int(entry.split(":")[1], 16) == port}
    assert addresses
    assert {entry[-8:] for entry in addresses} == {"0100007F"}, (
        "127.0.0.1, also where it is written as IPv6"
    )


def test_starting_again_keeps_what_runs_and_brings_lost_nodes_back(
    reader: Reader, embedded: Embedded
) -> None:
    launch = launch_of("undisturbed", script("wait"))
    reader.backend.launch(launch)
    reader.await_start(launch)
    nodes = {
        name: pid
        for name, pid, _ in json.loads((embedded.home / "ray.json").read_text())["processes"]
    }
    if nodes["n2"] in alive(list(nodes.values())):  # another test may have ended it
        os.kill(nodes["n2"], signal.SIGKILL)
        until(lambda: not alive([nodes["n2"]]), "n2 is gone")
    assert embedded_ray.start_embedded(embedded.home, CLUSTER) == embedded.address
    again = {
        name: pid
        for name, pid, _ in json.loads((embedded.home / "ray.json").read_text())["processes"]
    }
    assert {name for name in again if again[name] != nodes[name]} == {"n2"}
    until(lambda: "n2" in names_of_last(reader), "n2 is back")
    assert reader.find(launch, Finished) is None
    reader.backend.stop(Stop(job_id="undisturbed", number=1, grace_s=0.0))
    reader.await_end(launch)


def names_of_last(reader: Reader) -> list[str]:
    reader.poll()
    return [
        node.name
        for node in [event for event in reader.received if isinstance(event, NodesSeen)][-1].nodes
    ]


def test_a_dead_address_is_an_error_in_seconds(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(ServiceError, match="no Ray answers"):
        connection.connect_to_ray("127.0.0.1:9", tmp_path)
    assert time.monotonic() - began_s < 10


MEETING = """
import os
import torch

torch.distributed.init_process_group("gloo")
ranks = torch.ones(1)
torch.distributed.all_reduce(ranks)
print(f"rank {os.environ['RANK']} met {int(ranks)} in group {os.environ['GROUP_RANK']}", flush=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.long
def test_torchrun_meets_over_nodes_by_the_placement_and_its_ranks_are_guarded(
    reader: Reader, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(MEETING)
    placement = (NodeDevices(node="n0", devices=(0,)), NodeDevices(node="n1", devices=(0,)))
    spec = script(command="python train.py", launch="torchrun", workdir=str(tmp_path))
    launch = launch_of("meeting", spec, placement)
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    assert [(end.rank, end.exit_code) for end in evidence.ranks] == [(0, 0), (1, 0)], (
        evidence.ranks[0].log_tail
    )
    for rank in (0, 1):
        assert f"rank {rank} met 2 in group {rank}" in evidence.ranks[rank].log_tail
    assert [(beat.rank, beat.steps_done) for beat in evidence.heartbeats] == [(0, 1), (1, 1)]
