"""The commands. Each reads its input, asks the service or the planner, prints the answer, and says how it went.

Exit codes: 0 done, 1 it failed (or the job did), 2 bad input: nothing was stored or started.
"""

# Imports of heavy packages stand in the commands that need them: `orc plan` answers within a second.
from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.demo.command import demo
from orchestrator.service.server.logins import DEFAULT_HOME
from orchestrator.service.server.logs import VARIABLE as LOG_FORMAT
from orchestrator.service.server.logs import LogFormat
from orchestrator.service.terminal import (
    access,
    browse,
    comparing,
    diagnosis,
    forecast,
    machines,
    notify,
    planning,
    purge,
    report,
    simulation,
    verbs,
    watch,
)
from orchestrator.service.terminal.command_group import Commands
from orchestrator.service.terminal.completion import job_ids
from orchestrator.service.terminal.options import SERVER, AsJson, Cluster, Home, Pinned, Settings, client_of, service_of
from orchestrator.service.terminal.output import console_on, show_spinner, tell
from orchestrator.specs.errors import GIVEN_MAX, IllegalPlan, OrchestratorError, SpecError, error_view
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.plain_text import why_no_text
from orchestrator.specs.units import format_bytes

if TYPE_CHECKING:
    from orchestrator.service.server.endpoint import Endpoint

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plans, places, recovers and compares GPU training jobs by the memory they need.",
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="Job file (YAML).")]
JobId = Annotated[
    str, typer.Argument(metavar="JOB", help="Id of the job, as `orc queue` shows it.", autocompletion=job_ids)
]


# commands about the home folder itself
ON_THIS_MACHINE = ("demo", "up", "down", "doctor", "replay", "backup", "restore", "cluster", "join", "leave")


class SchemaName(StrEnum):
    """What `orc schema` can describe."""

    JOB = "job"
    CLUSTER = "cluster"


def _say_version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        print(f"orc {version('orchestrator')}")
        raise typer.Exit


