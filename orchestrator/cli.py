"""The commands. Each reads its input, asks the service or the planner, prints the answer, and says how it went.

Exit codes: 0 done, 1 it failed (or the job did), 2 bad input: nothing was stored or started.
"""

# Imports of heavy packages stand in the commands that need them: `orc plan` answers within a second.
from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.server.logins import DEFAULT_HOME
from orchestrator.service.terminal import access
from orchestrator.service.terminal.options import SERVER, AsJson, Home, client_of, service_of
from orchestrator.service.terminal.output import console_on, tell
from orchestrator.specs.errors import IllegalPlan, OrchestratorError, SpecError
from orchestrator.specs.fault import Fault, FaultKind

if TYPE_CHECKING:
    from orchestrator.service.server.endpoint import Endpoint

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plans, places, recovers and compares GPU training jobs by the memory they need.",
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="Job file (YAML).")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, as `orc queue` shows it.")]
Cluster = Annotated[Path | None, typer.Option("--cluster", help="Cluster file (YAML).")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Say a setting otherwise.")]


ON_THIS_MACHINE = ("up", "down", "doctor", "replay")  # commands about the home folder itself


class SchemaName(StrEnum):
    """What `orc schema` can describe."""

    JOB = "job"
    CLUSTER = "cluster"


class QueueTime(StrEnum):
    """Which moment of the live queue `orc simulate` can begin from."""

    NOW = "now"


class Aim(StrEnum):
    """What `orc simulate` lets the queue aim at: an objective, or one after the other."""

    COMPLETION = "completion"
    MAKESPAN = "makespan"
    BOTH = "both"


def _say_version(asked: bool) -> None:
    if asked:
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
    try:
        app(args=arguments)
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, SpecError | IllegalPlan) else 1)


# ------------------------------------------------------------------------------------------------------- the service


@app.command()
def up(
    home: Home = DEFAULT_HOME,
    cluster: Cluster = None,
    ray: Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help="Ray to use, as host:port.")] = None,
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
    as_json: AsJson = False,
) -> None:
    """Start the service; without a cluster file on two virtual devices of this machine."""
    from orchestrator.service.server.client import service_file
    from orchestrator.service.server.endpoint import endpoint_of, kept_endpoint
    from orchestrator.service.server.intake import read_cluster
    from orchestrator.service.server.lifecycle import start

    home = home.expanduser()
    read_cluster(cluster)
    if listen is None and (tls_cert or tls_key or allowed_hosts):
        raise SpecError("say where other machines are served", source="--listen", allowed="HOST:PORT")
    endpoint = endpoint_of(home, listen, tls_cert, tls_key, tuple(allowed_hosts or ())) if listen else None
    started = start(home, cluster, ray, endpoint)
    with closing(client_of(home)) as client:
        answer = {"started": started, **service_file(home), **client.cluster()}
    if (served := kept_endpoint(home)) is not None:
        answer["listen"] = {"host": served.host, "port": served.port, "fingerprint": served.fingerprint()}
    words = "is up" if started else "was up already"
    nodes = sum(len(node["free_bytes"]) for node in answer["nodes"])
    records = ", ".join(f"{name} at {address}" for name, address in answer["trackers"].items())
    tell(
        answer,
        as_json,
        f"The service {words}: {answer['name']}, {nodes} devices. Records: {records}. Home: {home}"
        + (_reachable(served) if served is not None else ""),
    )


