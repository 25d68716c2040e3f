"""`orc up`, `down`, `doctor`, `backup` and `restore`: the service of a home folder, and the folder itself."""

# Imports of heavy packages stand in the commands that need them.
from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.service.server.logs import VARIABLE as LOG_FORMAT
from orchestrator.service.server.logs import LogFormat
from orchestrator.service.terminal.options import AsJson, Cluster, Home, connect_client
from orchestrator.service.terminal.output import print_answer, show_spinner
from orchestrator.specs.errors import SpecError
from orchestrator.specs.run import DEFAULT_HOME


def up(
    home: Home = DEFAULT_HOME,
    cluster: Cluster = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Address of a running Ray, as host:port; without it, one is started.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Serve other machines here too, under TLS."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", help="Certificate (PEM); default: one made for trials."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="Its private key (PEM).")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host", metavar="NAME", help="Host name that clients use; repeatable."
        ),
    ] = None,
    trust_users: Annotated[
        bool, typer.Option("--trust-users", help="Let jobs of all users run as the service's user.")
    ] = False,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground", help="Be the service, and log here: for containers and systemd."
        ),
    ] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", envvar="ORC_LOG_FORMAT", help="Format of the service's log."),
    ] = LogFormat.TEXT,
    as_json: AsJson = False,
) -> None:
    """Start the service; without a cluster file on this machine's GPUs, else on two virtual devices."""
    from orchestrator.backends.text_templates import load_text_template
    from orchestrator.service.client.client import read_service_file
    from orchestrator.service.client.endpoint import (
        load_endpoint,
        make_endpoint,
        parse_host_and_port,
    )
    from orchestrator.service.client.join_token import make_join_token
    from orchestrator.service.client.lifecycle import exec_service, start_service
    from orchestrator.service.intake.intake import read_cluster

    home = home.expanduser()
    read_cluster(cluster)
    if ray is not None:
        parse_host_and_port(ray, "--ray", "head:6379")
    os.environ[LOG_FORMAT] = log_format  # the service inherits it
    if listen is None and (tls_cert or tls_key or allowed_hosts or trust_users):
        raise SpecError(
            "say where other machines are served", source="--listen", allowed="HOST:PORT"
        )
    hosts = tuple(allowed_hosts or ())
    endpoint = (
        make_endpoint(home, listen, tls_cert, tls_key, hosts, trusts_users=trust_users)
        if listen
        else None
    )
    if foreground:
        exec_service(home, cluster, ray, endpoint)
    with show_spinner("starting the service"):
        notes = start_service(home, cluster, ray, endpoint)
    with closing(connect_client(home)) as client:
        answer = {
            "started": notes is not None,
            "notes": notes or (),
            **read_service_file(home),
            **client.fetch_cluster(),
        }
    if (served := load_endpoint(home)) is not None:
        answer["listen"] = {
            "host": served.host,
            "port": served.port,
            "fingerprint": served.compute_fingerprint(),
        }
        make_join_token(home, served)
        answer["join"] = {"service": f"{served.address}:{served.port}"}
    text = load_text_template(__package__, "up").render(answer=answer, home=home, served=served)
    print_answer(answer, as_json, text)


def down(
    home: Home = DEFAULT_HOME,
    force: Annotated[
        bool,
        typer.Option("--force", help="Stop while jobs run; they restart at the next `orc up`."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the service, its Ray and its MLflow."""
    from orchestrator.service.client.lifecycle import stop_service

    with show_spinner("stopping the service"):
        stop_service(home.expanduser(), force)
    print_answer(
        {"stopped": True},
        as_json,
        "The service is down. Its queue and records stay in the home folder.",
    )


def doctor(
    home: Home = DEFAULT_HOME,
    repair_rows: Annotated[
        bool, typer.Option("--repair", help="Show the rows of the journal that cannot be read.")
    ] = False,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove",
            metavar="TABLE/ROW",
            help="With --repair: drop such a row for good; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: what is missing, and how to fix it. Exits with 1 where something is."""
    from dataclasses import asdict

    if repair_rows or remove:
        from orchestrator.service.commands.repair import make_unreadable_rows_table, repair_journal

        rows = repair_journal(home.expanduser(), remove or [])
        print_answer({"rows": rows}, as_json, make_unreadable_rows_table(rows))
        raise typer.Exit(bool(rows))
    from orchestrator.service.commands.doctor import BAD, make_findings_table, run_checks

    with show_spinner("checking this machine"):
        checks = run_checks(home.expanduser())
    print_answer(
        {"findings": [asdict(finding) for finding in checks]}, as_json, make_findings_table(checks)
    )
    raise typer.Exit(any(finding.verdict == BAD for finding in checks))


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Archive to write.")],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Back up queue, history, accounts and cluster file, also while jobs run. Checkpoints are not in it."""
    from orchestrator.service.commands.backup import write_backup

    manifest = write_backup(home.expanduser(), file)
    print_answer(
        {"file": str(file), **manifest},
        as_json,
        f"{file} has the home {home} as of {manifest['created_at']}.",
    )


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Archive that `orc backup` wrote.")],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Restore a backup into an empty home. Attempts that ran then count as lost, and their jobs restart."""
    from dataclasses import asdict

    from orchestrator.service.commands.backup import restore_backup as restore_archive

    restored = restore_archive(file, home.expanduser())
    going = len(restored.lost) - len(restored.anew)
    state = f"{home} is as of {restored.created_at}: {restored.queued} queued jobs. Of {len(restored.lost)} that ran, "
    state += f"{going} go on from their own checkpoints, and {len(restored.anew)} begin anew."
    print_answer(asdict(restored), as_json, f"{state} `orc up` goes on.")
