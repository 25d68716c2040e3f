"""`orc simulate` and `orc replay`: the scheduler in simulated time, on a list of jobs, the live queue or the past."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Cluster, Home
from orchestrator.service.terminal.output import make_console, print_answer, show_spinner
from orchestrator.specs.errors import SpecError
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:
    from orchestrator.service.commands.simulate import Simulated
    from orchestrator.specs.cluster import ClusterSpec


class QueueTime(StrEnum):
    """The time from which `orc simulate` can begin with the live queue."""

    NOW = "now"


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="LIST",
            help="List of job files and their submission times (YAML).",
        ),
    ] = None,
    queue: Annotated[
        QueueTime | None,
        typer.Option("--queue", help="Play the live queue from now on, instead of a list."),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--share",
            metavar="RATE",
            help="Let two one-device jobs of a list share a card where planned bytes fit. Each runs at this part of"
            " its speed.",
        ),
    ] = None,
    cluster: Cluster = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Simulate a list of jobs on a cluster in simulated time, with the scheduler of the service.

    A list has `jobs: [{at: 10min, file: job.yaml}]`, and `begins: 2026-11-23T18:00` for deadlines and start windows.
    `--queue now` plays the live queue on, as `orc forecast` does.
    """
    from orchestrator.service.commands.job_list import read_job_list
    from orchestrator.service.commands.simulate import shift_maintenance
    from orchestrator.service.commands.simulate import simulate_trace as play
    from orchestrator.service.intake.cluster_file import load_cluster
    from orchestrator.service.intake.intake import read_cluster

    home = home.expanduser()
    if (trace is None) == (queue is None):
        raise SpecError("say what to play", path="LIST", allowed="a list of jobs, or --queue now")
    if share is not None and not 0 < share <= 1:
        raise SpecError(
            "a part of a job's speed", path="--share", got=share, allowed="above 0, at most 1"
        )
    if share is not None and queue:
        raise SpecError(
            "a play of the live queue shares no card", path="--share", allowed="a list of jobs"
        )
    hardware = load_cluster(home) if queue and cluster is None else read_cluster(cluster)
    with show_spinner("simulating"):
        if trace is None:
            run = _simulate_live_queue(hardware, home, is_live=cluster is None)
        else:
            played = read_job_list(trace, home)
            dated = shift_maintenance(hardware, played.begins_s)
            run = play(played, dated, share)
    _print_simulated(run, hardware, as_json=as_json)


def _print_simulated(simulated: Simulated, cluster: ClusterSpec, *, as_json: bool) -> None:
    from orchestrator.service.terminal.gantt import draw_gantt
    from orchestrator.service.terminal.simulation_tables import make_simulated_table

    if as_json:
        print(json.dumps(_make_report_data(simulated), indent=2))
        return
    console = make_console(sys.stdout)
    console.print(make_simulated_table(simulated))
    console.print(draw_gantt(simulated.outcomes, cluster), highlight=False, markup=False)


def _make_report_data(simulated: Simulated) -> dict[str, object]:
    """Return the simulation's report as JSON data.

    For jobs of the live queue it also has their start and end, in seconds from now.
    """
    outcomes = [
        {
            "job": outcome.job_id,
            "started_at_s": outcome.started_at_s,
            "ended_at_s": outcome.ended_at_s,
            "attempts": len(outcome.attempts),
        }
        for outcome in simulated.outcomes
        if outcome.job_id
    ]
    return {**simulated.report, **({"outcomes": outcomes} if outcomes else {})}


def _simulate_live_queue(cluster: ClusterSpec, home: Path, *, is_live: bool) -> Simulated:
    """Simulate the live queue on the cluster, and return the result; with `is_live`, on the live
    nodes.
    """
    from orchestrator.service.client.lifecycle import find_journal_url
    from orchestrator.service.commands.live_queue import advance_to_now, simulate_queue
    from orchestrator.service.commands.replay import read_state_and_coming_trials

    state, to_come = read_state_and_coming_trials(find_journal_url(home), home)
    held_ids = [job.id for job in state.live_jobs if job.held_by]
    if held_ids:
        make_console(sys.stderr).print(f"Not counted, since they are held: {', '.join(held_ids)}")
    run = simulate_queue(
        advance_to_now(state), cluster, is_live=is_live, coming_trials=to_come, home=home
    )
    _print_unfinished_jobs(run, held_ids)
    return run


def _print_unfinished_jobs(simulated: Simulated, held_ids: Sequence[str]) -> None:
    """Print the jobs that do not end in the simulation, without those that a user put on hold."""
    unfinished = (outcome.job_id for outcome in simulated.outcomes if outcome.ended_at_s is None)
    endless = [job_id for job_id in unfinished if job_id not in held_ids]
    if endless:
        make_console(sys.stderr).print(
            "Not known when these end, as nothing tells how long they or those before them take:"
            f" {', '.join(endless)}"
        )


def replay(
    journal: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOURNAL]",
            help="Journal: a SQLite file or a database address; without it, that of the home folder.",
        ),
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Replay the decisions of a journal. Exits with 1 where this version decides otherwise."""
    from orchestrator.service.client.lifecycle import find_journal_url
    from orchestrator.service.commands.replay import iterate_events
    from orchestrator.service.commands.replay import replay_history as decide_again
    from orchestrator.service.terminal.simulation_tables import make_replay_table

    with show_spinner("deciding again"):
        decisions = list(
            decide_again(iterate_events(journal or find_journal_url(home.expanduser())))
        )
    print_answer({"decisions": decisions}, as_json, make_replay_table(decisions))
    raise typer.Exit(not all(decision["same"] for decision in decisions))
