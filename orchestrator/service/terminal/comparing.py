"""`orc compare`: runs a job under several strategies, waits for them and compares cost and results."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.comparison_files import WRITERS
from orchestrator.service.terminal.options import (
    AsJson,
    Home,
    Pinned,
    Settings,
    check_finite,
    connect_client,
    select_login_or_home,
)
from orchestrator.service.terminal.output import make_console, print_answer
from orchestrator.specs.choices import MicroBatchChoice
from orchestrator.specs.errors import SpecError
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from orchestrator.service.client.client import Client
    from orchestrator.service.views.comparison import ComparisonView

LINK_S = 20.0  # longest wait for MLflow's page: records go there after the jobs have ended
LINK_POLL_S = 0.5
TIMEOUT_MAX_S = 31 * 86400.0
PICTURES = (".png", ".svg", ".pdf")


def compare(
    job: Annotated[
        str,
        typer.Argument(
            metavar="FILE|JOB", help="Job file (YAML), or a job of a comparison to show again."
        ),
    ],
    choice: Annotated[
        str,
        typer.Option(
            "--strategies",
            metavar="WAYS",
            help="`all` ways to shard, `frontier`, ZeRO stages as `zero=0..3`, or a file with a list of pins.",
        ),
    ] = "all",
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=2,
            help="Optimizer steps of each strategy; default: 30, or fewer of the file.",
        ),
    ] = None,
    micro: Annotated[
        MicroBatchChoice,
        typer.Option(
            "--micro",
            help="Micro-batch of all: the largest with which all fit, or the best of each.",
        ),
    ] = MicroBatchChoice.COMMON,
    repeats: Annotated[
        int,
        typer.Option("--repeats", min=1, help="Times that each is trained: 3 give 95 % intervals."),
    ] = 1,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1,
            max=TIMEOUT_MAX_S,
            callback=check_finite,
            help="Longest wait for the strategies.",
        ),
    ] = 3600.0,
    learning_rates: Annotated[
        list[float] | None,
        typer.Option(
            "--learning-rate",
            metavar="RATE",
            help="Train each strategy with this learning rate; repeatable. Default: the job's own.",
        ),
    ] = None,
    pictures: Annotated[
        list[Path] | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="PNG, SVG or PDF file for a picture of memory and time; repeatable.",
        ),
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            "--table",
            metavar="FILE",
            help="CSV, Markdown (.md) or LaTeX (.tex) file of the rows; repeatable.",
        ),
    ] = None,
    settings: Settings = None,
    pins: Pinned = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Compare strategies: run a job under each for some steps, and show memory, time, loss and cost side by side."""
    from orchestrator.service.terminal.comparison_tables import make_comparison_panel

    files = [
        *_check_suffixes("--picture", pictures or (), PICTURES),
        *_check_suffixes("--table", tables or (), tuple(WRITERS)),
    ]
    with closing(connect_client(home)) as client:
        job_id = job
        if Path(job).is_file():
            ids = _submit_comparison(
                client,
                Path(job),
                choice,
                micro,
                steps,
                repeats,
                learning_rates or (),
                settings,
                pins,
                home,
                as_json,
            )
            job_id = ids[0]
            if not _wait_for_jobs(client, ids, timeout_s, as_json):
                print(
                    f"jobs go on after {timeout_s:g} s; `orc compare {job_id}` shows them",
                    file=sys.stderr,
                )
        view = _fetch_comparison_with_mlflow_url(client, job_id)
    _write_tables_and_pictures(view, files)
    print_answer(dict(view), as_json, make_comparison_panel(view))
    if view["mlflow"] and not as_json:
        print(f"MLflow: {view['mlflow']}")  # whole, so that a terminal can open it
    raise typer.Exit(
        not (view["complete"] and any(row["outcome"] == "finished" for row in view["rows"]))
    )


def _write_tables_and_pictures(view: ComparisonView, files: Sequence[Path]) -> None:
    """Write the comparison into each file as a table or a picture, by its suffix.

    If the comparison was cancelled, files of an earlier one stay.
    """
    if files and any(row["outcome"] == "cancelled" for row in view["rows"]):
        print("the comparison was cancelled: the files stay as they were", file=sys.stderr)
        return
    for file in files:
        if file.suffix in WRITERS:
            file.write_text(WRITERS[file.suffix](view))
        else:
            write_picture_or_explain(view, file)


