"""Laws of machines that join: who may, what they have in common, and what is kept of them. Starts no Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from orchestrator.service.client.join_token import FILE, split_secret_and_fingerprint
from orchestrator.service.intake.cluster_file import load_cluster, select_nodes_of_this_machine
from orchestrator.service.intake.intake import read_cluster
from orchestrator.service.server.members import (
    MachineProperties,
    Members,
    check_compatible,
    read_machine_properties,
)
from orchestrator.service.server.routes.api import JOINING, ROLES, create_app
from orchestrator.specs.access import Role
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.errors import ServiceError, SpecError, UnknownError
from orchestrator.specs.parse import parse_cluster
from tests.service.services import service_of
from tests.service.worlds import World

SECRET = "orcj_" + "s" * 43
TWO = "name: two\nnodes:\n- {name: n, count: 2, devices: 8, device: h100-80gb, host_memory: 1TiB}\n"


def node(name: str, devices: int = 2) -> NodeSpec:
    return read_cluster(None).nodes[0].model_copy(update={"name": name, "devices": devices})


class Joined:
    """A service's members over a home, and what the service was told."""

    def __init__(
        self, home: Path, cluster: ClusterSpec | None = None, ray_address: str = "10.0.0.1:6379"
    ) -> None:
        self.live: dict[str, str] = {}
        self.told: list[ClusterSpec] = []
        spec = cluster or read_cluster(None)
        self.members = Members(home, spec, lambda: ray_address, lambda: self.live, self.told.append)


def names(cluster: ClusterSpec) -> list[str]:
    return [name for node_spec in cluster.nodes for name in node_spec.names]


