"""`orc join` and `orc leave`, run on the machine that joins or leaves."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.service.client.client import Client
from orchestrator.service.client.endpoint import (
    find_local_address_towards,
    load_endpoint,
    parse_host_and_port,
)
from orchestrator.service.client.join_token import FILE as TOKEN_FILE
from orchestrator.service.client.join_token import FORM, split_secret_and_fingerprint
from orchestrator.service.client.logins import Login, fetch_pinned_certificate, find_login
from orchestrator.service.intake.cluster_file import load_joined_nodes
from orchestrator.service.intake.detection import detect_machine
from orchestrator.service.server.members import (
    MachineProperties,
    check_compatible,
    read_machine_properties,
)
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.json_object import JsonObject

# the service looks at its nodes every second; a busy machine's raylet takes some more
SEEN_TIMEOUT_S = 60.0
# a raylet that ends says so; one that is cut off counts as lost after 4 to 9 s
GONE_TIMEOUT_S = 60.0
POLL_S = 0.5
TOKEN_VARIABLE = "ORC_JOIN_TOKEN"


def join_service(
    home: Path, service_address: str, node_name: str, token_file: Path | None
) -> JsonObject:
    """Add this machine as a node to the service at HOST:PORT; return a JSON object with its devices
    and notes.

    A machine that already joined stays. Raises SpecError where it is incompatible with the service
    or its devices make no node, and ServiceError where the service refuses or Ray does not start.
    After an error nothing is left on the machine.
    """
    host, port = parse_host_and_port(service_address)
    with closing(Client(_find_login(home, service_address, token_file))) as client:
        requirements = client.fetch_join_information()
        check_compatible(
            MachineProperties(**requirements["machine"]), read_machine_properties(home)
        )
        machine_here = detect_machine(node_name)
        was_in = embedded_ray.is_running(home, node_name)
        address = find_local_address_towards(host, port)
        client.add_node(machine_here.node.model_dump(mode="json"), address)
        try:
            embedded_ray.join_embedded(
                home, node_name, machine_here.node, requirements["ray_address"], address
            )
            _wait_for_node(client, node_name)
        except (ServiceError, KeyboardInterrupt):
            if not was_in:
                embedded_ray.stop_embedded(
                    home, record_file_name=embedded_ray.record_file_name(node_name)
                )
                _remove_from_service(client, node_name, GONE_TIMEOUT_S)
            raise
    return {
        "node": node_name,
        "address": address,
        "devices": machine_here.node.devices,
        "notes": machine_here.notes,
    }


def leave_service(home: Path, node_name: str, timeout_s: float, *, force: bool) -> bool:
    """Remove this node from the service: drain it, wait for its jobs, stop its Ray; return whether
    it had joined.

    Raises ServiceError where jobs still run after `timeout_s` without `force`: the node then stays
    drained. A node of another machine is only removed from the list, and only where it no longer
    runs.
    """
    endpoint = load_endpoint(home)
    record = embedded_ray.record_file_name(node_name)
    if endpoint is None:
        raise ServiceError(
            f"{home} is no home that machines have joined: `--home`, ORC_HOME name the shared one"
        )
    was_in = node_name in {node.name for node in load_joined_nodes(home)}
    is_here = embedded_ray.is_running(home, node_name)
    try:
        with closing(
            Client(_find_login(home, f"{endpoint.address}:{endpoint.port}", None))
        ) as client:
            if is_here:
                client.drain_node(node_name, undo=False)
                _wait_until_empty(client, node_name, timeout_s, force=force)
                embedded_ray.stop_embedded(home, record_file_name=record)
            if was_in:
                _remove_from_service(client, node_name, GONE_TIMEOUT_S if is_here else 0.0)
        embedded_ray.stop_embedded(home, record_file_name=record)  # what one that died here left
    finally:
        if force and is_here:  # also where the service does not answer
            embedded_ray.stop_embedded(home, record_file_name=record)
    return was_in


def _find_login(home: Path, service: str, token_file: Path | None) -> Login:
    """Return the login for the service, made from a token for joining, else as `orc login` stored
    it.
    """
    url = f"https://{service}"
    token = os.environ.get(TOKEN_VARIABLE) or _read_token_file(
        token_file or home / TOKEN_FILE, must_exist=token_file is not None
    )
    if token:
        secret, fingerprint = split_secret_and_fingerprint(token)
        return Login(url=url, token=secret, certificate=fetch_pinned_certificate(url, fingerprint))
    try:
        return find_login(url)
    except ServiceError:
        raise SpecError(
            "no token for joining",
            source="orc join",
            allowed=FORM,
            hint=f"put it into a file for --token-file, or into {TOKEN_VARIABLE}; the shared home has it, too",
        ) from None


def _read_token_file(path: Path, *, must_exist: bool) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        if must_exist:
            raise SpecError(f"cannot be read: {error.strerror}", source=str(path)) from None
        return ""


def _wait_for_node(client: Client, node_name: str) -> None:
    deadline_s = time.monotonic() + SEEN_TIMEOUT_S
    while node_name not in {node["name"] for node in client.fetch_cluster()["nodes"]}:
        if time.monotonic() > deadline_s:
            raise ServiceError(
                f"the service did not see node {node_name} within {SEEN_TIMEOUT_S:.0f} s"
            )
        time.sleep(POLL_S)


def _wait_until_empty(client: Client, node_name: str, timeout_s: float, *, force: bool) -> None:
    """Wait until no job uses a device of the node; return at once with `force`. Raises ServiceError
    after `timeout_s`.
    """
    deadline_s = time.monotonic() + (0.0 if force else timeout_s)
    while jobs := [
        job
        for node in client.fetch_cluster()["nodes"]
        if node["name"] == node_name
        for job in node["jobs"]
    ]:
        if time.monotonic() > deadline_s:
            if force:
                return
            raise ServiceError(
                f"{node_name} is drained, but runs {', '.join(jobs)} after {timeout_s:.0f} s: `orc leave` again "
                "waits on, `orc leave --force` ends them, and they restart elsewhere from their newest checkpoint"
            )
        time.sleep(POLL_S)


def _remove_from_service(client: Client, node_name: str, timeout_s: float) -> None:
    """Remove the node from the service's list as soon as the service has seen that its Ray ended.

    Raises ServiceError after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            client.remove_node(node_name)
        except ServiceError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)
        else:
            return
