"""Several hosts of their own: one runs the service, another one joins, trains with it, and leaves."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.backends.conftest import nvml_library  # noqa: F401  a fixture
from tests.backends.ray_jobs import until
from tests.hosts import Host, hosts
from tests.service.test_detection import H100

pytestmark = pytest.mark.long
PORT = 8443
JOB_S = 120.0
# Each rank says where it runs, and the gang adds up 1 per rank over the hosts' addresses.
TRAIN = """\
import os, socket, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("rank", os.environ["RANK"], "on", socket.gethostname(), "of", int(one))
dist.destroy_process_group()
"""
WAITS = """\
import pathlib, time
while not pathlib.Path("go").exists():
    time.sleep(0.1)
"""
JOB = """\
name: {name}
command: {python} {script}
workdir: {folder}
global_batch_size: 4
gpus: {gpus}
probe: never
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A host with the service, another host, and the home folder that they share."""

    head: Host
    other: Host
    home: Path

    @property
    def service(self) -> str:
        return f"{self.head.address}:{PORT}"

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes that live, by name."""
        return {node["name"]: node for node in self.head.orc("drain")["nodes"]}

    def submit(self, name: str, script: str, gpus: int) -> str:
        """The id of a job that runs this Python text."""
        folder = self.home.parent
        (folder / f"{name}.py").write_text(script)
        job = JOB.format(
            name=name, python=sys.executable, script=f"{name}.py", folder=folder, gpus=gpus
        )
        (folder / f"{name}.yaml").write_text(job)
        (job_id,) = self.head.orc("submit", str(folder / f"{name}.yaml"))["ids"]
        return str(job_id)

    def ended(self, job_id: str) -> dict[str, Any]:
        """The job once it has ended."""

        def shown() -> dict[str, Any] | None:
            job = self.head.orc("show", job_id)
            return job if job["status"] in ("succeeded", "failed", "cancelled") else None

        return until(shown, f"the end of {job_id}", JOB_S)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with hosts(["h1", "h2"]) as machines:
        head, other = machines["h1"], machines["h2"]
        home = head.shared / "home"
        for host in machines.values():
            host.env |= {
                "ORC_HOME": str(home),
                "OMP_NUM_THREADS": "1",
                "ORC_MLFLOW": "http://127.0.0.1:1",
            }
        up = head.orc("up", "--listen", f"{head.address}:{PORT}")
        assert up["join"]["service"] == f"{head.address}:{PORT}"
        yield Pair(head=head, other=other, home=home)
        head.orc("down", "--force")


@pytest.mark.timeout(600)
def test_a_machine_joins_trains_with_the_head_over_their_addresses_and_leaves(pair: Pair) -> None:
    joined = pair.other.orc("join", pair.service)
    assert (joined["node"], joined["address"], joined["devices"]) == ("h2", pair.other.address, 2)
    assert set(pair.nodes()) == {"virtual", "h2"}
    again = pair.other.orc("join", pair.service)
    assert again == joined

    job = pair.ended(pair.submit("gang", TRAIN, 4))
    assert job["status"] == "succeeded", job
    log = "".join(
        path.read_text() for path in pair.home.glob(f"jobs/{job['id']}/attempts/1/rank*.log")
    )
    ranks = sorted(line.split()[3:] for line in log.splitlines() if line.startswith("rank"))
    assert ranks == [["h1", "of", "4"]] * 2 + [["h2", "of", "4"]] * 2

    shown = pair.head.orc("cluster", "show")["cluster"]
    assert [node["name"] for node in shown["nodes"]] == ["virtual", "h2"]

    assert pair.other.orc("leave")["left"] is True
    assert set(pair.nodes()) == {"virtual"}
    assert pair.other.orc("leave")["left"] is False
    assert pair.head.orc("drain")["drained"] == []
    shown = pair.head.orc("cluster", "show")["cluster"]
    assert [node["name"] for node in shown["nodes"]] == ["virtual"]
    left = pair.other.run("ps", "-eo", "args").stdout
    assert not [line for line in left.splitlines() if "ray" in line.lower()], left


def test_a_machine_leaves_only_when_its_jobs_have_ended_and_force_moves_them(pair: Pair) -> None:
    pair.other.orc("join", pair.service)
    job_id = pair.submit("waits", WAITS, 4)
    until(lambda: pair.nodes()["h2"]["jobs"] == [job_id], "the job on both hosts")
    error = pair.other.orc("leave", "--timeout", "1s", code=1)
    assert f"runs {job_id} after 1 s" in error
    assert pair.nodes()["h2"]["drained"]
    (pair.home.parent / "go").touch()
    assert pair.ended(job_id)["status"] == "succeeded"
    assert pair.other.orc("leave")["left"] is True
    pair.other.orc("join", pair.service)
    assert not pair.nodes()["h2"]["drained"], "who joins again takes jobs"
    (pair.home.parent / "go").unlink()
    alone = pair.submit("again", WAITS, 4)
    until(lambda: pair.nodes()["h2"]["jobs"] == [alone], "the job on both hosts")
    pair.other.orc("leave", "--force")
    assert pair.ended(alone)["status"] == "failed", "no node that stays could ever hold it"
    assert set(pair.nodes()) == {"virtual"}