def test_a_member_is_declared_at_once_and_after_a_restart_until_it_leaves(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.members.add_machine(node("a"), "10.0.0.2")
    joined.members.add_machine(node("a"), "10.0.0.2")
    assert [names(cluster) for cluster in joined.told] == [["virtual", "a"]]
    assert names(load_cluster(tmp_path)) == ["virtual", "a"]
    joined.live = {"a": "10.0.0.2"}
    with pytest.raises(ServiceError, match="a still runs"):
        joined.members.remove_machine("a")
    joined.live = {}
    joined.members.remove_machine("a")
    joined.members.add_machine(node("b"), "10.0.0.3")
    with pytest.raises(UnknownError, match=r"no machine 'a' has joined; those that have: b"):
        joined.members.remove_machine("a")
    joined.members.remove_machine("b")
    assert names(load_cluster(tmp_path)) == names(joined.told[-1]) == ["virtual"]


def test_a_name_is_of_one_machine_and_a_node_that_runs_keeps_its_devices(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.members.add_machine(node("a"), "10.0.0.2")
    joined.live = {"a": "10.0.0.2"}
    with pytest.raises(ServiceError, match=r"at 10.0.0.2: `orc join --name NAME`"):
        joined.members.add_machine(node("a"), "10.0.0.3")
    with pytest.raises(ServiceError, match="have changed"):
        joined.members.add_machine(node("a", 4), "10.0.0.2")
    joined.live = {}
    joined.members.add_machine(node("a", 4), "10.0.0.2")
    assert joined.told[-1].nodes[-1].devices == 4


def test_a_node_that_the_file_names_is_as_the_file_says_and_must_have_that(tmp_path: Path) -> None:
    joined = Joined(tmp_path, parse_cluster(TWO, "two"))
    with pytest.raises(
        ServiceError, match=r"says that n1 has 8 x h100-80gb; the machine has 2 x virtual-256MiB"
    ):
        joined.members.add_machine(node("n1"), "10.0.0.2")
    node_spec = parse_cluster(TWO, "two").nodes[0].model_copy(update={"name": "n1", "count": 1})
    joined.members.add_machine(node_spec, "10.0.0.2")
    assert names(joined.told[-1]) == ["n0", "n1"]


def test_on_the_loopback_no_machine_joins(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="orc up --listen"):
        Joined(tmp_path, ray_address="127.0.0.1:6379").members.add_machine(node("a"), "10.0.0.2")


def test_of_nodes_with_gpus_the_one_of_this_name_is_here_and_members_are_not() -> None:
    two = parse_cluster(TWO, "two")
    assert names(select_nodes_of_this_machine(two, (), "n1")) == ["n1"]
    with pytest.raises(SpecError, match="no node is this machine"):
        select_nodes_of_this_machine(two, (), "elsewhere")
    away = two.nodes[0].model_copy(update={"name": "n1", "count": 1})
    assert names(select_nodes_of_this_machine(two, (away,), "elsewhere")) == ["n0"], (
        "the only one that is left"
    )
    assert names(select_nodes_of_this_machine(read_cluster(None), (), "any")) == ["virtual"]


@pytest.mark.parametrize("name", ["python", "interpreter", "ray", "orchestrator", "home"])
def test_each_difference_is_an_error_with_both_values(tmp_path: Path, name: str) -> None:
    here = read_machine_properties(tmp_path)
    service = replace(here, **{name: "what-the-service-has"})
    with pytest.raises(SpecError) as refused:
        check_compatible(service, here)
    assert "what-the-service-has" in str(refused.value)
    assert repr(getattr(here, name)) in str(refused.value)
    assert "to do:" in str(refused.value)


def test_another_folder_at_the_same_path_is_seen(tmp_path: Path) -> None:
    service: MachineProperties = replace(
        read_machine_properties(tmp_path), home_mark="of the service"
    )
    with pytest.raises(SpecError, match="the service's home is not here"):
        check_compatible(service, read_machine_properties(tmp_path))
    (tmp_path / "token").write_text("another one")
    with pytest.raises(SpecError, match="this folder is not the service's home"):
        check_compatible(service, read_machine_properties(tmp_path))
    check_compatible(read_machine_properties(tmp_path), read_machine_properties(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "orc_x", "orcj_x", f"{SECRET}.{'g' * 64}", f"{SECRET}.{'0' * 63}"]
)
def test_what_is_no_token_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(SpecError) as refused:
        split_secret_and_fingerprint(text)
    assert not text or text not in str(refused.value)
    assert split_secret_and_fingerprint(f" {SECRET}.{'0' * 64}\n") == (SECRET, f"sha256:{'0' * 64}")


def test_the_token_of_joining_machines_admits_to_nothing_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / FILE).write_text(f"{SECRET}.{'0' * 64}")
    joined = Joined(tmp_path)
    app = create_app(service_of(world.controller, world.journal, tmp_path, members=joined.members))

    def client(token: str) -> TestClient:
        headers = {"Authorization": f"Bearer {token}"}
        return TestClient(
            app, base_url="http://127.0.0.1:8000", headers=headers, raise_server_exceptions=False
        )

    machine_client = client(SECRET)
    assert client(f"{SECRET}x").get("/join").status_code == 401
    assert machine_client.get("/join").json()["ray_address"] == "10.0.0.1:6379"
    filled = {"job_id": "a", "sweep_id": "a", "number": 1, "node": "n", "digest": "0" * 64}
    for method, path in set(ROLES) - JOINING:
        assert machine_client.request(method, path.format(**filled)).status_code == 403, path
    for method, path in (
        ("POST", "/shutdown"),
        ("GET", "/tokens"),
        ("PUT", "/users/ada"),
        ("GET", "/audit"),
    ):
        assert machine_client.request(method, path).status_code == 403, path
    body = {"node": node("a").model_dump(mode="json"), "address": "10.0.0.2"}
    for role in (Role.VIEWER, Role.MEMBER):
        world.accounts.set_user("ada", role)
        secret, _ = world.accounts.create_token("ada", None)
        assert client(secret).post("/nodes", json=body).status_code == 403, role
    assert machine_client.post("/nodes", json=body).status_code == 200
    bad = machine_client.post("/nodes", json={**body, "node": {"name": "a", "devicez": 2}})
    assert bad.status_code == 422
    assert "devicez" in bad.json()["error"]
    assert names(load_cluster(tmp_path)) == ["virtual", "a"]
    assert machine_client.delete("/nodes/a").status_code == 200
    (tmp_path / FILE).unlink()
    assert machine_client.get("/join").status_code == 401
    world.journal.close()


def test_a_service_with_a_ray_of_ones_own_takes_no_machine(tmp_path: Path) -> None:
    world = World(tmp_path)
    answer = world.client.get("/join")
    assert answer.status_code == 409
    assert "ray start" in answer.json()["error"]
    world.journal.close()