@app.callback()
def before_a_command(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", envvar="ORC_SERVER", metavar="URL", help="Service of another machine; see `orc login`."
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Say the version, and end.")
    ] = False,
) -> None:
    """What stands before the command."""
    if server and context.invoked_subcommand in ON_THIS_MACHINE:
        raise SpecError(
            f"`orc {context.invoked_subcommand}` works on this machine alone", source="--server", got=server
        )
    SERVER.set(server or None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ends the process with its exit code."""
    command_line = sys.argv[1:] if arguments is None else list(arguments)
    try:
        for word in command_line:
            if why := why_no_text(word):
                raise SpecError(why, source="the command line", got=word[:GIVEN_MAX], allowed="text in UTF-8")
        app(args=arguments)
    except OrchestratorError as error:
        print(json.dumps(error_view(error)) if "--json" in command_line else error, file=sys.stderr)
        sys.exit(2 if isinstance(error, SpecError | IllegalPlan) else 1)


# ------------------------------------------------------------------------------------------------------- the service


@app.command()
def up(
    home: Home = DEFAULT_HOME,
    cluster: Cluster = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Address of a running Ray, as host:port; without it, one is started."
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Serve other machines here too, under TLS.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Certificate (PEM); default: one made for trials.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option("--allowed-host", metavar="NAME", help="Host name that clients use; repeatable.")
    ] = None,
    trust_users: Annotated[
        bool, typer.Option("--trust-users", help="Let jobs of all users run as the service's user.")
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Be the service, and log here: for containers and systemd.")
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", envvar="ORC_LOG_FORMAT", help="Format of the service's log.")
    ] = LogFormat.TEXT,
    as_json: AsJson = False,
) -> None:
    """Start the service; without a cluster file on this machine's GPUs, else on two virtual devices."""
    from orchestrator.service.server.client import service_file
    from orchestrator.service.server.endpoint import load_endpoint, make_endpoint, parse_listen
    from orchestrator.service.server.intake import read_cluster
    from orchestrator.service.server.join_token import make_join_token
    from orchestrator.service.server.lifecycle import become, start

    home = home.expanduser()
    read_cluster(cluster)
    if ray is not None:
        parse_listen(ray, "--ray", "head:6379")
    os.environ[LOG_FORMAT] = log_format  # the service inherits it
    if listen is None and (tls_cert or tls_key or allowed_hosts or trust_users):
        raise SpecError("say where other machines are served", source="--listen", allowed="HOST:PORT")
    hosts = tuple(allowed_hosts or ())
    endpoint = make_endpoint(home, listen, tls_cert, tls_key, hosts, trusts_users=trust_users) if listen else None
    if foreground:
        become(home, cluster, ray, endpoint)
    with show_spinner("starting the service"):
        notes = start(home, cluster, ray, endpoint)
    with closing(client_of(home)) as client:
        answer = {"started": notes is not None, "notes": notes or (), **service_file(home), **client.cluster()}
    if (served := load_endpoint(home)) is not None:
        answer["listen"] = {"host": served.host, "port": served.port, "fingerprint": served.fingerprint()}
        make_join_token(home, served)
        answer["join"] = {"service": f"{served.address}:{served.port}"}
    state = "is up" if notes is not None else "was up already"
    nodes = sum(len(node["free_bytes"]) for node in answer["nodes"])
    records = ", ".join(f"{name} at {address}" for name, address in answer["trackers"].items())
    tell(
        answer,
        as_json,
        "".join(f"{note}\n" for note in notes or ())
        + "".join(f"{problem}.\n" for problem in answer["problems"])
        + f"The service {state}: {answer['name']}, {nodes} devices. Records: {records}. Home: {home}"
        + f"\nPages: http://127.0.0.1:{answer['port']}, with the token in {home / 'token'}"
        + (_reachable(served) if served is not None else ""),
    )


@app.command()
def down(
    home: Home = DEFAULT_HOME,
    force: Annotated[
        bool, typer.Option("--force", help="Stop while jobs run; they restart at the next `orc up`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the service, its Ray and its MLflow."""
    from orchestrator.service.server.lifecycle import stop

    with show_spinner("stopping the service"):
        stop(home.expanduser(), force)
    tell({"stopped": True}, as_json, "The service is down. Its queue and records stay in the home folder.")


@app.command()
def doctor(
    home: Home = DEFAULT_HOME,
    repair_rows: Annotated[
        bool, typer.Option("--repair", help="Show the rows of the journal that cannot be read.")
    ] = False,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="TABLE/ROW", help="With --repair: drop such a row for good; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: what is missing, and how to fix it. Exits with 1 where something is."""
    from dataclasses import asdict

    if repair_rows or remove:
        from orchestrator.service.commands.repair import repair, rows_table

        rows = repair(home.expanduser(), remove or [])
        tell({"rows": rows}, as_json, rows_table(rows))
        raise typer.Exit(bool(rows))
    from orchestrator.service.commands.doctor import BAD, findings, findings_table

    with show_spinner("checking this machine"):
        checks = findings(home.expanduser())
    tell({"findings": [asdict(finding) for finding in checks]}, as_json, findings_table(checks))
    raise typer.Exit(any(finding.verdict == BAD for finding in checks))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Archive to write.")],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Back up queue, history, accounts and cluster file, also while jobs run. Checkpoints are not in it."""
    from orchestrator.service.commands.backup import back_up

    manifest = back_up(home.expanduser(), file)
    tell({"file": str(file), **manifest}, as_json, f"{file} has the home {home} as of {manifest['created_at']}.")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Archive that `orc backup` wrote.")],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Restore a backup into an empty home. Attempts that ran then count as lost, and their jobs restart."""
    from dataclasses import asdict

    from orchestrator.service.commands.backup import restore as restore_archive

    restored = restore_archive(file, home.expanduser())
    state = f"{home} is as of {restored.created_at}: {restored.queued} queued jobs, {len(restored.lost)} lost attempts."
    tell(asdict(restored), as_json, f"{state} `orc up` goes on.")


# ---------------------------------------------------------------------------------------------------------- the jobs


@app.command()
def submit(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Job files (YAML).")],
    settings: Settings = None,
    pins: Pinned = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Submit jobs to the queue, all or none. Exits with 1 where a job or its guarantee is refused."""
    from orchestrator.service.server.intake import read_overrides, read_pins
    from orchestrator.service.server.sending import read_jobs_for
    from orchestrator.service.terminal.tables import promise_words
    from orchestrator.specs.job.sweep import SWEEP

    specs = read_jobs_for(service_of(home), files, (*read_overrides(settings or []), *read_pins(pins)), home)
    client = client_of(home)
    batch = client.submit_all([spec.model_dump(mode="json") for spec in specs])
    ids, promises, refused = batch["ids"], batch["promises"], batch["refused"]
    sweeps = [f"{SWEEP}{job_id}" for job_id, spec in zip(ids, specs, strict=True) if spec.trial is not None]
    shown_ids = [f"{SWEEP}{job_id}" if f"{SWEEP}{job_id}" in sweeps else job_id for job_id in ids]
    tell({**batch, "sweeps": sweeps}, as_json, "\n".join(shown_ids))
    for job_id, message in batch["late"].items():
        print(f"{job_id} {message}", file=sys.stderr)
    for job_id, promise in promises.items():
        print(f"{job_id} {promise_words(promise)}", file=sys.stderr)
    for job_id, reason in refused.items():
        print(f"{job_id} was refused: {reason}", file=sys.stderr)
    raise typer.Exit(bool(refused) or any(promise["refused"] for promise in promises.values()))


@app.command()
def run(file: JobFile, settings: Settings = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Submit a job, show its progress to the end, and exit with its result. Starts a service that is down."""
    from orchestrator.service.server.intake import read_overrides
    from orchestrator.service.server.sending import read_jobs_for
    from orchestrator.service.terminal.follow import run_to_end

    (spec,) = read_jobs_for(service_of(home), [file], read_overrides(settings or []), home, only_one=True)
    raise typer.Exit(run_to_end(spec, None, service_of(home), as_json))


@app.command()
def rehearse(
    file: JobFile,
    fail: Annotated[FaultKind, typer.Option("--fail", help="Failure to inject into the first attempt.")],
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank that fails, counted from 0.")] = 0,
    step: Annotated[
        int, typer.Option("--step", min=1, help="Optimizer step before whose end it fails, counted from 1.")
    ] = 1,
    settings: Settings = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Inject a failure into the first attempt of a job, and follow its recovery."""
    from orchestrator.service.server.intake import read_overrides
    from orchestrator.service.server.sending import read_jobs_for
    from orchestrator.service.terminal.follow import run_to_end

    (spec,) = read_jobs_for(service_of(home), [file], read_overrides(settings or []), home, only_one=True)
    if rank >= spec.gpus.max:
        allowed = f"0 to {spec.gpus.max - 1}: the job takes {spec.gpus.max} gpus at most"
        raise SpecError("the job never has this rank", source="--rank", got=rank, allowed=allowed)
    if not spec.is_script and step > spec.training.max_steps:
        allowed = f"1 to training.max_steps={spec.training.max_steps}"
        raise SpecError("the job ends before this step", source="--step", got=step, allowed=allowed)
    raise typer.Exit(run_to_end(spec, Fault(kind=fail, rank=rank, step=step), service_of(home), as_json))


app.command()(verbs.queue)


@app.command()
def teams(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show shares, use, quotas, running and waiting devices of each team and user."""
    from orchestrator.service.views.teams import teams_table

    shared = client_of(home).teams()
    message = "Nothing is shared: the cluster file's `policy` names no teams."
    tell({"teams": shared}, as_json, teams_table(shared) if shared else message)


@app.command()
def show(job_id: JobId, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show everything about one job: attempts, changes, predicted and measured peaks, failures; or a sweep's trials."""
    from orchestrator.service.terminal.sweep_tables import sweep_panel
    from orchestrator.service.terminal.tables import job_panel
    from orchestrator.specs.job.sweep import SWEEP

    client = client_of(home)
    if job_id.startswith(SWEEP) and any(sweep["id"] == job_id for sweep in client.sweeps()):
        sweep = client.sweep(job_id)
        tell(dict(sweep), as_json, sweep_panel(sweep))
        return
    job, _ = client.job(job_id)
    tell(dict(job), as_json, job_panel(job, console_on(sys.stdout).width))


@app.command()
def explain(job_id: JobId, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Explain a job: what would start it sooner, predicted and measured bytes by cause, what each attempt changed."""
    from orchestrator.service.terminal.tables import explanation_panel

    with show_spinner("asking what would start it sooner"):
        explanation = client_of(home).explanation(job_id)
    tell(dict(explanation), as_json, explanation_panel(explanation))


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log until the job ends.")] = False,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="Number of the attempt, counted from 1; without it, the last one."),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose log is printed, counted from 0.")] = 0,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Print the log of one rank of a job."""
    from orchestrator.service.terminal.follow import log_lines
    from orchestrator.service.visible import visible_log

    lines = log_lines(client_of(home), job_id, attempt, rank, follow)
    for number, text in lines:
        if as_json:
            print(json.dumps({"job": job_id, "attempt": number, "rank": rank, "text": text}), flush=True)
        else:
            sys.stdout.write(visible_log(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()


@app.command()
def get(
    job_id: JobId,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="New folder; without it, one of the job's name.")
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Fetch the output folder of a job, whole or not at all."""
    folder = (to or Path(job_id)).expanduser()
    size_bytes, left_out = client_of(home).fetch_output(job_id, folder)
    summary = f"{format_bytes(size_bytes)} are in {folder}."
    if left_out:
        summary += f" Links that leave the folder were left out: {left_out}."
    tell({"folder": str(folder), "bytes": size_bytes, "left_out": left_out}, as_json, summary)


app.command()(verbs.cancel)
app.command()(verbs.hold)
app.command()(verbs.release)
app.command()(verbs.suspend)
app.command()(verbs.resume)
app.command()(verbs.update)
app.command()(verbs.retry)


@app.command()
def drain(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Node to drain; without it, the state of every node is shown.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let the node take new attempts again.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Drain a node: it takes no new attempt, and running ones go on. Shows the jobs on each node."""
    from orchestrator.service.terminal.tables import nodes_table

    client = client_of(home)
    if node is not None:
        client.drain(node, undo=undo)
    elif undo:
        raise SpecError("say which node shall take again what comes", path="NODE")
    live = client.cluster()
    answer = {name: live[name] for name in ("nodes", "drained")}
    tell(answer, as_json, nodes_table(live["nodes"], live["drained"]))


# -------------------------------------------------------------------------------------------------------- looking ahead


app.command()(demo)
app.command("open")(browse.open_pages)
app.command()(planning.plan)
app.command()(planning.estimate)
app.command()(planning.fit)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def init(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="Training command or script; read, never run.")
    ],
    run_help: Annotated[
        bool, typer.Option("--run-help", help="Run the command with --help, up to 20 s, to read its flags.")
    ] = False,
) -> None:
    """Print a job file for a training command, proposed from its files and options."""
    from orchestrator.service.commands.init.proposal import proposal

    with show_spinner("reading the command's files"):
        job_file = proposal(command, Path.cwd(), os.environ, run_help)
    sys.stdout.write(job_file)


app.command()(comparing.compare)
app.command()(simulation.simulate)
app.command()(forecast.forecast)
app.command()(simulation.replay)
app.command()(report.report)
app.command()(diagnosis.diagnose)
app.command()(watch.watch)


@app.command()
def calibrate(
    tracking_uri: Annotated[
        str,
        typer.Option("--from-mlflow", metavar="URI", help="Address of the MLflow server that recorded the attempts."),
    ],
    experiment: Annotated[str, typer.Option("--experiment", help="Name of the MLflow experiment.")] = "orchestrator",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Calibrate the service with attempts that another home recorded in MLflow."""
    from orchestrator.backends.mlflow.outcomes import read_outcomes

    client = client_of(home)
    outcomes = read_outcomes(tracking_uri, experiment)
    new = client.observe(outcomes)
    tell({"found": len(outcomes), "new": new}, as_json, f"{len(outcomes)} outcomes found, {new} of them new.")


@app.command()
def schema(name: Annotated[SchemaName, typer.Argument(help="Kind of file.")] = SchemaName.JOB) -> None:
    """Print the JSON Schema of job or cluster files, for editors."""
    from orchestrator.specs.cluster import cluster_json_schema
    from orchestrator.specs.job.spec import job_json_schema

    print(json.dumps(job_json_schema() if name is SchemaName.JOB else cluster_json_schema(), indent=2))


def _reachable(endpoint: Endpoint) -> str:
    """How other machines reach the service, and join it, in words."""
    return (
        f"\nOther machines: https://HOST:{endpoint.port} (bound to {endpoint.host}). There, with a token of "
        f"`orc token create USER`:\n  orc login https://HOST:{endpoint.port} --fingerprint {endpoint.fingerprint()}"
        f"\nA machine that shares the home folder adds its devices by `orc join {endpoint.address}:{endpoint.port}`. "
        "`orc token join` prints the token for it."
    )


app.command()(purge.purge)
app.command()(machines.join)
app.command()(machines.leave)
app.add_typer(machines.clusters, name="cluster")
access.tokens.command("join")(machines.join_token)
app.command()(access.login)
app.command()(access.logout)
app.command()(access.whoami)
app.command()(access.audit)
app.add_typer(access.users, name="user")
app.add_typer(access.tokens, name="token")
app.add_typer(notify.notify, name="notify")


if __name__ == "__main__":
    main()
