"""Commands about a cluster: its hardware, how a machine joins, drains and leaves, and the shares of teams."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.run import DEFAULT_HOME
from orchestrator.specs.units import parse_seconds

clusters = typer.Typer(no_args_is_help=True, help="Hardware of the service.")


@clusters.command("show")
def show_cluster(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Print the cluster file of the home; before the first `orc up`, what is found on this machine.

    Present problems of the service, such as devices that the driver cannot read, stand above it as comments.
    """
    from orchestrator.service.client.lifecycle import find_cluster_and_notes
    from orchestrator.service.intake.cluster_file import format_cluster

    cluster, notes = find_cluster_and_notes(home.expanduser())
    notes = (*notes, *_list_service_problems(home))
    if as_json:
        print_answer({"cluster": cluster.model_dump(mode="json"), "notes": notes}, as_json, "")
    else:
        sys.stdout.write(format_cluster(cluster, notes))


def _list_service_problems(home: Path) -> tuple[str, ...]:
    """Return sentences on what is wrong with the home's service now; () if it does not answer."""
    try:
        return tuple(connect_client(home).fetch_cluster()["problems"])
    except ServiceError:
        return ()


def join(
    service: Annotated[
        str,
        typer.Argument(metavar="HOST:PORT", help="Address of the service, as `orc up` prints it."),
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="File with the token; default: ORC_JOIN_TOKEN, else the home's."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the node; default: the host's.")
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Add this machine with its devices to the service of another machine. The home folder is shared storage."""
    from orchestrator.service.commands.join import join_service as join_service
    from orchestrator.service.intake.detection import make_local_node_name

    answer = join_service(home.expanduser(), service, name or make_local_node_name(), token_file)
    text = f"{answer['node']} has joined at {answer['address']} with {answer['devices']} devices. "
    notes = "".join(f"{note}\n" for note in answer["notes"])
    print_answer(answer, as_json, f"{notes}{text}`orc leave` takes it away.")


def leave(
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE", help="Node to forget, whose machine is gone; default: this machine."
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", help="Longest wait for running jobs.")
    ] = "10min",
    force: Annotated[
        bool, typer.Option("--force", help="Do not wait; jobs on it restart elsewhere.")
    ] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Take this machine out of the service: drain it, wait for its jobs, stop its Ray."""
    from orchestrator.service.commands.join import leave_service as leave_service
    from orchestrator.service.intake.detection import make_local_node_name

    try:
        timeout_s = parse_seconds(timeout)
    except ValueError as error:
        raise SpecError(str(error), source="--timeout", got=timeout) from None
    name = node or make_local_node_name()
    was_in = leave_service(home.expanduser(), name, timeout_s, force=force)
    print_answer(
        {"node": name, "left": was_in},
        as_json,
        f"{name} has left." if was_in else f"{name} was not in.",
    )


def join_token(
    renew: Annotated[
        bool, typer.Option("--renew", help="Make another one; the old one joins nothing.")
    ] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Print the token with which machines join. It is in the home folder, too, readable by its owner."""
    from orchestrator.service.client.endpoint import load_endpoint
    from orchestrator.service.client.join_token import make_join_token

    home = home.expanduser()
    endpoint = load_endpoint(home)
    if endpoint is None:
        raise ServiceError("no machine can join: start the service by `orc up --listen HOST:PORT`")
    token = make_join_token(home, endpoint, renew=renew)
    print_answer({"token": token}, as_json, token)


def drain(
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE", help="Node to drain; without it, the state of every node is shown."
        ),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the node take new attempts again.")
    ] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Drain a node: it takes no new attempt, and running ones go on. Shows the jobs on each node."""
    from orchestrator.service.terminal.tables import make_nodes_table

    client = connect_client(home)
    if node is not None:
        client.drain_node(node, undo=undo)
    elif undo:
        raise SpecError("say which node shall take again what comes", path="NODE")
    live = client.fetch_cluster()
    answer = {name: live[name] for name in ("nodes", "drained")}
    print_answer(answer, as_json, make_nodes_table(live["nodes"], live["drained"]))


def teams(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show shares, use, quotas, running and waiting devices of each team and user."""
    from orchestrator.service.terminal.tables import make_teams_table

    shared = connect_client(home).list_teams()
    message = "Nothing is shared: the cluster file's `policy` names no teams."
    print_answer({"teams": shared}, as_json, make_teams_table(shared) if shared else message)
