"""`orc plan`, `estimate`, `fit` and `calibrate`: what a job needs and gets, before anything is started."""

# Imports of heavy packages stand in the commands that need them: `orc plan` answers within a
# second.
from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import (
    SERVER,
    AsJson,
    Cluster,
    Home,
    JobFile,
    Pinned,
    Settings,
    connect_client,
    select_login_or_home,
)
from orchestrator.service.terminal.output import print_answer, show_spinner
from orchestrator.specs.errors import SpecError
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from orchestrator.planning.ways_out import Trace
    from orchestrator.service.intake.profiling import TraceScope
    from orchestrator.specs.job.spec import JobSpec

Cards = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="[[NODESx]NUMBERx]NAME[:HOST][@NETWORK]",
        help="Cards of the catalogue, such as 2xa100-80gb:1TiB or 16xh100-80gb@400Gb, and no cluster.",
    ),
]


def plan(
    file: JobFile,
    cluster: Cluster = None,
    cards: Cards = None,
    settings: Settings = None,
    pins: Pinned = None,
    way_out: Annotated[
        int | None,
        typer.Option(
            "--way-out",
            metavar="N",
            help="Print the job file of a numbered way out, if nothing fits.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="DIR",
            help="Write the plan as files with a line that runs it without orc.",
        ),
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Show the plan a job would get, its memory and time, and why faster plans do not fit. Starts nothing."""
    from orchestrator.service.commands.hardware import select_nodes_and_observations
    from orchestrator.service.commands.plan import (
        export_job,
        make_job_file_of_way_out,
        make_trace_scope,
        plan_job,
    )
    from orchestrator.service.intake.intake import read_job, read_options
    from orchestrator.service.terminal.plan_tables import make_plan_panel

    overrides = read_options(settings, pins)
    nodes, observations = select_nodes_and_observations(select_login_or_home(home), cluster, cards)
    plans = partial(make_trace_scope, nodes)
    with show_spinner("reading the model"):
        spec = read_job(
            file,
            overrides,
            home,
            to_run=False,
            allow_other_machine=SERVER.get() is not None,
            trace_scope=plans,
        )
    if export is not None:
        script = export_job(spec, nodes, observations, export)
        print_answer({"run": str(script)}, as_json, f"{script} runs the plan without orc.")
        return
    # one answer and an end: looking for garbage took a tenth of 70B's 0.4 s; 55 MiB are used either
    # way
    gc.disable()
    with show_spinner("searching plans"):
        answer = plan_job(spec, nodes, observations, _make_trace_function(home, str(file), plans))
    if cards is not None and ":" not in cards:
        answer["hardware"] += f", assumed (`--gpu {cards.partition('@')[0]}:1TiB` says another)"
    if way_out is not None:
        print(make_job_file_of_way_out(answer, way_out), end="")
        return
    print_answer(dict(answer), as_json, make_plan_panel(answer))
    raise typer.Exit(answer["chosen"] is None)


def estimate(
    file: JobFile,
    settings: Settings = None,
    cluster: Cluster = None,
    cards: Cards = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Estimate memory and step time of one given plan of a job, such as `--set zero_stage=3 --set dp=8`."""
    from orchestrator.service.commands.hardware import select_nodes_and_observations
    from orchestrator.service.commands.plan import estimate_plan, make_trace_scope
    from orchestrator.service.intake.intake import read_job, read_overrides
    from orchestrator.service.terminal.plan_tables import make_candidate_panel

    overrides = read_overrides(settings)
    nodes, observations = select_nodes_and_observations(select_login_or_home(home), cluster, cards)
    plans = partial(make_trace_scope, nodes, plan_settings=overrides)
    with show_spinner("reading the model"):
        spec = read_job(
            file,
            (),
            home,
            to_run=False,
            allow_other_machine=SERVER.get() is not None,
            trace_scope=plans,
        )
    answer = estimate_plan(spec, overrides, nodes, observations)
    print_answer(dict(answer), as_json, make_candidate_panel(answer))


def fit(
    job: Annotated[
        str,
        typer.Argument(metavar="FILE|hf:NAME", help="Job file (YAML), or a transformers model."),
    ],
    settings: Settings = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Show on which cards of the catalogue a job or a model has a plan, and on how few of them. Starts nothing."""
    from orchestrator.service.commands.fit import read_job_and_fit_rows
    from orchestrator.service.intake.intake import read_overrides
    from orchestrator.service.terminal.fit_table import make_fit_panel
    from orchestrator.specs.published import load_published

    overrides = read_overrides(settings)
    name = job.removeprefix("hf:") if job.startswith("hf:") else None
    if name is None and not Path(job).suffix and not Path(job).exists():
        hint = f"a model of the hub has `hf:` before its name: `orc fit hf:{job}`"
        raise SpecError("the file does not exist", source=job, hint=hint)
    if name == "":
        raise SpecError(
            "a model has a name", source="orc fit", got=job, allowed=", ".join(load_published())
        )

    source = Path(job) if name is None else job
    with show_spinner("planning on each card"):
        spec, rows = read_job_and_fit_rows(
            source, overrides, home, allow_other_machine=SERVER.get() is not None
        )
    print_answer(
        {"job": spec.name, "rows": rows},
        as_json,
        make_fit_panel(spec, rows, is_memory_assumed=name is not None),
    )


def calibrate(
    tracking_uri: Annotated[
        str,
        typer.Option(
            "--from-mlflow",
            metavar="URI",
            help="Address of the MLflow server that recorded the attempts.",
        ),
    ],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Calibrate the service with attempts that another home recorded in MLflow."""
    from orchestrator.backends.mlflow.outcomes import read_outcomes

    client = connect_client(home)
    outcomes = read_outcomes(tracking_uri)
    new = client.send_and_count_new_observations(outcomes)
    print_answer(
        {"found": len(outcomes), "new": new},
        as_json,
        f"{len(outcomes)} outcomes found, {new} of them new.",
    )


def _make_trace_function(
    home: Path, job_source: str, trace_scope: Callable[[JobSpec], TraceScope]
) -> Trace:
    """Return a function that adds a traced profile of its model to a job, if no formula knows the
    model.
    """

    def trace(spec: JobSpec) -> JobSpec:
        from orchestrator.memory.profiles import is_memory_known
        from orchestrator.service.intake.profiling import trace_model

        if is_memory_known(spec):
            return spec
        return spec.model_copy(
            update={"traced": trace_model(spec, home.expanduser(), job_source, trace_scope(spec))}
        )

    return trace