@app.command()
def down(
    home: Home = DEFAULT_HOME,
    force: Annotated[
        bool, typer.Option("--force", help="Although jobs run: they restart at the next `orc up`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the service, its Ray and its MLflow."""
    from orchestrator.service.server.lifecycle import stop

    stop(home.expanduser(), force)
    tell({"stopped": True}, as_json, "The service is down. Its queue and records stay in the home folder.")


@app.command()
def doctor(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Say what is missing on this machine, and how to mend it."""
    from dataclasses import asdict

    from orchestrator.service.commands.doctor import BAD, findings, findings_table

    found = findings(home.expanduser())
    tell({"findings": [asdict(finding) for finding in found]}, as_json, findings_table(found))
    raise typer.Exit(any(finding.verdict == BAD for finding in found))


# ---------------------------------------------------------------------------------------------------------- the jobs


@app.command()
def submit(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Job files (YAML).")],
    settings: Settings = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Put jobs into the queue, all or none; 1 where one asks for a guarantee that cannot be given."""
    from orchestrator.service.server.intake import read_jobs, read_overrides
    from orchestrator.service.terminal.tables import promise_words

    overrides = read_overrides(settings or [])
    specs = [spec for file in files for spec in read_jobs(file, overrides, home)]
    client = client_of(home)
    ids, late, promises = client.submit_all([spec.model_dump(mode="json") for spec in specs])
    tell({"ids": ids, "late": late, "promises": promises}, as_json, "\n".join(ids))
    for job_id, words in late.items():
        print(f"{job_id} {words}", file=sys.stderr)
    for job_id, promise in promises.items():
        print(f"{job_id} {promise_words(promise)}", file=sys.stderr)
    raise typer.Exit(any(promise["refused"] for promise in promises.values()))


@app.command()
def run(file: JobFile, settings: Settings = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Submit a job, follow it to its end, and exit with its result; starts the service where it is not up."""
    from orchestrator.service.server.intake import read_job, read_overrides
    from orchestrator.service.terminal.follow import run_to_end

    spec = read_job(file, read_overrides(settings or []), home)
    raise typer.Exit(run_to_end(spec, None, service_of(home), as_json))


@app.command()
def rehearse(
    file: JobFile,
    fail: Annotated[FaultKind, typer.Option("--fail", help="What to make happen, for real.")],
    rank: Annotated[int, typer.Option("--rank", min=0, help="In this rank.")] = 0,
    step: Annotated[int, typer.Option("--step", min=1, help="Before this step completes.")] = 1,
    settings: Settings = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Let a job fail in its first attempt, and watch it recover on the ordinary path."""
    from orchestrator.service.server.intake import read_job, read_overrides
    from orchestrator.service.terminal.follow import run_to_end

    spec = read_job(file, read_overrides(settings or []), home)
    if rank >= spec.gpus.max:
        allowed = f"0 to {spec.gpus.max - 1}: the job takes {spec.gpus.max} gpus at most"
        raise SpecError("the job never has this rank", source="--rank", got=rank, allowed=allowed)
    if not spec.is_script and step > spec.training.max_steps:
        allowed = f"1 to training.max_steps={spec.training.max_steps}"
        raise SpecError("the job ends before this step", source="--step", got=step, allowed=allowed)
    raise typer.Exit(run_to_end(spec, Fault(kind=fail, rank=rank, step=step), service_of(home), as_json))


@app.command()
def queue(
    ended: Annotated[int, typer.Option("--ended", min=0, max=1000, help="Show so many that ended last.")] = 100,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """List the jobs: how each stands, with which plan, and why."""
    from orchestrator.service.terminal.tables import queue_table

    jobs = client_of(home).jobs(ended)
    tell({"jobs": jobs}, as_json, queue_table(jobs) if jobs else "The queue is empty. `orc submit FILE` adds a job.")


@app.command()
def teams(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show how the cluster is shared: what each team and user has a share of, used, holds and waits for."""
    from orchestrator.service.views.teams import teams_table

    shared = client_of(home).teams()
    words = "Nothing is shared: the cluster file's `policy` names no teams."
    tell({"teams": shared}, as_json, teams_table(shared) if shared else words)


@app.command()
def show(job_id: JobId, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show everything about one job: attempts, changes, predicted and measured peaks, failures."""
    from orchestrator.service.terminal.tables import job_panel

    job, _ = client_of(home).job(job_id)
    tell(dict(job), as_json, job_panel(job))


@app.command()
def explain(job_id: JobId, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Explain a job: bytes by cause and moment beside what was measured, what was wrong, and what it changed."""
    from orchestrator.service.terminal.tables import explanation_panel

    explanation = client_of(home).explanation(job_id)
    tell(dict(explanation), as_json, explanation_panel(explanation))


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="The last one, where none is named.")] = None,
    rank: Annotated[int, typer.Option("--rank", min=0)] = 0,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Print what a rank of a job wrote."""
    from orchestrator.service.terminal.follow import log_lines

    lines = log_lines(client_of(home), job_id, attempt, rank, follow)
    for number, text in lines:
        if as_json:
            print(json.dumps({"job": job_id, "attempt": number, "rank": rank, "text": text}), flush=True)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()


@app.command()
def cancel(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs, as `orc queue` shows them.")],
    whole_arrays: Annotated[bool, typer.Option("--array", help="And all others of their arrays.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """End jobs, all of them or, where one cannot be, none: their ranks get a SIGTERM and ten seconds."""
    cancelled = client_of(home).cancel(job_ids, whole_arrays=whole_arrays)
    are = "is" if len(cancelled) == 1 else "are"
    tell({"cancelled": cancelled}, as_json, f"{', '.join(cancelled)} {are} being cancelled.")


@app.command()
def drain(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="None: only show how each stands.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take again what comes.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Let a node take nothing new: what runs there goes on to its end. Shows who is still on which node."""
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


@app.command()
def plan(
    file: JobFile,
    cluster: Cluster = None,
    settings: Settings = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Show which plan a job would get, what it costs, and why not a faster one. Starts nothing."""
    from orchestrator.service.commands.hardware import hardware_of
    from orchestrator.service.commands.plan import forecast
    from orchestrator.service.server.intake import read_job, read_overrides
    from orchestrator.service.terminal.tables import forecast_panel

    spec = read_job(file, read_overrides(settings or []), home, to_run=False)
    nodes, observations = hardware_of(service_of(home), cluster)
    gc.disable()  # one answer and an end: looking for garbage took a tenth of 70B's 0.4 s; 55 MiB are used either way
    answer = forecast(spec, nodes, observations)
    tell(dict(answer), as_json, forecast_panel(answer))
    raise typer.Exit(answer["chosen"] is None)


@app.command()
def estimate(
    file: JobFile,
    settings: Settings = None,
    cluster: Cluster = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Estimate one given plan of a job: `--set zero_stage=3 --set micro_batch=2 --set dp=8`."""
    from orchestrator.service.commands.hardware import hardware_of
    from orchestrator.service.commands.plan import forecast_of
    from orchestrator.service.server.intake import read_job, read_overrides
    from orchestrator.service.terminal.tables import candidate_panel

    spec = read_job(file, (), home, to_run=False)
    given = read_overrides(settings or [])
    nodes, observations = hardware_of(service_of(home), cluster)
    answer = forecast_of(spec, given, nodes, observations)
    tell(dict(answer), as_json, candidate_panel(answer))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def init(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What you type to train, or a script. Read, never run.")
    ],
) -> None:
    """Propose a job file for a training command, from its files and flags. Prints it; what it does not know it says."""
    from orchestrator.service.commands.init.proposal import proposal

    sys.stdout.write(proposal(command, Path.cwd()))


@app.command()
def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="What is submitted when: a published trace (CSV), a list of jobs (YAML)."),
    ] = None,
    queue: Annotated[
        QueueTime | None, typer.Option("--queue", help="Instead of a trace: what the service has to do, from now on.")
    ] = None,
    cluster: Cluster = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same one gives the same run.")] = 0,
    noise: Annotated[
        float, typer.Option("--noise", min=0.0, max=2.0, help="How wrong told lengths are: sigma of their logarithm.")
    ] = 0.0,
    oom: Annotated[
        float, typer.Option("--oom", min=0.0, max=1.0, help="Share of jobs that run out of memory at first.")
    ] = 0.0,
    node_loss: Annotated[
        float, typer.Option("--node-loss", min=0.0, max=1.0, help="Share of attempts that take down a node.")
    ] = 0.0,
    launch_cost: Annotated[
        float | None, typer.Option("--launch-cost", min=0.0, metavar="SECONDS", help="Instead of the cluster file's.")
    ] = None,
    objective: Annotated[
        Aim | None, typer.Option("--objective", help="What the queue aims at, instead of the cluster file's.")
    ] = None,
    gantt: Annotated[Path | None, typer.Option("--gantt", metavar="FILE", help="Draw who ran where (PNG).")] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Play a trace on a cluster, with the decisions of the service, in simulated time.

    A list says `jobs: [{at: 10min, file: job.yaml}, ...]`, and `begins: 2026-11-23T18:00` where hours or deadlines are.
    `--queue now` asks what would become of the live queue; jobs that run go on from their newest checkpoint.
    """
    from orchestrator.backends.simulated.traces import misjudged, read_trace
    from orchestrator.service.commands.job_list import read_list
    from orchestrator.service.commands.replay import kept_state
    from orchestrator.service.commands.simulate import Trouble, from_queue
    from orchestrator.service.commands.simulate import simulate as play
    from orchestrator.service.server.intake import read_cluster
    from orchestrator.service.server.lifecycle import journal_url
    from orchestrator.service.terminal import gantt as drawing
    from orchestrator.service.terminal.simulation_tables import compared_table, simulated_table
    from orchestrator.specs.policy import Objective

    home = home.expanduser()
    if (trace is None) == (queue is None):
        raise SpecError("say what to play", path="TRACE", allowed="a trace, or --queue now")
    if trace is not None:
        played = read_list(trace, home) if trace.suffix in (".yaml", ".yml") else read_trace(trace)
    else:
        played, unknown = from_queue(kept_state(journal_url(home)))
        if unknown:
            console_on(sys.stderr).print(f"Left out, as nobody says how long they run: {', '.join(unknown)}")
    kept = home / "cluster.yaml"
    hardware = read_cluster(cluster or (kept if queue and kept.exists() else None))
    if launch_cost is not None:
        hardware = hardware.model_copy(update={"launch_cost": launch_cost})
    told = misjudged(played, noise, seed)
    trouble = Trouble(oom_chance=oom, node_loss_chance=node_loss)
    if objective is Aim.BOTH:
        if gantt is not None:
            raise SpecError("a chart shows one objective", path="--gantt", allowed="--objective completion or makespan")
        runs = {each: play(told, hardware.aiming(each), seed=seed, trouble=trouble) for each in Objective}
        reports = {each.value: one.report for each, one in runs.items()}
        tell(reports, as_json, compared_table(runs))
        return
    if objective is not None:
        hardware = hardware.aiming(Objective(objective.value))
    run = play(told, hardware, seed=seed, trouble=trouble)
    if gantt is not None:
        drawing.figure(f"{told.name} on {hardware.name}", run.outcomes, hardware).savefig(gantt)
    if as_json:
        print(json.dumps(run.report, indent=2))
        return
    console = console_on(sys.stdout)
    console.print(simulated_table(run))
    console.print(drawing.picture(run.outcomes, hardware), highlight=False, markup=False)


@app.command()
def forecast(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Tell when each job that runs or waits is expected to start and to end, with nothing more submitted."""
    import time

    from orchestrator.service.commands.replay import expected_jobs, kept_state
    from orchestrator.service.server.lifecycle import journal_url
    from orchestrator.service.terminal.simulation_tables import expected_table

    home = home.expanduser()
    expected = expected_jobs(kept_state(journal_url(home)), time.time())
    tell({"jobs": expected}, as_json, expected_table(expected) if expected else "No job runs or waits.")


@app.command()
def replay(
    journal: Annotated[
        str | None, typer.Argument(metavar="[JOURNAL]", help="Of a service, up or not: a file, an address.")
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Make every decision of a journal again: what was decided, why, and where this version decides otherwise."""
    from orchestrator.service.commands.replay import kept_events
    from orchestrator.service.commands.replay import replay as decide_again
    from orchestrator.service.server.lifecycle import journal_url
    from orchestrator.service.terminal.simulation_tables import replay_table

    decided = list(decide_again(kept_events(journal or journal_url(home.expanduser()))))
    tell({"decisions": decided}, as_json, replay_table(decided))
    raise typer.Exit(not all(decision["same"] for decision in decided))


@app.command()
def calibrate(
    tracking_uri: Annotated[str, typer.Option("--from-mlflow", metavar="URI", help="MLflow that knows the outcomes.")],
    experiment: Annotated[str, typer.Option("--experiment", help="Its experiment.")] = "orchestrator",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Teach the service what attempts of other homes, or of earlier ones, have measured."""
    from orchestrator.backends.mlflow.outcomes import read_outcomes

    client = client_of(home)
    found = read_outcomes(tracking_uri, experiment)
    kept = client.observe(found)
    tell({"found": len(found), "new": kept}, as_json, f"{len(found)} outcomes found, {kept} of them new.")


@app.command()
def schema(name: Annotated[SchemaName, typer.Argument()] = SchemaName.JOB) -> None:
    """Print the JSON Schema of job or cluster files, for editors."""
    from orchestrator.specs.cluster import cluster_json_schema
    from orchestrator.specs.job.spec import job_json_schema

    print(json.dumps(job_json_schema() if name is SchemaName.JOB else cluster_json_schema(), indent=2))


def _reachable(endpoint: Endpoint) -> str:
    """How other machines reach the service, in words."""
    return (
        f"\nOther machines: https://HOST:{endpoint.port} (bound to {endpoint.host}). There, with a token of "
        f"`orc token create USER`:\n  orc login https://HOST:{endpoint.port} --fingerprint {endpoint.fingerprint()}"
    )


app.command()(access.login)
app.command()(access.logout)
app.command()(access.whoami)
app.command()(access.audit)
app.add_typer(access.users, name="user")
app.add_typer(access.tokens, name="token")


if __name__ == "__main__":
    main()