def test_a_restart_of_the_service_keeps_its_members_and_a_lost_machine_can_be_forgotten(
    pair: Pair,
) -> None:
    pair.other.orc("join", pair.service, "--name", "spare")
    pid = json.loads((pair.home / "service.json").read_text())["pid"]
    pair.head.run("kill", str(pid))
    until(
        lambda: pair.head.run("kill", "-0", str(pid), code=None).returncode != 0,
        "the end of the service",
    )
    pair.head.orc("up")
    assert set(pair.nodes()) == {"virtual", "spare"}
    assert "still runs" in pair.head.orc("leave", "spare", code=1)
    pids = [
        str(pid)
        for _, pid, _ in json.loads((pair.home / "machines" / "spare.json").read_text())[
            "processes"
        ]
    ]
    pair.other.run("kill", "-9", *pids)
    until(lambda: set(pair.nodes()) == {"virtual"}, "the loss of the node")
    assert pair.head.orc("leave", "spare")["left"] is True
    assert "spare" not in (pair.home / "joined.json").read_text()


def test_what_differs_is_said_with_both_values_and_nothing_is_left(pair: Pair) -> None:
    elsewhere = str(pair.home.parent / "empty")
    token = (pair.home / "join_token").read_text()
    secret = {"ORC_JOIN_TOKEN": token, "ORC_HOME": elsewhere}
    error = pair.other.orc("join", pair.service, code=2, env=secret)
    assert elsewhere in error
    assert str(pair.home) in error
    assert "--home" in error
    assert not (pair.home.parent / "empty").exists()
    error = pair.other.orc("join", pair.service, code=2, env={"ORC_HOME": elsewhere})
    assert "no token for joining" in error
    wrong = {"ORC_JOIN_TOKEN": f"orcj_{'x' * 43}{token[token.index('.') :]}"}
    assert "wrong token" in pair.other.orc("join", pair.service, code=1, env=wrong)
    other = {"ORC_JOIN_TOKEN": f"{token.partition('.')[0]}.{'0' * 64}"}
    assert "shows the certificate" in pair.other.orc("join", pair.service, code=1, env=other)
    assert "gives this machine another name" in pair.other.orc(
        "join", pair.service, "--name", "virtual", code=1
    )
    assert set(pair.nodes()) == {"virtual"}


def test_the_service_of_a_shared_home_is_left_alone_by_other_machines(pair: Pair) -> None:
    for command in (("up",), ("down",), ("down", "--force")):
        assert f"runs on the machine {pair.head.address}" in pair.other.orc(*command, code=1)
    assert pair.head.orc("up")["started"] is False


def test_no_token_is_in_a_process_list_and_a_new_one_ends_the_old_one(pair: Pair) -> None:
    old = (pair.home / "join_token").read_text()
    assert (pair.home / "join_token").stat().st_mode & 0o077 == 0
    pair.other.orc("join", pair.service)
    secrets = [
        (pair.home / name).read_text().partition(".")[0]
        for name in ("join_token", "ray_token", "token")
    ]
    for host in (pair.head, pair.other):
        listed = host.run("ps", "-eo", "args").stdout
        assert not [secret for secret in secrets if secret in listed]
    assert pair.other.orc("leave")["left"] is True
    assert pair.head.orc("token", "join", "--renew")["token"] != old
    assert "wrong token" in pair.other.orc(
        "join", pair.service, code=1, env={"ORC_JOIN_TOKEN": old}
    )


def test_a_machine_with_cards_joins_one_without_and_brings_its_own_kind(
    pair: Pair,
    nvml_library: Path,  # noqa: F811
) -> None:
    if not any(nvml_library.iterdir()):
        pytest.skip("no C compiler: the fake libnvidia-ml.so.1 cannot be built")
    folder = pair.home.parent / "nvml"
    shutil.copytree(nvml_library, folder)
    (folder / "state").write_text(f"ok\n{H100}\n{H100}\n")
    nvml = {
        "LD_LIBRARY_PATH": str(folder),
        "NVIDIA_FAKE_STATE": str(folder / "state"),
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    joined = pair.other.orc("join", pair.service, "--name", "cards", env=nvml)
    assert joined["notes"] == ["Found 2 x NVIDIA H100 80GB HBM3, taken as h100-80gb."]
    until(
        lambda: sum(pair.nodes()["cards"]["free_bytes"]) > 2 * 78 * 2**30,
        "what is free, as NVML tells on that host",
    )
    assert pair.nodes()["virtual"]["device"]["kind"] == "virtual"
    changed = pair.other.orc(
        "join", pair.service, "--name", "cards", code=1, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert "the devices of node cards have changed" in changed
    assert pair.other.orc("leave", "cards")["left"] is True


def test_the_file_that_is_shown_is_what_the_service_takes_and_members_join_it_again(
    pair: Pair,
) -> None:
    pair.other.orc("join", pair.service)
    shown = pair.head.run(sys.executable, "-m", "orchestrator.cli", "cluster", "show").stdout
    assert "name: h2" in shown
    file = pair.home.parent / "my.yaml"
    file.write_text(shown)
    pair.head.orc("down")
    up = pair.head.orc("up", "--cluster", str(file), "--listen", pair.service)
    assert [node["name"] for node in up["nodes"]] == ["virtual"], (
        "the other one is not started here"
    )
    pair.other.orc("join", pair.service)
    assert set(pair.nodes()) == {"virtual", "h2"}
    assert pair.head.orc("up", "--cluster", str(file), "--listen", pair.service)["started"] is False
    assert pair.other.orc("leave")["left"] is True