def _check_suffixes(
    option_name: str, files: Sequence[Path], suffixes: Sequence[str]
) -> Sequence[Path]:
    """Return the files. Raises SpecError for the first file that has none of these suffixes."""
    for file in files:
        if file.suffix not in suffixes:
            allowed = ", ".join(suffixes)
            raise SpecError(
                "no file of this kind", path=option_name, got=str(file), allowed=allowed
            )
    return files


def _submit_comparison(
    client: Client,
    file: Path,
    strategies_option: str,
    micro_batch_choice: MicroBatchChoice,
    steps: int | None,
    repeats: int,
    learning_rates: Sequence[float],
    settings: Sequence[str] | None,
    pins: str | None,
    home: Path,
    as_json: bool,
) -> list[str]:
    """Submit the jobs of a new comparison of strategies, and return their ids."""
    from orchestrator.service.client.sending import read_and_upload_jobs
    from orchestrator.service.commands.compare import choose_strategies, make_comparison_jobs
    from orchestrator.service.commands.hardware import select_nodes_and_observations
    from orchestrator.service.intake.intake import read_options

    service = select_login_or_home(home)
    overrides = read_options(settings, pins)
    (spec,) = read_and_upload_jobs(service, [file], overrides, home, only_one=True)
    choices = choose_strategies(
        spec, strategies_option, *select_nodes_and_observations(service, None), micro_batch_choice
    )
    specs = make_comparison_jobs(spec, choices, steps, repeats, learning_rates)
    ids = client.submit_jobs([job_spec.model_dump(mode="json") for job_spec in specs])["ids"]
    length = "" if spec.is_script else f", {specs[0].training.max_steps} steps each"
    times = f", {repeats} times" if repeats > 1 else ""
    rates = f", {len(learning_rates)} learning rates" if learning_rates else ""
    print(
        f"{ids[0]}: {len(choices)} strategies{rates}{length}{times}, one at a time",
        file=sys.stderr if as_json else sys.stdout,
    )
    return list(ids)


def _wait_for_jobs(client: Client, job_ids: Sequence[str], timeout_s: float, as_json: bool) -> bool:
    """Wait at most `timeout_s` for the jobs; return whether all have ended.

    Print a line at each quarter of a job's steps, and at its end.
    """
    from orchestrator.service.terminal.follow import ENDS

    console = make_console(sys.stderr if as_json else sys.stdout)
    until_s = time.monotonic() + timeout_s
    for number, job_id in enumerate(job_ids, 1):
        job, version = client.fetch_job_and_version(job_id)
        quarter = 0
        while job["status"] not in ENDS:
            if time.monotonic() > until_s:
                return False
            progress = job["progress"]
            steps = progress and progress["max_steps"]
            if progress and steps and 4 * progress["step"] // steps > quarter:
                quarter = 4 * progress["step"] // steps
                line = f"{number}/{len(job_ids)} step {progress['step']} of {steps}"
                console.print(line, highlight=False, markup=False, style="dim")
            job, version = client.fetch_job_and_version(job_id, version)
        last = job["attempts"][-1] if job["attempts"] else None
        line = job["status"] if last is None else f"{last['outcome']}: {last['plan']}"
        console.print(f"{number}/{len(job_ids)} {line}", highlight=False, markup=False)
    return True


def _fetch_comparison_with_mlflow_url(client: Client, job_id: str) -> ComparisonView:
    """Return the comparison; it has the URL of its MLflow page if that is found in time."""
    until_s = time.monotonic() + LINK_S
    view = client.fetch_comparison(job_id)
    has_runs = (
        any(row["step_s"] is not None for row in view["rows"])
        and "mlflow" in client.fetch_cluster()["trackers"]
    )
    while view["complete"] and has_runs and view["mlflow"] is None and time.monotonic() < until_s:
        time.sleep(LINK_POLL_S)
        view = client.fetch_comparison(job_id)
    return view


def write_picture_or_explain(view: ComparisonView, file: Path) -> None:
    """Write the picture of a comparison to a file; print why if the comparison has none."""
    import matplotlib

    from orchestrator.backends.mlflow.frontier_png import draw_figure
    from orchestrator.service.views.records import parse_picture_view

    if view["picture"] is None:
        why = "no plan of the comparison has a predicted step time and memory"
        print(f"{file} is not written: {why}", file=sys.stderr)
    else:
        with matplotlib.rc_context(
            {"pdf.fonttype": 42}
        ):  # TrueType: many publishers refuse matplotlib's Type 3
            draw_figure(
                f"Strategies of {view['name']}", parse_picture_view(view["picture"]), ""
            ).savefig(file)
