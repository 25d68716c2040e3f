"""Several hosts of their own: one runs the service, another one joins, trains with it, and leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.backends.ray_jobs import until
from tests.hosts import Host, hosts

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
        job = JOB.format(name=name, python=sys.executable, script=f"{name}.py", folder=folder, gpus=gpus)
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
    with hosts(["h1", "h2"]) as found:
        head, other = found["h1"], found["h2"]
        home = head.shared / "home"
        for host in found.values():
            host.env |= {"ORC_HOME": str(home), "OMP_NUM_THREADS": "1"}
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
    log = "".join(path.read_text() for path in pair.home.glob(f"jobs/{job['id']}/attempts/1/rank*.log"))
    said = sorted(line.split()[3:] for line in log.splitlines() if line.startswith("rank"))
    assert said == [["h1", "of", "4"]] * 2 + [["h2", "of", "4"]] * 2

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
