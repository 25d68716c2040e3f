"""Commands about the machines of a cluster: what hardware there is."""

from __future__ import annotations

import sys

import typer

from orchestrator.service.server.logins import DEFAULT_HOME
from orchestrator.service.terminal.options import AsJson, Home
from orchestrator.service.terminal.output import tell

clusters = typer.Typer(no_args_is_help=True, help="Hardware of the service.")


@clusters.command("show")
def show_cluster(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Print the cluster file of the home; before the first `orc up`, what is found on this machine."""
    from orchestrator.service.server.cluster_file import cluster_text
    from orchestrator.service.server.lifecycle import world_of

    cluster, notes = world_of(home.expanduser())
    if as_json:
        tell({"cluster": cluster.model_dump(mode="json"), "notes": notes}, as_json, "")
    else:
        sys.stdout.write(cluster_text(cluster, notes))
